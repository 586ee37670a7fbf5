"""What stands around a request that no task waits for: something is to be done once it is over, however it ends."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from kvherd.ports.worker import Flight, Landed, Responder
from kvherd.services.gateway.relay.edge import DataRequest, Launch


def launch_none(_request: DataRequest, _responder: Responder, _landed: Landed) -> Flight | None:
    """A `Launch` that leaves all to tasks."""
    return None


class Passage:
    """A flight within another path's. Who extends it says what `leave` does."""

    __slots__ = ("_landed", "flight")

    def __init__(self, landed: Landed) -> None:
        self._landed = landed
        self.flight: Flight | None = None

    def leave(self) -> None:
        """Called once, when it lands, is cancelled, or its task ends."""
        raise NotImplementedError

    def undo(self) -> None:
        """Called in place of `leave` if nothing has happened."""
        self.leave()

    def cancel(self) -> None:
        flight, self.flight = self.flight, None
        if flight is not None:
            flight.cancel()
        self.leave()

    def landed(self, outcome: Exception | Coroutine[Any, Any, None] | None) -> None:
        self.flight = None  # it refers back to this object
        if outcome is None or isinstance(outcome, Exception):
            self.leave()
            self._landed(outcome)
        else:
            hand_over(self._landed, self._go_on(outcome), self.leave, within=outcome)

    async def _go_on(self, rest: Coroutine[Any, Any, None]) -> None:
        try:
            await rest
        finally:
            self.leave()


def launch_within(launch: Launch, request: DataRequest, responder: Responder, passage: Passage) -> Flight | None:
    """Launch it through a passage."""
    try:
        flight = launch(request, responder, passage.landed)
    except BaseException:
        passage.leave()
        raise
    if flight is None:
        passage.undo()
        return None
    passage.flight = flight
    return passage


def hand_over(
    landed: Landed,
    rest: Coroutine[Any, Any, None],
    abandoned: Callable[[], None],
    *,
    within: Coroutine[Any, Any, None] | None = None,
) -> None:
    """Land with `rest`. A task that is cancelled before its first step never enters it, so that nothing in it is ever
    done: then `abandoned` is called. It happens when the client leaves at that very moment. `within` is what `rest`
    awaits.
    """
    begun = _Begun(rest)
    whole = begun.go()

    def look() -> None:
        if not begun.begun:
            for each in (whole, rest, within):
                if each is not None:
                    each.close()  # or it would be complained of that nobody awaited it
            abandoned()

    landed(whole)
    asyncio.get_running_loop().call_soon(look)


class _Begun:
    """Whether what was handed over has had its first step."""

    __slots__ = ("_rest", "begun")

    def __init__(self, rest: Coroutine[Any, Any, None]) -> None:
        self._rest = rest
        self.begun = False

    async def go(self) -> None:
        self.begun = True
        await self._rest
