"""How fast a worker computes prompts, learned from its answers."""

from dataclasses import dataclass


@dataclass(slots=True)
class PrefillRate:
    """Tokens a second, smoothed. Starts from a guess that the first observation replaces.

    A short prefill shows the fixed cost of an answer and not the rate, so fewer than `min_tokens` teach nothing.
    """

    tokens_per_s: float = 1000.0
    smoothing: float = 0.3
    min_tokens: int = 64
    observations: int = 0

    def observe(self, tokens: int, seconds: float) -> None:
        """`tokens` were computed in `seconds`: this prompt's uncached ones and those promised before it."""
        if tokens < self.min_tokens or seconds <= 0:
            return
        seen = tokens / seconds
        if self.observations == 0:
            self.tokens_per_s = seen
        else:
            self.tokens_per_s += self.smoothing * (seen - self.tokens_per_s)
        self.observations += 1


@dataclass(slots=True)
class Turnover:
    """How long a cached token lives on one worker before it is pushed out, from how fast new ones come in.

    A stand-in for the age of the least recently used block, which engines do not tell.
    """

    half_life_s: float = 60.0
    _tokens: float = 0.0
    _at_s: float = 0.0

    def stored(self, tokens: int, now_s: float) -> None:
        self._decay(now_s)
        self._tokens += tokens

    def age_s(self, capacity_tokens: int, now_s: float) -> float:
        """Seconds in which a cache of this size is filled anew; infinite while nothing comes in."""
        self._decay(now_s)
        per_s = self._tokens * 0.693 / self.half_life_s
        return capacity_tokens / per_s if per_s > 0 else float("inf")

    def _decay(self, now_s: float) -> None:
        self._tokens *= 0.5 ** (max(0.0, now_s - self._at_s) / self.half_life_s)
        self._at_s = max(self._at_s, now_s)
