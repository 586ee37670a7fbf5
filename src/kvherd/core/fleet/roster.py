"""The workers of one gateway, what is under way at each, and whether they take requests.

connecting   registered; it has not said what it is yet
up           answers
suspect      failed lately, still serves
down         takes no request until a probe succeeds
draining     takes no new request; it leaves when those under way have ended
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import assert_never

from kvherd.core.fleet.breaker import Breaker, BreakerState
from kvherd.core.fleet.health import Down, HealthJudge, Suspect, Up
from kvherd.core.fleet.spec import GRPC
from kvherd.core.fleet.truth import Truth
from kvherd.core.fleet.under_way import NO_SHARE, Share, UnderWay
from kvherd.core.ids import Rank, RequestId, WorkerId
from kvherd.core.kv.pages import folded_block
from kvherd.core.routing.backlog import Backlog
from kvherd.core.routing.candidate import Candidate, KvKnowledge
from kvherd.core.routing.rates import PrefillRate, Turnover
from kvherd.core.routing.slots import SlotTime, slot_wait_s
from kvherd.core.text.parity import MUST_AGREE, UNASKED, Agreement, Finding, PromptClass


class WorkerState(StrEnum):
    CONNECTING = "connecting"
    UP = "up"
    SUSPECT = "suspect"
    DOWN = "down"
    DRAINING = "draining"


@dataclass(slots=True)
class Member:
    """One worker as the gateway knows it. `detected` is false until it said what it is; then the facts hold.

    `events_url`, `replay_url` and `binds_events` are where its KV events are, as in `ports.kv_feed.EventSource`;
    `tokenizer_from` is where its tokenizer is, a gRPC URL or a directory of this machine, and `tokenizer_problem` why
    it could not be had from there.
    """

    worker: WorkerId
    events_url: str | None = None
    replay_url: str | None = None
    binds_events: bool = False
    tokenizer_from: str | None = None
    tokenizer_problem: str = ""
    tokenization: dict[PromptClass, Finding] = field(default_factory=dict)
    """What was found of the classes of prompts that were compared."""
    compare_at_s: float = -math.inf
    """When it may be asked for its own tokens; `compare_tries`: how often in a row that was in vain."""
    compare_tries: int = 0
    detected: bool = False
    kind: str = ""
    version: str = ""
    models: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    block_size: int = 0
    ranks: int = 1
    addressable: bool = False
    """A request can name the rank that shall serve it."""
    health_s: float = 0.0
    """How long it may need to tell its health."""
    max_context_tokens: int = 0
    capacity_tokens: int = 0
    max_running: int = 0
    """Its slots, of all ranks together; 0: unknown."""
    labels: Mapping[str, str] = field(default_factory=dict)
    weight: float = 1.0
    draining: bool = False
    leaves_at_s: float | None = None
    """When it lets go of what is still under way there, if it was told to leave."""
    problem: str = "not asked yet"
    running: int = 0
    waiting: int = 0
    used_tokens: int = 0
    shares: Mapping[Rank, Share] = field(default_factory=dict)
    foreign: int = 0
    """Requests there that are not ours, as it said last."""
    in_flight: dict[RequestId, UnderWay] = field(default_factory=dict)
    answered_at_s: float = -math.inf
    """When it last gave a first token or a whole answer."""
    requests_total: int = 0
    failures_total: int = 0
    healings: int = 0
    """Requests that asked it for a full report, and flushes, since it may hold blocks that nobody told of."""
    health: HealthJudge = field(default_factory=HealthJudge)
    breaker: Breaker = field(default_factory=Breaker)
    rate: PrefillRate = field(default_factory=PrefillRate)
    slot_time: SlotTime = field(default_factory=SlotTime)
    backlogs: dict[Rank | None, Backlog] = field(default_factory=dict)
    turnover: Turnover = field(default_factory=Turnover)
    truth: Truth = field(default_factory=Truth)

    @property
    def index_block_size(self) -> int:
        """Tokens of the blocks that its cache is known in: its own, unless these are small pages; 0 if untold."""
        return folded_block(self.block_size)

    @property
    def slug(self) -> str:
        """Its name in a URL's path: `grpc-127.0.0.1-51000`."""
        return re.sub(r"[^A-Za-z0-9._]+", "-", self.worker).strip("-")

    @property
    def given_tokens(self) -> bool:
        """The gateway makes its tokens: nothing can differ."""
        return self.worker.startswith(GRPC)

    def tokenizes_alike(self, classes: Iterable[PromptClass]) -> bool:
        """It makes the same tokens as the gateway of a prompt of all these classes; none: the tokens are the client's.

        It is believed to, unless it is known not to; of the classes that engines are known to read each in their own
        way, only if it was seen to.
        """
        for each in classes:
            agreement = self.tokenization.get(each, UNASKED).agreement
            if agreement is Agreement.AGREES:
                continue
            if agreement is Agreement.DIFFERS or (each in MUST_AGREE and not self.given_tokens):
                return False
        return True

    @property
    def differing(self) -> tuple[PromptClass, ...]:
        """The classes of prompts that it is known to tokenize otherwise than the gateway."""
        return tuple(each for each, found in self.tokenization.items() if found.agreement is Agreement.DIFFERS)

    @property
    def state(self) -> WorkerState:
        if self.draining:
            return WorkerState.DRAINING
        if not self.detected:
            return WorkerState.CONNECTING
        match self.health.verdict:
            case Up():
                return WorkerState.UP
            case Suspect():
                return WorkerState.SUSPECT
            case Down():
                return WorkerState.DOWN
            case verdict:
                assert_never(verdict)

    @property
    def reason(self) -> str:
        """Why it is not simply up, in words; empty if it is."""
        if not self.detected:
            return self.problem
        match self.health.verdict:
            case Suspect(reason) | Down(reason):
                return reason
            case _:
                return ""

    def unavailable(self, now_s: float) -> str:
        """Why it takes no request, in words; empty if it does."""
        if self.breaker.closed and self.detected and not self.draining and not self.health.down:
            return ""
        match self.state:
            case WorkerState.UP | WorkerState.SUSPECT:
                return "" if self.breaker.admits(now_s) else _why_broken(self.breaker.state(now_s))
            case WorkerState.DRAINING:
                return "is draining"
            case WorkerState.CONNECTING:
                return f"is not connected: {self.reason}"
            case WorkerState.DOWN:
                return f"is down: {self.reason}"
            case state:
                assert_never(state)

    @property
    def targets(self) -> tuple[Rank | None, ...]:
        """What a request can be sent to: each rank by itself, or the worker."""
        return tuple(map(Rank, range(self.ranks))) if self.addressable and self.ranks > 1 else (None,)

    def candidate(
        self, now_s: float, *, matched_tokens: int, prompt_tokens: int, kv: KvKnowledge, rank: Rank | None = None
    ) -> Candidate:
        """What routing may know of it, or of one of its targets, for one prompt, at this moment."""
        rate, backlog, evicted = self.rate.at(now_s), self.backlogs.get(rank), 0
        if rank is None:
            running, waiting, used_tokens, shares = self.running, self.waiting, self.used_tokens, 1
            in_flight = len(self.in_flight)
        else:
            (running, waiting, used_tokens), shares = self.shares.get(rank, NO_SHARE), len(self.targets)
            in_flight = sum(one.rank == rank for one in self.in_flight.values()) if shares > 1 else len(self.in_flight)
        slots, ahead = self.max_running // shares, in_flight + self.foreign // shares
        if self.capacity_tokens and prompt_tokens > matched_tokens:
            room = max(0, self.capacity_tokens // shares - used_tokens)
            evicted = max(0, prompt_tokens - matched_tokens - room)
        # By position: by name it would cost twice as much, for every worker at every request.
        return Candidate(
            self.worker,
            self.models,
            rank,
            self.unavailable(now_s),
            in_flight,
            running,
            waiting,
            backlog.seconds(rate=rate, now_s=now_s) if backlog is not None else 0.0,
            rate,
            matched_tokens,
            evicted,
            self.turnover.age_s(self.capacity_tokens, now_s) if evicted else 0.0,
            self.max_context_tokens,
            kv,
            self.weight,
            slot_wait_s(ahead, slots, self.slot_time.seconds) if 0 < slots <= ahead else 0.0,
        )

    def backlog_s(self, now_s: float) -> float:
        """Seconds of prefill promised to it and not yet done; of several ranks, to the one that has most."""
        rate = self.rate.at(now_s)
        return max((one.seconds(rate=rate, now_s=now_s) for one in self.backlogs.values()), default=0.0)

    def slot_wait_s(self) -> float:
        """Seconds until a request that is sent there now has a slot, at the target where that is soonest."""
        if not self.max_running:
            return 0.0
        return min(self._slot_wait_s(target) for target in self.targets)

    def room_in_s(self, bound_s: float, now_s: float) -> float:
        """Seconds until one of its targets has no more than `bound_s` of backlog or of waiting for a slot, if nothing
        is sent there meanwhile.

        Of a worker whose rate nobody knows a backlog says nothing, nor do full slots if nobody knows how long one is
        kept: it has room.
        """
        least_s = min(self._begins_in_s(target, now_s) for target in self.targets)
        return max(0.0, least_s - bound_s)

    def begin(
        self, request: RequestId, *, prompt_tokens: int, uncached_tokens: int, now_s: float, rank: Rank | None = None
    ) -> float:
        """A request is sent there; answers the tokens of prefill that are to be done before its first token."""
        self.breaker.begin(request, now_s)
        self.requests_total += 1
        slots, ahead = self._slots(rank) if self.max_running else (0, 0)
        self.in_flight[request] = UnderWay(prompt_tokens, now_s, rank, ahead, slots)
        self.turnover.stored(uncached_tokens, now_s)
        return self._backlog(rank).add(request, uncached_tokens, rate=self.rate.at(now_s), now_s=now_s)

    def answered(self, request: RequestId, *, now_s: float) -> None:
        """Its first token was seen: a sign of life."""
        self.answered_at_s = now_s
        self.prefilled(request, now_s=now_s)

    def prefilled(self, request: RequestId, *, now_s: float) -> None:
        """Its prefill is over, or will never be."""
        for backlog in self.backlogs.values():
            if not backlog.empty:
                backlog.end(request, rate=self.rate.at(now_s), now_s=now_s)

    def end(self, request: RequestId, *, now_s: float) -> None:
        """It is no longer under way, whatever became of it."""
        self.in_flight.pop(request, None)
        self.prefilled(request, now_s=now_s)

    def served(self, request: UnderWay, *, now_s: float) -> None:
        """A whole answer of it has come: learn how long a slot is kept."""
        if request.slots:
            self.slot_time.observe(now_s - request.since_s, request.ahead, request.slots)

    def restarted(self) -> None:
        """What was known of its load is of another life."""
        self.running = self.waiting = self.used_tokens = self.foreign = 0
        self.shares = {}
        self.truth.restarted()
        self.compare_at_s, self.compare_tries = -math.inf, 0
        self.tokenization.clear()

    def _slots(self, rank: Rank | None) -> tuple[int, int]:
        """How many there are, 0 if unknown, and how many requests are there: ours, and those of others as it said last.

        Of what others sent to its ranks each is thought to have the same share.
        """
        if rank is None or self.ranks <= 1:
            return self.max_running, len(self.in_flight) + self.foreign
        ours = sum(one.rank == rank for one in self.in_flight.values())
        return self.max_running // self.ranks, ours + self.foreign // self.ranks

    def _slot_wait_s(self, target: Rank | None) -> float:
        slots, ahead = self._slots(target)
        return slot_wait_s(ahead, slots, self.slot_time.seconds)

    def _begins_in_s(self, target: Rank | None, now_s: float) -> float:
        """Seconds until what is sent to this target begins to be computed, as far as that can be told."""
        wait_s = self._slot_wait_s(target) if self.max_running and not self.slot_time.unknown else 0.0
        if self.rate.unknown:
            return wait_s
        return max(wait_s, self._backlog(target).seconds(rate=self.rate.at(now_s), now_s=now_s))

    def _backlog(self, rank: Rank | None) -> Backlog:
        backlog = self.backlogs.get(rank)
        if backlog is None:
            backlog = self.backlogs[rank] = Backlog()
        return backlog


class Roster:
    """The members, in the order in which they joined.

    `aliases` are other names of models, each with the one it stands for; a name that a member serves is never taken
    for an alias. `required` are models that must be served, whether or not a member ever said that it does.
    """

    def __init__(self) -> None:
        self._members: dict[WorkerId, Member] = {}
        self._slot_time = SlotTime()
        self.aliases: Mapping[str, str] = {}
        self.required: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def __len__(self) -> int:
        return len(self._members)

    def join(self, member: Member) -> None:
        peer = next(iter(self._members.values()), None)
        if peer is not None:
            member.rate.usual = peer.rate.usual
        member.slot_time.peers = self._slot_time
        self._members[member.worker] = member

    def leave(self, worker: WorkerId) -> None:
        self._members.pop(worker, None)

    def get(self, worker: WorkerId) -> Member | None:
        return self._members.get(worker)

    def find(self, name: str) -> Member | None:
        """The member of this URL or slug."""
        return next((one for one in self._members.values() if name in (one.worker, one.slug)), None)

    def prefilled(self, member: Member, tokens: int, seconds: float, now_s: float) -> None:
        """A member computed `tokens` of prompts in `seconds`: learn its rate, and what is usual among all."""
        if member.rate.observe(tokens, seconds, now_s):
            learned = [one.rate.learned for one in self._members.values() if one.rate.observations]
            for one in self._members.values():
                one.rate.usual = sum(learned) / len(learned)

    def models(self) -> tuple[str, ...]:
        """Every model that a member serves, up or not, in the order in which they were learned."""
        return tuple(dict.fromkeys(model for one in self._members.values() for model in one.models))

    def names(self) -> tuple[str, ...]:
        """What a client may ask for: every model, and every alias of one."""
        served = self.models()
        return tuple(dict.fromkeys((*served, *(alias for alias, model in self.aliases.items() if model in served))))

    def expected(self) -> tuple[str, ...]:
        """Every model that there is, or that someone relies on."""
        return tuple(dict.fromkeys((*self.models(), *self.required, *self.aliases.values())))

    def serves(self, model: str) -> bool:
        """Whether a member serves it, up or not."""
        return any(model in one.models for one in self._members.values())

    def others_serve(self, member: Member, model: str, now_s: float) -> bool:
        """Whether another than this one, with nothing against it, would take a request for `model` now."""
        others = (one for one in self._members.values() if one is not member and model in one.models)
        return any(one.breaker.closed and not one.unavailable(now_s) for one in others)

    def meant(self, name: str) -> str:
        """The model that a client means by a name: the name itself unless it is an alias."""
        return name if name not in self.aliases or self.serves(name) else self.aliases[name]

    def unserved(self, now_s: float) -> tuple[str, ...]:
        """The models, of those expected, that no member would take a request for now."""
        able = {model for one in self._members.values() if not one.unavailable(now_s) for model in one.models}
        return tuple(model for model in self.expected() if model not in able)

    def room_in_s(self, model: str, bound_s: float, now_s: float) -> float:
        """Seconds until a worker for `model` has room, as `Member.room_in_s` has it, if nothing is sent meanwhile.

        0 where there is room now, and where nobody takes requests: nobody is worth waiting for.
        """
        able = [one for one in self._members.values() if model in one.models and not one.unavailable(now_s)]
        return min((one.room_in_s(bound_s, now_s) for one in able), default=0.0)

    def select(self, which: Callable[[Member], bool]) -> list[Member]:
        return [one for one in self._members.values() if which(one)]


def _why_broken(state: BreakerState) -> str:
    if state is BreakerState.HALF_OPEN:
        return "failed too often lately; one request is trying it"
    return "failed too often lately; its circuit breaker is open"
