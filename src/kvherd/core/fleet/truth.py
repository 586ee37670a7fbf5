"""Predicted against reported cached tokens, for one worker.

Decided are answers that reported their cached tokens and overlapped no other request there: an overlap may change
what is cached between the prediction and the prefill. Engines that report none leave the truth unavailable.
"""

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class Truth:
    """Counts since the beginning, and the share of wrong predictions over the last 200 decided answers."""

    decided: int = 0
    undecided: int = 0
    unreported: int = 0
    predicted_tokens: int = 0
    reported_tokens: int = 0
    _wrong: deque[bool] = field(default_factory=lambda: deque(maxlen=200))

    def answered(self, *, predicted: int, reported: int | None, overlapped: bool) -> None:
        """`reported` is what the answer's usage said, None if it said nothing."""
        if reported is None:
            self.unreported += 1
        elif overlapped:
            self.undecided += 1
        else:
            self.decided += 1
            self.predicted_tokens += predicted
            self.reported_tokens += reported
            self._wrong.append(predicted != reported)

    @property
    def error_rate(self) -> float:
        """0 while nothing is decided."""
        return sum(self._wrong) / len(self._wrong) if self._wrong else 0.0

    @property
    def available(self) -> bool:
        """Whether this worker was ever seen to report its cached tokens."""
        return self.decided + self.undecided > 0
