"""How much memory the bodies of all requests may take together, whoever sends them, with a key or without."""

from collections.abc import Collection
from operator import itemgetter
from typing import Protocol

from kvherd.core.errors import KvherdError
from kvherd.core.fleet.refusals import BodiesFull


class Holding(Protocol):
    @property
    def held_bytes(self) -> tuple[int, int]:
        """Of bodies: of the one that is being read, and of those that were."""
        ...

    def refuse(self, error: KvherdError) -> None:
        """Read nothing more, and answer so in place of the request that is being read."""
        ...


def make_room(connections: Collection[Holding], limit_bytes: int) -> None:
    """Refuse the largest bodies that are being read until all together are within the limit. What was read stays."""
    held = [(connection.held_bytes, connection) for connection in connections]
    over = sum(reading + read for (reading, read), _ in held) - limit_bytes
    if over <= 0:
        return
    for size, connection in sorted(((reading, one) for (reading, _), one in held), key=itemgetter(0), reverse=True):
        if over <= 0 or not size:
            return
        connection.refuse(BodiesFull(limit_bytes))
        over -= size
