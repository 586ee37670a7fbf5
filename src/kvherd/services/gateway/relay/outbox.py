"""What came for many clients in one turn of the event loop goes out at its end, one write after the other.

An engine's step brings an event for each of its streams. To read them all and then to write them all stays within the
same code, of the kernel too, and finds their readers awake more often than a write after each read. Nothing waits for
longer than the turn takes, nor behind more than `_MOST` others.
"""

import asyncio
from typing import Final, Protocol

_MOST: Final = 32


class Waiting(Protocol):
    def release(self) -> None:
        """Write what waits. Must not raise: others wait behind it."""
        ...


class Outbox:
    __slots__ = ("_due", "_loop", "_waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: list[Waiting] = []
        self._due = False

    def add(self, one: Waiting) -> None:
        """It is released before the loop reads from anyone again."""
        self._waiting.append(one)
        if len(self._waiting) >= _MOST:
            self._release()
        elif not self._due:
            self._due = True
            self._loop.call_soon(self._end_turn)

    def _end_turn(self) -> None:
        self._due = False
        self._release()

    def _release(self) -> None:
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            one.release()
