"""What all connections of one server share, and what the server asks of each."""

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from kvherd.core.errors import KvherdError
from kvherd.ports.loop_turn import LoopTurn
from kvherd.services.gateway.relay.edge import AsgiApp, DataHandler, Judge, Launch, RelayLimits, Unread


class Connected(Protocol):
    """A client's connection."""

    transport: asyncio.Transport

    def check(self, now_s: float) -> None: ...

    @property
    def held_bytes(self) -> tuple[int, int]: ...

    def refuse(self, error: KvherdError) -> None: ...

    def stop(self) -> None: ...

    def cut_off(self) -> None: ...


@dataclass(slots=True)
class Premises:
    """What the connections of one server share. `now_s` is a clock that moves only with the server's tick: reading
    the real one for every request would cost more than the precision is worth.
    """

    handler: DataHandler
    launch: Launch | None
    app: AsgiApp
    limits: RelayLimits
    group: asyncio.TaskGroup
    loop: asyncio.AbstractEventLoop
    turn: LoopTurn
    unread: Unread
    judge: Judge | None = None
    connections: set[Connected] = field(default_factory=set)
    deserted: asyncio.Event = field(default_factory=asyncio.Event)
    now_s: float = 0.0
    stopping: bool = False
