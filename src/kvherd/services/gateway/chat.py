"""The data path: one request from its body to a worker's answer.

    read what routing needs → who may serve it → what each of them holds → choose → forward → remember what was seen

A worker that fails before its first byte is replaced by another, within a budget; after it, the answer ends with an
error event. What was forwarded is what the client sent.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvherd.core.errors import (
    CallerError,
    FieldInvalid,
    FleetError,
    KvherdError,
    ModelUnknown,
    NoWorker,
    Unsupported,
    WorkerError,
    WorkerFailed,
    WorkerRefused,
    WorkerUnreachable,
    WorkerUnsupported,
)
from kvherd.core.fleet.retry_budget import RetryBudget
from kvherd.core.fleet.roster import Member
from kvherd.core.fleet.spec import GRPC
from kvherd.core.ids import Rank, RequestId, WorkerId
from kvherd.core.routing.candidate import Ask, Place
from kvherd.core.routing.policy import Explanation, Policy
from kvherd.ports.completions import Usage
from kvherd.ports.worker import Call, Responder
from kvherd.services.gateway.access import AccessLog
from kvherd.services.gateway.audit import Audit, reported_cached
from kvherd.services.gateway.credit import Credit, Match
from kvherd.services.gateway.fleet import Fleet
from kvherd.services.gateway.heal import FullReports, HealMode, Incomplete
from kvherd.services.gateway.late_binding import LateBinding
from kvherd.services.gateway.metrics import GatewayMetrics
from kvherd.services.gateway.parity import counted
from kvherd.services.gateway.patience import Bounds, Patience, deadline_s, with_deadline
from kvherd.services.gateway.prompts import EncodingCache, Prompt, read_prompt
from kvherd.services.gateway.relay.edge import STORED
from kvherd.services.gateway.turn import Incoming, Renamed, Turn
from kvherd.services.gateway.usage_samples import UsageSamples, WithoutUsage, uncompressed
from kvherd.services.gateway.witness import Witness
from kvherd.wire.fleet_json import explanation_header
from kvherd.wire.openai.edits import with_model
from kvherd.wire.openai.routing import Peek, peek

log = logging.getLogger(__name__)

NO_MATCH = Match()
UNTOLD = Peek()

RANKED_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/generate"})
"""Of which engines can be told the rank that is to serve them."""
NAMING_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"})
"""Where engines are told the model, also if the client left out what nobody could mistake."""


@dataclass(frozen=True, slots=True)
class PathConfig:
    """`tries` counts the first. `usage_sample` is the share of streams that are asked for their usage though their
    client did not. `heal`: what brings credit back to workers that may hold blocks nobody told of.
    """

    tries: int = 3
    bounds: Bounds = field(default_factory=Bounds)
    usage_sample: float = 0.05
    heal: HealMode = HealMode.REPORT


class DataPath:
    """Answers the requests of the data path; the relay's `DataHandler`."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        policy: Policy,
        credit: Credit,
        metrics: GatewayMetrics,
        audit: Audit,
        incomplete: Incomplete = lambda _: False,
        config: PathConfig | None = None,
        access: AccessLog | None = None,
        late: LateBinding | None = None,
        dice: Callable[[], float] = random.random,
    ) -> None:
        self._fleet = fleet
        self._policy = policy
        self._late = late if policy.remembers_prompts else None
        self._credit = credit
        self._metrics = metrics
        self._audit = audit
        self._config = config or PathConfig()
        self._dice = dice
        self._reports = FullReports(self._config.heal, incomplete, metrics)
        self._samples = UsageSamples(self._config.usage_sample, metrics, dice=dice)
        self._encodings = EncodingCache()
        self._access = access or AccessLog(metrics)
        self._budget = RetryBudget()
        self._alive: set[RequestId] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, incoming: Incoming, responder: Responder, holder: WorkerId | None = None) -> None:
        """`holder` is the one worker that can answer, for it keeps what is asked for."""
        try:
            turn = await self._read(incoming, responder, holder)
        except KvherdError as error:
            self._access.refused(incoming, error)
            raise
        self._alive.add(turn.request)
        try:
            await self._serve(turn)
            turn.outcome = "broken" if turn.witness.failure else "answered"
        except asyncio.CancelledError:
            turn.outcome = "left"
            raise
        except KvherdError as error:
            turn.outcome = type(error).__name__
            raise
        finally:
            self._alive.discard(turn.request)
            self._close(turn)

    async def _read(self, incoming: Incoming, responder: Responder, holder: WorkerId | None) -> Turn:
        """What routing needs of a request. Raises a `CallerError` or `NoWorker`."""
        began_s = self._now_s()
        asked = UNTOLD if not incoming.body and incoming.path.startswith(STORED) else peek(incoming.body)
        model = self._model(asked.model, holder)
        if asked.model != model and (asked.model or incoming.path in NAMING_PATHS):
            incoming = Renamed(incoming, with_model(incoming.body, model))
            asked = peek(incoming.body)
        tokenizer = self._fleet.tokenizer(model) if self._policy.needs_tokens else None
        if self._policy.remembers_prompts:
            prompt = await read_prompt(incoming.path, incoming.body, asked, tokenizer, self._encodings)
        else:
            prompt = Prompt(incoming.body)
        within_s = deadline_s(incoming.headers)
        ends = None if within_s is None else (began_s + within_s, within_s)
        explain = (b"x-kvherd-explain", b"1") in incoming.headers
        witness = Witness(responder)
        request = self._unique(incoming.request)
        return Turn(incoming, request, asked, model, prompt, witness, began_s, explain, ends, holder)

    async def _serve(self, turn: Turn) -> None:
        """Choose and forward until a worker begins an answer. Raises a `KvherdError` if none does."""
        self._budget.earn()
        while True:
            explanation, matches = self._choose(turn)
            if self._late is not None and self._late.must_wait(turn, explanation):
                await self._late.wait(turn, explanation)
                explanation, matches = self._choose(turn)
            member = self._fleet.roster.get(explanation.chosen.worker) if explanation.chosen else None
            if member is None:
                raise self._nobody(turn, explanation)
            if turn.last_error is not None:
                self._admit_retry(turn, turn.last_error)
            self._name(turn, member, matches, explanation)
            try:
                await self._forward(turn, member)
            except WorkerError as error:
                if not turn.witness.started:
                    turn.tried[member.worker] = turn.last_error = error
                    continue
                log.warning("request %s broke off: %s", turn.request, error)
                if not turn.witness.over:
                    turn.witness.fail(str(error))
            return

    def _choose(self, turn: Turn) -> tuple[Explanation, Mapping[Place, Match]]:
        now_s = self._now_s()
        members = [one for one in self._fleet.roster if one.worker not in turn.tried]
        if turn.holder is not None:
            members = [one for one in members if one.worker == turn.holder]
        matches = self._credit.matches(turn.prompt, members) if self._policy.remembers_prompts else {}
        tokens = turn.prompt.tokens
        candidates = []
        for member in members:
            for rank in self._targets(turn, member):
                match = matches.get((member.worker, rank), NO_MATCH)
                candidates.append(
                    member.candidate(now_s, matched_tokens=match.tokens, prompt_tokens=tokens, kv=match.kv, rank=rank)
                )
        ask = Ask(turn.model, tokens, affinity=turn.asked.user or "")
        return self._policy.choose(ask, candidates, self._dice), matches

    def _targets(self, turn: Turn, member: Member) -> Sequence[Rank | None]:
        """The worker, or those of its ranks that may serve the request. Of a rank that it lacks it tells the client."""
        if turn.incoming.path not in RANKED_PATHS:
            return (None,)
        if turn.wanted_rank is None:
            return member.targets
        return (turn.wanted_rank,) if turn.wanted_rank in member.targets else (None,)

    def _name(self, turn: Turn, member: Member, matches: Mapping[Place, Match], explanation: Explanation) -> None:
        """Say in the answer's headers who serves it, and what is expected to be cached there."""
        turn.member = member
        turn.rank = explanation.chosen.rank if explanation.chosen else None
        turn.match = matches.get((member.worker, turn.rank), NO_MATCH)
        turn.headers = {"x-kvherd-worker": member.worker}
        if turn.rank is not None:
            turn.headers["x-kvherd-rank"] = str(turn.rank)
        if turn.predicted is not None:
            turn.headers["x-kvherd-predicted-cached-tokens"] = str(turn.predicted)
        if turn.explain:
            turn.headers["x-kvherd-explain"] = explanation_header(explanation, turn.held_s)

    async def _forward(self, turn: Turn, member: Member) -> None:
        """One try at one worker. Raises its `WorkerError`; the worker's health learns from it."""
        turn.uncached = turn.prompt.tokens - (turn.predicted or 0)
        turn.sent_at_s = self._now_s()
        turn.ahead_tokens = member.begin(
            turn.request,
            prompt_tokens=turn.prompt.tokens,
            uncached_tokens=turn.uncached,
            now_s=turn.sent_at_s,
            rank=turn.rank,
        )
        if turn.predicted is not None:
            alone = not turn.prompt.several and not turn.asked.branches
            turn.trial = self._audit.begin(member, turn.match, prompt_tokens=turn.prompt.tokens, alone=alone)
        call, responder = self._edited(turn, member)
        if self._policy.remembers_prompts:
            self._credit.sent(turn.request, turn.prompt, member, turn.rank)
        patience = Patience(self._clock, member, self._config.bounds, turn.ends)
        turn.witness.on_start = patience.started
        try:
            await self._fleet.worker(member.worker).forward(call, responder)
        except (WorkerError, CallerError, FleetError) as error:
            self._learn_of_failure(turn, member, error)
            raise
        except asyncio.CancelledError:
            self._learn_of_failure(turn, member, patience.gave_up)
            if patience.gave_up is None:
                raise
            raise patience.gave_up from None
        else:
            self._fleet.request_succeeded(member, turn.request)
        finally:
            patience.over()
            if turn.trial is not None:
                self._audit.end(member, turn.trial)
            self._fleet.request_ended(member, turn.request)
            if self._policy.remembers_prompts:
                self._credit.ended(turn.request)
            if self._late is not None:
                self._late.look()

    def _learn_of_failure(self, turn: Turn, member: Member, error: KvherdError | None) -> None:
        if isinstance(error, WorkerError) and not isinstance(error, WorkerRefused | WorkerUnsupported):
            self._fleet.request_failed(member, turn.request, error)
        else:
            member.breaker.abandoned(turn.request)  # it is well, and said no; or its client has left

    def _edited(self, turn: Turn, member: Member) -> tuple[Call, Responder]:
        """What is sent to this worker, and what becomes of its answer on the way to the client."""
        call = self._call(turn, member)
        reporting = self._reports.ask(turn, member, call.body)
        if reporting is not None:
            call = call._replace(body=reporting)
        sampling = self._samples.ask(turn, member, call.body)
        turn.sampled = sampling is not None
        if sampling is None:
            return call, turn.witness
        return call._replace(body=sampling, headers=uncompressed(call.headers)), WithoutUsage(turn.witness)

    def _call(self, turn: Turn, member: Member) -> Call:
        incoming, headers = turn.incoming, turn.incoming.headers
        if turn.ends is not None:
            headers = with_deadline(headers, turn.ends[0] - turn.sent_at_s)

        def first_token() -> None:
            turn.first_token_at_s = self._now_s()
            member.answered(turn.request, now_s=turn.first_token_at_s)
            if self._late is not None:
                self._late.look()

        def usage(told: Usage) -> None:
            turn.usage = told

        return Call(
            method=incoming.method,
            path=incoming.target,
            headers=headers,
            body=incoming.body,
            request=turn.request,
            model=turn.model,
            stream=turn.asked.streams,
            prompt_token_ids=None if turn.prompt.several else turn.prompt.token_ids,
            extra_headers=turn.headers,
            rank=turn.rank if turn.wanted_rank is None else None,
            on_first_token=first_token,
            on_usage=usage,
        )

    def _admit_retry(self, turn: Turn, error: WorkerError) -> None:
        """Raises `error` if the request may not be tried once more. Looking for one that can do it is no retry."""
        if isinstance(error, WorkerUnsupported):
            return
        failed = sum(not isinstance(each, WorkerUnsupported) for each in turn.tried.values())
        stateful = turn.incoming.path.startswith(STORED)  # a second try could store a conversation twice
        if stateful or failed >= self._config.tries or not self._budget.spend():
            raise error
        self._metrics.retried(error.worker)

    def _nobody(self, turn: Turn, explanation: Explanation) -> KvherdError:
        """Why nobody serves it: a worker's own refusal if one was asked, else what rules each of them out."""
        for error in turn.tried.values():
            if not isinstance(error, WorkerUnreachable | WorkerFailed | WorkerUnsupported):
                return error
        able = [one for one in self._fleet.roster if turn.model in one.models]
        unable = [turn.tried.get(one.worker) for one in able]
        if able and all(isinstance(error, WorkerUnsupported) for error in unable):
            return Unsupported(next(error.what for error in unable if isinstance(error, WorkerUnsupported)))
        reasons = [f"{one.candidate.worker} {one.reason}" for one in explanation.ruled_out]
        return NoWorker(turn.model, (*map(str, turn.tried.values()), *reasons))

    def _model(self, asked: str | None, holder: WorkerId | None) -> str:
        """The model that is meant. Raises `ModelUnknown`, `FieldInvalid` or `NoWorker`."""
        roster = self._fleet.roster
        if not asked and holder is not None and (member := roster.get(holder)) is not None and member.models:
            return member.models[0]
        served, meant = roster.models(), roster.meant(asked or "")
        if meant in served:
            return meant
        if not served or meant in roster.expected():
            reasons = tuple(f"{one.worker} {one.unavailable(self._now_s())}" for one in roster)
            raise NoWorker(meant, reasons)
        if asked:
            raise ModelUnknown(asked, roster.names())
        if len(served) > 1:
            raise FieldInvalid("model", f"is missing; name one of {', '.join(roster.names())}")
        return served[0]

    def _unique(self, request: RequestId) -> RequestId:
        """A client may use one id for several requests; a worker may not be given one twice at a time."""
        number, unique = 1, request
        while unique in self._alive:
            number += 1
            unique = RequestId(f"{request}-{number}")
        return unique

    def _close(self, turn: Turn) -> None:
        """Learn from what was seen, and write one line about it; never a prompt."""
        if turn.member is not None and turn.outcome == "answered" and turn.witness.status == 200:
            self._learn(turn, turn.member)
        self._access.ended(turn, now_s=self._now_s())

    def _learn(self, turn: Turn, member: Member) -> None:
        """Truth and prefill rate from one complete answer."""
        cached = reported_cached(member, turn.usage)
        self._samples.learn(turn, member)
        self._count(turn, member)
        if turn.trial is not None:
            self._audit.answered(member, turn.trial, turn.usage, cached, now_s=self._now_s())
        if turn.predicted is not None:
            self._metrics.cached(member.worker, turn.predicted, cached)
        # Over HTTP the first token of an answer that does not stream comes with the last.
        seen = turn.asked.streams or member.worker.startswith(GRPC)
        if seen and turn.first_token_at_s is not None:
            prompt_tokens = turn.usage.prompt_tokens if turn.usage else turn.prompt.tokens
            known = turn.predicted if cached is None else cached
            computed = turn.ahead_tokens - turn.uncached + max(0, prompt_tokens - (known or 0))
            seconds = turn.first_token_at_s - turn.sent_at_s
            self._fleet.roster.prefilled(member, int(computed), seconds, self._now_s())

    def _count(self, turn: Turn, member: Member) -> None:
        """Hold our count of prompt tokens against the worker's, where it made tokens of its own."""
        if turn.usage is None or turn.prompt.token_ids is None or turn.prompt.several:
            return
        if not member.given_tokens:
            counted(member, turn.prompt.classes, ours=turn.prompt.tokens, theirs=turn.usage.prompt_tokens)

    def _now_s(self) -> float:
        return self._clock.time()

    @property
    def _clock(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:  # asked for once: each time costs a system call in 3.11
            self._loop = asyncio.get_running_loop()
        return self._loop
