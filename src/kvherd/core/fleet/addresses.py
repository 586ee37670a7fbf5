"""The addresses of a host name over time: a judge of what its resolver answers."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

DOUBTS: Final = 3
"""Answers in a row without an address that was there, before it is given up: some resolvers tell a part at a time."""


@dataclass(slots=True)
class HostAddresses:
    """Addresses are taken up at once and given up slowly; no answer, or an empty one, changes nothing."""

    _missed: dict[str, int] = field(default_factory=dict)

    @property
    def current(self) -> tuple[str, ...]:
        return tuple(self._missed)

    def answered(self, addresses: Iterable[str]) -> tuple[str, ...]:
        """What is current now that the resolver said this."""
        told = dict.fromkeys(addresses, 0)
        if told:
            doubted = {one: missed + 1 for one, missed in self._missed.items() if one not in told}
            kept = {one: missed for one, missed in doubted.items() if missed < DOUBTS}
            self._missed = {one: 0 if one in told else kept[one] for one in self._missed if one in told or one in kept}
            self._missed.update(told)
        return self.current
