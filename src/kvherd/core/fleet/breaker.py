"""A circuit breaker for one worker: it stops sending requests where most of them fail.

    closed     requests pass; failures are counted over a sliding window
    open       none pass until the open time is over, which doubles (with jitter) at each failed try
    half-open  one request at a time may try; its success closes the breaker, its failure opens it again

Every `begin` is followed by one of `succeeded`, `failed`, `refused` and `abandoned` of the same request, with the same
time base; what was refused may turn out to have `failed` after all, when another worker answers it. What became of a
request that began before the breaker opened says nothing of the present, and is no try's end.
"""

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kvherd.core.ids import RequestId

_SLICES: Final = 64


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


@dataclass(frozen=True, slots=True)
class BreakerConfig:
    """It opens when at least `min_requests` ended within `window_s` and this share of them failed, or when `in_a_row`
    failed without one that succeeded between them: else a worker that served thousands could fail as many.
    """

    failure_ratio: float = 0.5
    min_requests: int = 5
    in_a_row: int = 10
    window_s: float = 30.0
    open_s: float = 2.0
    max_open_s: float = 60.0


class _Slice:
    """Of the window: to remember each request by itself would be to remember hundreds of thousands."""

    __slots__ = ("began_s", "ended", "failed", "until_s")

    def __init__(self, began_s: float, until_s: float) -> None:
        self.began_s = began_s
        self.until_s = until_s
        self.ended = self.failed = 0


class Breaker:
    """Time and dice are the caller's: `now_s` never goes back, `dice` is in 0..1."""

    def __init__(self, config: BreakerConfig | None = None) -> None:
        self._config = config or BreakerConfig()
        self._ended: deque[_Slice] = deque()
        self._newest: _Slice | None = None
        self._failed_in_a_row = 0
        self._open_until_s: float | None = None
        self._opened_in_a_row = 0
        self._trying: RequestId | None = None

    def state(self, now_s: float) -> BreakerState:
        if self._open_until_s is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now_s < self._open_until_s else BreakerState.HALF_OPEN

    @property
    def closed(self) -> bool:
        return self._open_until_s is None

    def admits(self, now_s: float) -> bool:
        """Whether a request may be sent now; changes nothing."""
        state = self.state(now_s)
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and self._trying is None)

    def begin(self, request: RequestId, now_s: float) -> None:
        """A request that was admitted is on its way."""
        if self._open_until_s is not None and self.state(now_s) is BreakerState.HALF_OPEN:
            self._trying = request

    def succeeded(self, request: RequestId, now_s: float) -> None:
        if self._open_until_s is not None:
            if self._trying != request:
                return
            self._close()
        self._count(now_s, failed=False)

    def failed(self, request: RequestId, now_s: float, dice: float) -> None:
        if self._open_until_s is not None:
            if self._trying == request:
                self._open(now_s, dice)
            return
        self._count(now_s, failed=True)
        failures, ended = sum(one.failed for one in self._ended), sum(one.ended for one in self._ended)
        most = ended >= self._config.min_requests and failures >= self._config.failure_ratio * ended
        if most or self._failed_in_a_row >= self._config.in_a_row:
            self._open(now_s, dice)

    def refused(self, request: RequestId, now_s: float, dice: float) -> None:
        """It was told no. That speaks against the worker only if it is the try: the circuit opened for a reason."""
        if self._trying == request:
            self.failed(request, now_s, dice)

    def abandoned(self, request: RequestId) -> None:
        """The request ended without news of the worker: its client left."""
        if self._trying == request:
            self._trying = None

    def _count(self, now_s: float, *, failed: bool) -> None:
        newest = self._newest
        if newest is None or now_s >= newest.until_s:
            window_s = self._config.window_s
            newest = self._newest = _Slice(now_s, now_s + window_s / _SLICES)
            self._ended.append(newest)
            while self._ended[0].began_s < now_s - window_s:
                self._ended.popleft()
        newest.ended += 1
        newest.failed += failed
        self._failed_in_a_row = self._failed_in_a_row + 1 if failed else 0

    def _open(self, now_s: float, dice: float) -> None:
        longest = min(self._config.max_open_s, self._config.open_s * 2**self._opened_in_a_row)
        # Between half and all of it, so that gateways that broke together do not return together.
        self._open_until_s = now_s + longest * (0.5 + dice / 2)
        self._opened_in_a_row = min(self._opened_in_a_row + 1, 16)
        self._trying = None
        self._forget()

    def _close(self) -> None:
        self._open_until_s = None
        self._opened_in_a_row = 0
        self._trying = None
        self._forget()

    def _forget(self) -> None:
        self._ended.clear()
        self._newest = None
        self._failed_in_a_row = 0
