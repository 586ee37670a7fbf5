"""All that routing may know: what is asked for, and each worker that might answer."""

from enum import StrEnum
from typing import TypeAlias

from kvherd.core.ids import Rank, WorkerId

Place: TypeAlias = tuple[WorkerId, Rank | None]
"""A worker, or one rank of it where ranks can be addressed."""


class KvKnowledge(StrEnum):
    """How far what a worker holds is known."""

    KNOWN = "known"  # from its own events
    QUARANTINED = "quarantined"  # not now; it gets no credit until it is
    UNTOLD = "untold"  # it publishes none; what it was sent lately is all there is


class Ask:
    """A request, as far as it matters where it goes. Plain classes here, as one for each worker is made for every
    request; neither is changed once it is made.

    `prompt_tokens` is an estimate where the prompt was not tokenized. `affinity` keeps requests together that belong
    together (a user, a session): equal values go to one worker under `consistent_hash`.
    """

    __slots__ = ("affinity", "model", "prompt_tokens")

    def __init__(self, model: str, prompt_tokens: int = 0, affinity: str = "") -> None:
        self.model = model
        self.prompt_tokens = prompt_tokens
        self.affinity = affinity


class Candidate:
    """One worker, or one rank of it where ranks can be addressed, at this moment.

    `unavailable` says in words why it takes no request, empty if it does. `matched_tokens` are the leading prompt
    tokens it is credited with. `evicted_tokens` is an estimate of what storing this prompt pushes out there, and
    `lru_age_s` of how long that was not used. It counts as `weight` times as fast as it is. `slot_wait_s` is how long
    the request would wait for a slot there, 0 if one is free or nobody knows how many there are.
    """

    __slots__ = (
        "backlog_s",
        "evicted_tokens",
        "in_flight",
        "kv",
        "lru_age_s",
        "matched_tokens",
        "max_context_tokens",
        "models",
        "prefill_tokens_per_s",
        "rank",
        "running",
        "slot_wait_s",
        "unavailable",
        "waiting",
        "weight",
        "worker",
    )

    def __init__(  # noqa: PLR0917 - made for every worker at every request, and by name it would cost twice as much
        self,
        worker: WorkerId,
        models: tuple[str, ...],
        rank: Rank | None = None,
        unavailable: str = "",
        in_flight: int = 0,
        running: int = 0,
        waiting: int = 0,
        backlog_s: float = 0.0,
        prefill_tokens_per_s: float = 1000.0,
        matched_tokens: int = 0,
        evicted_tokens: int = 0,
        lru_age_s: float = 0.0,
        max_context_tokens: int = 0,
        kv: KvKnowledge = KvKnowledge.UNTOLD,
        weight: float = 1.0,
        slot_wait_s: float = 0.0,
    ) -> None:
        self.worker = worker
        self.models = models
        self.rank = rank
        self.unavailable = unavailable
        self.in_flight = in_flight
        self.running = running
        self.waiting = waiting
        self.backlog_s = backlog_s
        self.prefill_tokens_per_s = prefill_tokens_per_s
        self.matched_tokens = matched_tokens
        self.evicted_tokens = evicted_tokens
        self.lru_age_s = lru_age_s
        self.max_context_tokens = max_context_tokens
        self.kv = kv
        self.weight = weight
        self.slot_wait_s = slot_wait_s

    @property
    def load(self) -> int:
        """Requests there: those it reported, or those we know of where that is more (its report is older)."""
        told = self.running + self.waiting
        return max(self.in_flight, told)
