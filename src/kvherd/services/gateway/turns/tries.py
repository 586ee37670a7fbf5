"""One try at one worker: what is noted when it begins, what is sent, and what is learned when it ends."""

import logging
import random
from collections.abc import Callable
from typing import Final

from kvherd.core.errors import WorkerError, WorkerRefused, WorkerUnsupported
from kvherd.core.fleet.roster import Member
from kvherd.core.fleet.spec import GRPC
from kvherd.ports.completions import Usage
from kvherd.ports.worker import Call, Responder
from kvherd.services.gateway.fleet.fleet import Fleet
from kvherd.services.gateway.metrics import GatewayMetrics
from kvherd.services.gateway.reading.parity import counted
from kvherd.services.gateway.turns.audit import Audit, reported_cached
from kvherd.services.gateway.turns.credit import Credit
from kvherd.services.gateway.turns.heal import FullReports
from kvherd.services.gateway.turns.late_binding import HELD_PATHS, LateBinding
from kvherd.services.gateway.turns.turn import Turn
from kvherd.services.gateway.turns.usage_samples import UsageSamples, WithoutUsage, uncompressed
from kvherd.services.gateway.waiting.patience import with_deadline

log: Final = logging.getLogger(__name__)

_BROKEN: Final = 500
"""The status by which an engine says that it met what it did not foresee."""


class _Heard:
    """`News` of one try."""

    __slots__ = ("_late", "_member", "_tries", "_turn")

    def __init__(self, turn: Turn, member: Member, tries: "Tries", late: LateBinding | None) -> None:
        self._turn = turn
        self._member = member
        self._tries = tries
        self._late = late

    def first_token(self) -> None:
        self._turn.first_token_at_s = now_s = self._tries.now_s()
        self._member.answered(self._turn.request, now_s=now_s)
        if self._turn.tried:
            self._tries.answered_instead(self._turn, now_s)
        if self._late is not None:
            self._late.look()

    def usage(self, told: Usage) -> None:
        self._turn.usage = told


class Tries:
    """`credit` is None under a policy that remembers no prompts, `late` where no request is held."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        credit: Credit | None,
        audit: Audit,
        metrics: GatewayMetrics,
        reports: FullReports,
        samples: UsageSamples,
        late: LateBinding | None,
        dice: Callable[[], float] = random.random,
    ) -> None:
        self._fleet = fleet
        self._credit = credit
        self._audit = audit
        self._metrics = metrics
        self._reports = reports
        self._samples = samples
        self._late = late
        self._dice = dice

    def now_s(self) -> float:
        return self._fleet.now_s()

    def begin(self, turn: Turn, member: Member, now_s: float) -> tuple[Call, Responder]:
        """It is being sent there: what is sent, and where the answer goes. `end` must follow."""
        prompt, predicted = turn.prompt, turn.predicted
        tokens = prompt.tokens
        turn.uncached = tokens - (predicted or 0)
        turn.tries += 1
        turn.sent_at_s, turn.gave_up = now_s, None
        turn.ahead_tokens = member.begin(
            turn.request, prompt_tokens=tokens, uncached_tokens=turn.uncached, now_s=now_s, rank=turn.rank
        )
        turn.there = member.in_flight[turn.request]
        if predicted is not None:
            alone = not prompt.several and not turn.asked.branches
            turn.trial = self._audit.begin(member, turn.match, prompt_tokens=tokens, alone=alone)
        try:
            call, responder = self._edited(turn, member)
            if self._credit is not None:
                self._credit.sent(turn.request, prompt, member, turn.rank, turn.match)
        except Exception as error:
            self.end(turn, error, now_s)  # or it would count as under way there for ever
            raise
        return call, responder

    def end(self, turn: Turn, error: BaseException | None, now_s: float) -> None:
        """It is over, however it ended; the worker's health learns from it."""
        member = turn.served_by
        turn.witness.wait = None  # else it would be the collector that finds the turn
        self._judge(turn, member, error, now_s)
        if turn.trial is not None:
            self._audit.end(member, turn.trial)
        self._fleet.request_ended(member, turn.request, now_s)
        if self._credit is not None:
            self._credit.ended(turn.request)
        if self._late is not None:
            self._late.look()

    def answered_instead(self, turn: Turn, now_s: float) -> None:
        """What workers said no to was answered by another: it was not the request's fault, nor the whole fleet's."""
        for worker, error in turn.tried.items():
            member = self._fleet.roster.get(worker)
            if member is not None and isinstance(error, WorkerRefused):
                was_closed = member.breaker.closed
                self._failed(member, turn, now_s)
                _say(member, was_closed)

    def _judge(self, turn: Turn, member: Member, error: BaseException | None, now_s: float) -> None:
        """What the end of a try says of its worker. One that always fails or says no ends its requests soonest, and
        would be given ever more: it is spared them where there is another.
        """
        was_closed = member.breaker.closed
        if error is None:
            if turn.witness.status == _BROKEN and self._others(turn, member, now_s):
                self._failed(member, turn, now_s)
            else:
                self._fleet.request_succeeded(member, turn.request, now_s)
        elif isinstance(error, WorkerRefused) and self._others(turn, member, now_s):
            member.breaker.refused(turn.request, now_s, self._dice())
        elif isinstance(error, WorkerError) and not isinstance(error, WorkerRefused | WorkerUnsupported):
            self._fleet.request_failed(member, turn.request, error)
        else:
            member.breaker.abandoned(turn.request)  # it is well, and cannot do it; or its client has left
        _say(member, was_closed)

    def _others(self, turn: Turn, member: Member, now_s: float) -> bool:
        return self._fleet.roster.others_serve(member, turn.model, now_s)

    def _failed(self, member: Member, turn: Turn, now_s: float) -> None:
        member.failures_total += 1
        member.breaker.failed(turn.request, now_s, self._dice())

    def _edited(self, turn: Turn, member: Member) -> tuple[Call, Responder]:
        """What is sent to this worker, and what becomes of its answer on the way to the client."""
        call = self._call(turn, member)
        reporting = self._reports.ask(turn, member, call.body)
        if reporting is not None:
            call = call.changed(body=reporting)
        sampling = self._samples.ask(turn, member, call.body)
        turn.sampled = sampling is not None
        if sampling is None:
            return call, turn.witness
        return call.changed(body=sampling, headers=uncompressed(call.headers)), WithoutUsage(turn.witness)

    def _call(self, turn: Turn, member: Member) -> Call:
        incoming, headers, prompt = turn.incoming, turn.incoming.headers, turn.prompt
        if turn.ends is not None:
            headers = with_deadline(headers, turn.ends[0] - turn.sent_at_s)
        return Call(
            incoming.method,
            incoming.target,
            headers,
            incoming.body,
            turn.request,
            turn.model,
            turn.streams,
            None if prompt.several else prompt.token_ids,
            turn.headers,
            turn.rank if turn.wanted_rank is None else None,
            _Heard(turn, member, self, self._late),
            turn.ends,
            None if prompt.token_ids is None else self._fleet.tokenizer(turn.model),
        )

    def learn(self, turn: Turn, member: Member, now_s: float) -> None:
        """Truth, prefill rate and how long a slot is kept, from one complete answer."""
        there = turn.there
        if there is not None and turn.incoming.path in HELD_PATHS:
            member.served(there, now_s=now_s)
        cached = reported_cached(member, turn.usage)
        self._samples.learn(turn, member)
        self._count(turn, member)
        if turn.trial is not None:
            self._audit.answered(member, turn.trial, turn.usage, cached, now_s=now_s)
        if turn.predicted is not None:
            self._metrics.cached(member.worker, turn.predicted, cached)
        # Over HTTP the first token of an answer that does not stream comes with the last.
        seen = turn.streams or member.worker.startswith(GRPC)
        # Who waited for a slot waited for others' answers too.
        if seen and turn.first_token_at_s is not None and not (there is not None and there.queued):
            prompt_tokens = turn.usage.prompt_tokens if turn.usage else turn.prompt.tokens
            known = turn.predicted if cached is None else cached
            computed = turn.ahead_tokens - turn.uncached + max(0, prompt_tokens - (known or 0))
            seconds = turn.first_token_at_s - turn.sent_at_s
            self._fleet.roster.prefilled(member, int(computed), seconds, now_s)

    def _count(self, turn: Turn, member: Member) -> None:
        """Hold our count of prompt tokens against the worker's, where it made tokens of its own."""
        if turn.usage is None or turn.prompt.token_ids is None or turn.prompt.several:
            return
        if not member.given_tokens:
            counted(member, turn.prompt.classes, ours=turn.prompt.tokens, theirs=turn.usage.prompt_tokens)


def _say(member: Member, was_closed: bool) -> None:
    """An operator is told when a circuit opens, and when it is closed again."""
    if member.breaker.closed is was_closed:
        return
    if was_closed:
        log.warning("worker %s failed too often: its circuit breaker is open", member.worker)
    else:
        log.warning("worker %s answers again: its circuit breaker is closed", member.worker)
