"""How long a worker's KV events are under way: from the engine's own stamp to the moment they are applied here.

The two clocks may differ, and then every lag does by the same amount; the least of late is what differs and what the
way takes at best.
"""

from collections import deque
from dataclasses import dataclass, field

_BUCKET_S = 10.0
_BUCKETS = 6


@dataclass(slots=True)
class _Bucket:
    began: int
    worst_s: float
    least_s: float


@dataclass(slots=True)
class Lag:
    """Of one worker. Times by a clock that never goes back; what is older than a minute is forgotten."""

    last_s: float | None = None
    _buckets: deque[_Bucket] = field(default_factory=lambda: deque(maxlen=_BUCKETS))

    def seen(self, lag_s: float, now_s: float) -> None:
        self.last_s = lag_s
        began = int(now_s / _BUCKET_S)
        if not self._buckets or self._buckets[-1].began != began:
            self._buckets.append(_Bucket(began, lag_s, lag_s))
            return
        bucket = self._buckets[-1]
        if lag_s > bucket.worst_s:
            bucket.worst_s = lag_s
        elif lag_s < bucket.least_s:
            bucket.least_s = lag_s

    def worst_s(self, now_s: float) -> float | None:
        """Of the last minute; None if nothing came."""
        return max((bucket.worst_s for bucket in self._late(now_s)), default=None)

    def least_s(self, now_s: float) -> float | None:
        """Of the last minute; None if nothing came."""
        return min((bucket.least_s for bucket in self._late(now_s)), default=None)

    def _late(self, now_s: float) -> list[_Bucket]:
        return [bucket for bucket in self._buckets if bucket.began > int(now_s / _BUCKET_S) - _BUCKETS]
