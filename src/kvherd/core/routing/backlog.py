"""Prefill promised to a worker and not yet seen to be done.

The end of a prefill that does not stream is invisible, so the work is assumed to be done in the order in which it was
promised, at the rate that was learned. What is left of a request's work ends at once with its first token or its
usage, whichever is seen first.
"""

from kvherd.core.ids import RequestId


class Backlog:
    """One worker's. `now_s` never goes back."""

    def __init__(self) -> None:
        self._left: dict[RequestId, float] = {}
        self._total = 0.0
        self._at_s = 0.0

    @property
    def empty(self) -> bool:
        """Nothing is left of what was promised."""
        return not self._left

    def add(self, request: RequestId, tokens: int, *, rate: float, now_s: float) -> float:
        """Promise `tokens` more of prefill; answers how many tokens are to be done until this request's are."""
        self._advance(rate, now_s)
        if tokens > 0:
            self._left[request] = float(tokens)
            self._total += tokens
        return self._total

    def end(self, request: RequestId, *, rate: float, now_s: float) -> None:
        """This request's prefill is over, or will never be. Harmless for one that is not known."""
        if self._left:
            self._advance(rate, now_s)
            self._total = max(0.0, self._total - self._left.pop(request, 0.0)) if self._left else 0.0

    def seconds(self, *, rate: float, now_s: float) -> float:
        if not self._left:
            return 0.0
        self._advance(rate, now_s)
        return self._total / rate

    def _advance(self, rate: float, now_s: float) -> None:
        if not self._left:
            self._total = 0.0  # floats drift; an empty backlog is exactly none
            self._at_s = max(self._at_s, now_s)
            return
        done = rate * max(0.0, now_s - self._at_s)
        self._at_s = max(self._at_s, now_s)
        while done > 0 and self._left:
            request, tokens = next(iter(self._left.items()))
            step = min(done, tokens)
            done -= step
            self._total -= step
            if step == tokens:
                del self._left[request]
            else:
                self._left[request] = tokens - step
        if not self._left:
            self._total = 0.0
