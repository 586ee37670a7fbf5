"""A bound on retries, so that a fleet in trouble is not given twice the load.

Retries may be a share of the requests of the last seconds, or of those under way where these are more: a generation
waits and runs for longer than that, so that hundreds may be under way of which none came lately. An engine that dies
with hundreds costs a gateway that serves thousands nothing; where most fail, the retries are soon used up. A quiet
gateway has a few a second.
"""

from typing import Final

WINDOW_S: Final = 10


class RetryBudget:
    """Of the last `WINDOW_S` whole seconds, the present one among them, no more retries are admitted than `ratio` for
    each request that came in them, or is under way, and `per_second` for each second. A time before the last one that
    was told counts as that one.
    """

    __slots__ = ("_per_retry", "_requests", "_requests_total", "_reserve", "_retries", "_retries_total", "_second")

    def __init__(self, *, ratio: float = 0.2, per_second: float = 10.0) -> None:
        self._per_retry = 1.0 / ratio
        self._reserve = per_second * WINDOW_S * self._per_retry  # as so many requests earn it
        self._requests = [0] * WINDOW_S
        self._retries = [0] * WINDOW_S
        self._requests_total = self._retries_total = self._second = 0

    def earn(self, now_s: float) -> None:
        """A request came."""
        second = int(now_s)
        if second > self._second:
            self._forget_until(second)
        self._requests[self._second % WINDOW_S] += 1
        self._requests_total += 1

    def spend(self, now_s: float, under_way: int = 0) -> bool:
        """Whether one more retry may be made now, while so many requests are under way."""
        second = int(now_s)
        if second > self._second:
            self._forget_until(second)
        if (self._retries_total + 1) * self._per_retry > max(self._requests_total, under_way) + self._reserve:
            return False
        self._retries[self._second % WINDOW_S] += 1
        self._retries_total += 1
        return True

    def _forget_until(self, second: int) -> None:
        """Of each second that begins, what was counted a window ago."""
        for passed in range(max(self._second, second - WINDOW_S) + 1, second + 1):
            place = passed % WINDOW_S
            self._requests_total -= self._requests[place]
            self._retries_total -= self._retries[place]
            self._requests[place] = self._retries[place] = 0
        self._second = second
