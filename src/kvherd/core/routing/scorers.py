"""What it costs to send a request to a worker, in seconds; lower is better.

A scorer that measures a nuisance and no time returns a penalty in 0..1 times its weight in seconds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import exp

from kvherd.core.routing.candidate import Ask, Candidate

Scorer = Callable[[Candidate, Ask], float]


def backlog_s(candidate: Candidate, _ask: Ask) -> float:
    """Seconds of prefill promised to that worker and not yet done."""
    return candidate.backlog_s


def slots_s(candidate: Candidate, _ask: Ask) -> float:
    """Seconds until a slot is free there, as far as they are more than the backlog: who waits for a slot waits out the
    prefill of those before it meanwhile.
    """
    wait_s, backlog_s = candidate.slot_wait_s, candidate.backlog_s
    return wait_s - backlog_s if wait_s > backlog_s else 0.0


@dataclass(frozen=True, slots=True)
class UncachedPrefill:
    """Seconds to compute the part of the prompt that is not held there, times 1 + `beta`.

    The extra weight stands for what a prefill costs others: their decode steps wait, and their blocks make room.
    """

    beta: float = 2.0

    def __call__(self, candidate: Candidate, ask: Ask) -> float:
        uncached = max(0, ask.prompt_tokens - candidate.matched_tokens)
        return (1.0 + self.beta) * uncached / candidate.prefill_tokens_per_s


@dataclass(frozen=True, slots=True)
class EvictedPrefill:
    """Seconds to compute again what storing this prompt pushes out, discounted by how stale that is."""

    gamma: float = 1.0
    tau_s: float = 300.0

    def __call__(self, candidate: Candidate, _ask: Ask) -> float:
        evicted_s = candidate.evicted_tokens / candidate.prefill_tokens_per_s
        return self.gamma * evicted_s * exp(-candidate.lru_age_s / self.tau_s)


@dataclass(frozen=True, slots=True)
class Load:
    """A nominal time for each request that is there already."""

    request_s: float = 0.1

    def __call__(self, candidate: Candidate, _ask: Ask) -> float:
        return self.request_s * candidate.load
