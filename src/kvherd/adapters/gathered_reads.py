"""Fewer reads of a connection on which many streams talk.

An engine says the tokens of one step within milliseconds, each by itself. To be woken for each costs more than to
take it. So a connection with many streams is left alone for a moment after it was read, and what came meanwhile is
read in one. What comes after a longer silence, as a step's first message does, never waits; nor does a lone stream.
"""

import asyncio
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Gathering:
    """With `from_streams` streams or more, nothing is read for `rest_s` after a read; no message waits longer."""

    from_streams: int = 8
    rest_s: float = 0.001


USUAL: Final = Gathering()


class GatheredReads:
    """Of one connection. `stop` it when that is lost."""

    __slots__ = ("_gathering", "_loop", "_resting", "_transport")

    def __init__(self, transport: asyncio.Transport, gathering: Gathering) -> None:
        self._transport = transport
        self._gathering = gathering
        self._loop = asyncio.get_running_loop()
        self._resting: asyncio.TimerHandle | None = None

    def after(self, streams: int) -> None:
        """A read was taken, and so many streams are open."""
        if streams < self._gathering.from_streams or self._resting is not None or self._transport.is_closing():
            return
        self._transport.pause_reading()
        self._resting = self._loop.call_later(self._gathering.rest_s, self._go_on)

    def stop(self) -> None:
        if self._resting is not None:
            self._resting.cancel()
            self._resting = None

    def _go_on(self) -> None:
        self._resting = None
        if not self._transport.is_closing():
            self._transport.resume_reading()
