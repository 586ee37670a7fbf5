"""What happened to a worker's entry in the index while one request was on its way there."""

from kvherd.core.kv.events import CacheCleared, KvEventBatch

_TOLERANCE_S = 0.0005
"""A request takes longer than this to reach its first step, and with it its own first events."""


class Watch:
    """`disturbed` says why the entry at `sent_s`, by the time of day, was not what the engine had when it began the
    request; empty if nothing speaks against it. No dataclass, as one is made for every request.
    """

    __slots__ = ("disturbed", "sent_s")

    def __init__(self, sent_s: float, disturbed: str = "") -> None:
        self.sent_s = sent_s
        self.disturbed = disturbed

    def saw(self, batch: KvEventBatch, *, least_lag_s: float) -> None:
        """A batch was applied. `least_lag_s` is what differs between the clocks, and what the way takes at best."""
        if any(isinstance(event, CacheCleared) for event in batch.events):
            self.happened("cleared")
        elif batch.events and batch.timestamp_s + least_lag_s < self.sent_s + _TOLERANCE_S:
            self.happened("late events")

    def happened(self, what: str) -> None:
        """The first thing that happened is what is told."""
        self.disturbed = self.disturbed or what
