"""How long one try at one worker may take: a timer of its own, since `asyncio.timeout` costs five times as much."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from kvherd.core.errors import FieldInvalid, KvherdError, WorkerTimedOut, WorkerUnreachable
from kvherd.core.fleet.health import Down
from kvherd.core.fleet.refusals import DeadlinePassed
from kvherd.core.fleet.roster import Member

TIMEOUT = b"x-request-timeout"


def deadline_s(headers: Iterable[tuple[bytes, bytes]]) -> float | None:
    """The seconds that the client gives the whole answer, if it says. Raises `FieldInvalid`."""
    told = next((value for name, value in headers if name == TIMEOUT), None)
    if told is None:
        return None
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


@dataclass(frozen=True, slots=True)
class Bounds:
    """`first_byte_s` is how long a worker may take to begin its answer, `down_s` how long if it is found to be down
    meanwhile: one that is stopped accepts connections as before.
    """

    first_byte_s: float = 600.0
    down_s: float = 15.0


class Patience:
    """Cancels the task that made it when the time is over, and then says why: the cancellation is the caller's to
    turn into `gave_up`. Call `over` in any case.
    """

    __slots__ = ("_began_s", "_bounds", "_clock", "_ends", "_loop", "_member", "_started", "_task", "gave_up")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, member: Member, bounds: Bounds, ends: tuple[float, float] | None
    ) -> None:
        """`ends` is when the client's own deadline comes, and how long it had given."""
        self._loop = loop
        self._task = asyncio.current_task(loop)
        self._member = member
        self._bounds = bounds
        self._ends = ends
        self._began_s = loop.time()
        self._started = False
        self.gave_up: KvherdError | None = None
        self._clock: asyncio.TimerHandle | None = None
        self._wait(self._began_s)

    def started(self) -> None:
        """The answer has begun: from now on only the client's own deadline holds."""
        self._started = True
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None
        if self._ends is not None:
            self._wait(self._began_s)

    def over(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None
        if self.gave_up is not None and self._task is not None:
            self._task.uncancel()

    def _wait(self, now_s: float) -> None:
        bounds, until_s = self._bounds, self._ends[0] if self._ends is not None else float("inf")
        if not self._started:
            until_s = min(until_s, now_s + bounds.down_s, self._began_s + bounds.first_byte_s)
        self._clock = self._loop.call_at(until_s, self._look)

    def _look(self) -> None:
        self._clock = None
        now_s, verdict = self._loop.time(), self._member.health.verdict
        waited_s = now_s - self._began_s
        if self._ends is not None and now_s >= self._ends[0]:
            self.gave_up = DeadlinePassed(self._ends[1])
        elif waited_s >= self._bounds.first_byte_s:
            self.gave_up = WorkerTimedOut(self._member.worker, self._bounds.first_byte_s)
        elif isinstance(verdict, Down):
            reason = f"it gave no byte of an answer for {waited_s:.0f} s and is down: {verdict.reason}"
            self.gave_up = WorkerUnreachable(self._member.worker, reason)
        else:
            self._wait(now_s)
            return
        if self._task is not None:
            self._task.cancel()
