"""How fast a worker computes prompts, learned from its answers."""

from dataclasses import dataclass
from math import exp2
from typing import Final

UNTAUGHT: Final = 1000.0
"""Tokens a second of workers of which none has shown its rate: a guess."""


@dataclass(slots=True)
class PrefillRate:
    """Tokens a second, smoothed.

    Until something is learned it is `usual`, the rate of its peers, and what was learned fades towards that: a worker
    that once seemed slow would otherwise get no prompt again that could prove it fast. A short prefill shows the
    fixed cost of an answer and not the rate, so fewer than `min_tokens` teach nothing.
    """

    usual: float = UNTAUGHT
    smoothing: float = 0.3
    min_tokens: int = 64
    half_life_s: float = 120.0
    learned: float = 0.0
    observations: int = 0
    _at_s: float = 0.0

    @property
    def unknown(self) -> bool:
        """Nothing was learned of it, nor of any of its peers."""
        return self.observations == 0 and self.usual == UNTAUGHT

    def at(self, now_s: float) -> float:
        """The estimate for now."""
        if self.observations == 0:
            return self.usual
        weight = exp2(-max(0.0, now_s - self._at_s) / self.half_life_s)
        return self.usual + weight * (self.learned - self.usual)

    def observe(self, tokens: int, seconds: float, now_s: float) -> bool:
        """`tokens` were computed in `seconds`: this prompt's uncached ones and those promised before it.

        Answers whether that taught anything.
        """
        if tokens < self.min_tokens or seconds <= 0:
            return False
        seen, before = tokens / seconds, self.at(now_s)
        self.learned = seen if self.observations == 0 else before + self.smoothing * (seen - before)
        self.observations += 1
        self._at_s = now_s
        return True


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
        if now_s > self._at_s:
            self._tokens *= exp2((self._at_s - now_s) / self.half_life_s)
            self._at_s = now_s
