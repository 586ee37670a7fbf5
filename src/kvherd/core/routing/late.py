"""Late binding: how long a request may wait for a better moment to be sent to a worker."""

from dataclasses import dataclass

from kvherd.core.errors import OptionInvalid
from kvherd.core.routing.policy import Explanation


@dataclass(frozen=True, slots=True)
class LateBounds:
    """Requests are held while every worker that could serve them has more than `backlog_s` seconds of prefill before
    it, or of waiting for a slot, each for `longest_s` at most; 0 for `backlog_s` holds none. A second of waiting counts
    like `ageing` seconds less of prefill.
    """

    backlog_s: float = 0.3
    longest_s: float = 30.0
    ageing: float = 0.5

    def __post_init__(self) -> None:
        for name, least, most in (("backlog_s", 0.0, 3600.0), ("longest_s", 0.0, 3600.0), ("ageing", 0.001, 1000.0)):
            if not least <= getattr(self, name) <= most:
                raise OptionInvalid(name, f"must be {least:g} to {most:g}")

    @property
    def on(self) -> bool:
        return self.backlog_s > 0.0


def least_prefill_s(explanation: Explanation, prompt_tokens: int) -> float:
    """Seconds to compute the prompt where that takes least, given what is held there."""
    candidates = (one.candidate for one in explanation.costed)
    return min(
        (max(0, prompt_tokens - one.matched_tokens) / one.prefill_tokens_per_s for one in candidates), default=0.0
    )
