"""How long one try at one worker may take.

Nearly every answer begins long before anybody has to look whether it still will, and the first look comes as late after
its beginning for each: one clock for all of them, since one for each would cost as much as choosing the worker.
"""

import asyncio
from collections.abc import Iterable
from typing import Final, Protocol

from kvherd.core.errors import FieldInvalid, KvherdError, WorkerTimedOut, WorkerUnreachable
from kvherd.core.fleet.health import Down
from kvherd.core.fleet.refusals import DeadlinePassed
from kvherd.core.fleet.roster import Member
from kvherd.services.gateway.settings import Bounds

TIMEOUT: Final = b"x-request-timeout"


def deadline_s(headers: Iterable[tuple[bytes, bytes]]) -> float | None:
    """The seconds that the client gives the whole answer, if it says. Raises `FieldInvalid`."""
    told = next((value for name, value in headers if name == TIMEOUT), None)
    return None if told is None else seconds_told(told)


def seconds_told(told: bytes) -> float:
    """Raises `FieldInvalid`."""
    try:
        seconds = float(told)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise FieldInvalid(TIMEOUT.decode(), "must be a number of seconds above 0")
    return seconds


def with_deadline(headers: Iterable[tuple[bytes, bytes]], left_s: float) -> list[tuple[bytes, bytes]]:
    """The same headers with what is left of the client's deadline in place of what it gave."""
    return [*(header for header in headers if header[0] != TIMEOUT), (TIMEOUT, b"%.3f" % max(0.001, left_s))]


class GivesUp(Protocol):
    def give_up(self, why: KvherdError) -> None:
        """Called at most once."""
        ...


class Patience:
    """Over all tries of one data path."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.fresh: dict[Wait, None] = {}
        self._clock: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:  # asked for once: each time costs a system call in 3.11
            self._loop = asyncio.get_running_loop()
        return self._loop

    def wait(self, member: Member, now_s: float, who: GivesUp, ends: tuple[float, float] | None) -> "Wait":
        """A try begins. `who` may be told to give up; `over` must follow in any case.

        `ends` is when the client's own deadline comes, and how long it had given.
        """
        wait = Wait(self, member, now_s, who, ends)
        if ends is not None:
            wait.go_on(now_s)
        else:
            wait.fresh = True
            self.fresh[wait] = None
            if self._clock is None:
                self._clock = self.loop.call_at(now_s + self.bounds.first_look_s, self._look)
        return wait

    def _look(self) -> None:
        """Those that began first are due first."""
        self._clock = None
        now_s = self.loop.time()
        while self.fresh:
            oldest = next(iter(self.fresh))
            due_s = oldest.began_s + self.bounds.first_look_s
            if due_s > now_s:
                self._clock = self.loop.call_at(due_s, self._look)
                return
            del self.fresh[oldest]
            oldest.fresh = False
            oldest.look()


class Wait:
    """For one answer to begin, and for its end if the client gave it a deadline."""

    __slots__ = ("_clock", "_ends", "_member", "_patience", "_started", "_who", "began_s", "fresh")

    def __init__(
        self, patience: Patience, member: Member, began_s: float, who: GivesUp, ends: tuple[float, float] | None
    ) -> None:
        self._patience = patience
        self._member = member
        self.began_s = began_s
        self._who = who
        self._ends = ends
        self.fresh = False
        """Nobody has looked yet."""
        self._started = False
        self._clock: asyncio.TimerHandle | None = None

    def started(self) -> None:
        """The answer has begun: from now on only the client's own deadline holds."""
        self._started = True
        self.over()
        if self._ends is not None:
            self.go_on(self.began_s)

    def over(self) -> None:
        if self.fresh:
            self.fresh = False
            del self._patience.fresh[self]
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def go_on(self, now_s: float) -> None:
        """Wait until it is to be looked at again."""
        bounds, until_s = self._patience.bounds, self._ends[0] if self._ends is not None else float("inf")
        if not self._started:
            until_s = min(until_s, now_s + bounds.down_s, self.began_s + bounds.first_byte_s)
        self._clock = self._patience.loop.call_at(until_s, self.look)

    def look(self) -> None:
        """Is there still reason to wait?"""
        self._clock = None
        bounds, now_s, verdict = self._patience.bounds, self._patience.loop.time(), self._member.health.verdict
        waited_s = now_s - self.began_s
        if self._ends is not None and now_s >= self._ends[0]:
            self._who.give_up(DeadlinePassed(self._ends[1]))
        elif self._started:  # uvloop calls up to half a millisecond before the time
            self.go_on(now_s)
        elif waited_s >= bounds.first_byte_s:
            self._who.give_up(WorkerTimedOut(self._member.worker, bounds.first_byte_s))
        elif isinstance(verdict, Down):
            reason = f"it gave no byte of an answer for {waited_s:.0f} s and is down: {verdict.reason}"
            self._who.give_up(WorkerUnreachable(self._member.worker, reason))
        else:
            self.go_on(now_s)
