"""The audit: is what a worker said it had cached what it was predicted to have?

A prediction is a claim about one moment. It is held against the answer only if nothing else happened at that worker
between that moment and the prefill, as far as can be told. A worker of which too many claims were wrong has its entry
in the index rebuilt.
"""

import logging
import time
from collections.abc import Callable
from typing import Final, Protocol

from kvherd.core.fleet.roster import Member
from kvherd.core.fleet.truth import WINDOW, Claim, Verdict
from kvherd.core.ids import WorkerId
from kvherd.core.kv.watch import Watch
from kvherd.core.routing.candidate import KvKnowledge
from kvherd.ports.completions import Usage
from kvherd.ports.worker import WorkerKind
from kvherd.services.gateway.metrics import GatewayMetrics
from kvherd.services.gateway.turns.credit import Match

log: Final = logging.getLogger(__name__)


class Entries(Protocol):
    """What the index knows of each worker, watched and rebuilt."""

    def watch(self, worker: WorkerId) -> Watch:
        """Begin to watch this worker's entry, until `unwatch`."""
        ...

    def unwatch(self, worker: WorkerId, watch: Watch) -> None: ...

    def answered(self, worker: WorkerId, watch: Watch) -> None:
        """The request that `watch` began with has its whole answer."""
        ...

    def rebuild(self, worker: WorkerId, reason: str) -> None: ...

    def beyond_device(self, worker: WorkerId) -> bool:
        """Whether this worker holds anything in another tier than the device's."""
        ...


class Trial:
    """One claim, from the moment that its request was sent until its answer ended. `serial`: how many requests had been
    sent to the worker by then. No dataclass, as one is made for every request.
    """

    __slots__ = ("claim", "prompt_tokens", "serial", "watch", "watched")

    def __init__(self, claim: Claim, watch: Watch, *, watched: bool, prompt_tokens: int, serial: int) -> None:
        self.claim = claim
        self.watch = watch
        self.watched = watched
        self.prompt_tokens = prompt_tokens
        self.serial = serial


class Audit:
    """Judges every answer of which something was claimed."""

    def __init__(self, entries: Entries, metrics: GatewayMetrics, *, wall: Callable[[], float] = time.time) -> None:
        self._entries = entries
        self._metrics = metrics
        self._wall = wall

    def begin(self, member: Member, match: Match, *, prompt_tokens: int, alone: bool) -> Trial | None:
        """A request is being sent there: call between `Member.begin` and the first byte. None if nothing is claimed.

        `alone` False: the call has several prompts or choices, which find each other's blocks.
        """
        if match.kv is KvKnowledge.UNTOLD:
            return None
        disturbed = _disturbed(member, match, alone=alone)
        # What is undecided from the start need not be watched: under load that is nearly everything.
        watch = Watch(0.0, disturbed) if disturbed else self._entries.watch(member.worker)
        claim = Claim(match.tokens, member.index_block_size, match.exact)
        return Trial(claim, watch, watched=not disturbed, prompt_tokens=prompt_tokens, serial=member.requests_total)

    def end(self, member: Member, trial: Trial) -> None:
        """The answer ended, however: call before `Member.end`."""
        if trial.watched:
            self._entries.unwatch(member.worker, trial.watch)
        if member.requests_total != trial.serial or len(member.in_flight) > 1:
            trial.watch.happened("overlap")
        if member.foreign:
            trial.watch.happened("overlap elsewhere")

    def answered(
        self, member: Member, trial: Trial, usage: Usage | None, reported: int | None, *, now_s: float
    ) -> Verdict:
        """Judge a complete answer: what it said of its cost, if anything, and the `reported_cached` tokens in that."""
        if trial.watched:
            self._entries.answered(member.worker, trial.watch)
        if usage is not None and reported is not None:
            elsewhere = usage.host_tokens + usage.storage_tokens
            reported -= elsewhere  # the index credits what is on the device
            more = trial.claim.in_blocks(reported) > trial.claim.tokens
            if more and not elsewhere and self._entries.beyond_device(member.worker):
                trial.watch.happened("other tiers")  # it may have taken blocks from there, and does not tell them apart
        if usage is not None and usage.prompt_tokens != trial.prompt_tokens:
            trial.watch.happened("tokens differ")  # then it is another prompt that the claim was about
        truth = member.truth
        verdict = truth.answered(trial.claim, reported, disturbed=trial.watch.disturbed, at_s=self._wall())
        self._metrics.judged(member.worker, verdict)
        if verdict is Verdict.WRONG:
            log.info(
                "%s reported %s cached tokens where %d were predicted", member.worker, reported, trial.claim.tokens
            )
        if truth.rebuild_due(now_s):
            reason = f"{truth.error_rate:.1%} of the last {WINDOW} decided predictions or fewer were wrong"
            log.warning("what %s holds is rebuilt from zero: %s", member.worker, reason)
            truth.rebuilt(now_s)
            self._metrics.rebuilt(member.worker)
            self._entries.rebuild(member.worker, reason)
        return verdict


def _disturbed(member: Member, match: Match, *, alone: bool) -> str:
    """Why nothing can be decided from the start; empty if nothing speaks against it."""
    if match.kv is KvKnowledge.QUARANTINED:
        return "quarantined"
    if not alone:
        return "several"
    if len(member.in_flight) > 1:
        return "overlap"
    return "overlap elsewhere" if member.foreign else ""


def reported_cached(member: Member, usage: Usage | None) -> int | None:
    """The cached tokens that an answer reported, None if it did not.

    Older vLLM leaves them out where there are none, so that nothing means 0 of one that was seen to tell.
    """
    if usage is None:
        return None
    truth = member.truth
    truth.used(usage.cached_tokens)
    if usage.cached_tokens is None and truth.hits_told and member.kind == WorkerKind.VLLM_HTTP:
        return 0
    return usage.cached_tokens
