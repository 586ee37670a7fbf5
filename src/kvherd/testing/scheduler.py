"""A scheduler in this process: every token is known beforehand, and every fault comes when it is told to."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from kvherd.core.engine.generation import Finish, FinishReason, GenerationRequest, TokenDelta, TokenLogprob
from kvherd.core.engine.profile import ProfileRequest
from kvherd.core.engine.reports import Blocker, OrderAnswer, OrderReport, RankFacts, RankLoad
from kvherd.core.errors import EngineError, EngineStopping, RequestDuplicate, SchedulerDied
from kvherd.core.ids import OrderId, Rank, RequestId

_LETTERS = 26
_FIRST_LETTER = 97


def answer_token(prompt: Sequence[int], index: int) -> int:
    """The token at `index` of the answer to `prompt`: a lower-case letter in a vocabulary of bytes."""
    return _FIRST_LETTER + (sum(prompt) + index) % _LETTERS


def rank_facts(
    rank: int = 0, *, max_context_tokens: int = 1024, capacity_tokens: int = 4096, vocab_size: int = 259
) -> RankFacts:
    return RankFacts(
        rank=Rank(rank),
        pid=1,
        block_size=16,
        capacity_tokens=capacity_tokens,
        max_running=8,
        max_context_tokens=max_context_tokens,
        vocab_size=vocab_size,
        eos_token_ids=(256,),
        events_endpoint=f"tcp://127.0.0.1:{10 + rank}",
        replay_endpoint=f"tcp://127.0.0.1:{30 + rank}",
        weights_bytes=1_000_000,
        kv_bytes=2_000_000,
    )


@dataclass(slots=True)
class _Life:
    request: GenerationRequest
    rank: Rank
    cached_tokens: int
    said: int = 0
    aborted: str | None = None
    woken: asyncio.Event = field(default_factory=asyncio.Event)

    def delta(
        self, token_ids: tuple[int, ...] = (), finish: Finish | None = None, logprobs: tuple[TokenLogprob, ...] = ()
    ) -> TokenDelta:
        prompt_tokens = len(self.request.prompt_token_ids)
        return TokenDelta(token_ids, prompt_tokens, self.said, self.cached_tokens, logprobs, finish)


class FakeScheduler:
    """Implements `ports.scheduler.Scheduler`. A token takes `step_s`; none comes while `stalled`.

    `refusals` are why a rank will not flush, `silent` ranks answer no order. `submitted` and `aborted` say what reached
    it: requests, and ids of those that were ended before their time. `withdrawn` counts orders whose caller left.
    """

    def __init__(self, facts: Sequence[RankFacts] = (), *, step_s: float = 0.0, order_grace_s: float = 1.0) -> None:
        self.ranks: Sequence[RankFacts] = list(facts) or [rank_facts()]
        self.submitted: list[GenerationRequest] = []
        self.aborted: list[RequestId] = []
        self.flush_calls: list[tuple[float, bool]] = []
        self.refusals: dict[Rank, str] = {}
        self.silent: set[Rank] = set()
        self.failure: EngineError | None = None
        self.late_answers = 0
        self.open_orders = 0
        self.withdrawn = 0
        self.profile: ProfileRequest | None = None
        self._step_s = step_s
        self._order_grace_s = order_grace_s
        self._stalled = False
        self._lives: dict[RequestId, _Life] = {}
        self._prompts: list[tuple[int, ...]] = []
        self._changed = asyncio.Event()
        self._orders = 0
        self._flushes = 0

    @property
    def loads(self) -> Sequence[RankLoad]:
        return [self._load(facts) for facts in self.ranks]

    @property
    def running(self) -> int:
        return len(self._lives)

    # --- what a test may do to it -------------------------------------------------------------

    def stall(self) -> None:
        self._stalled = True

    def resume(self) -> None:
        self._stalled = False
        self._wake_all()

    def die(self, reason: str, *, rank: int = 0) -> None:
        """What a killed process does: everything in flight fails at once."""
        self.failure = SchedulerDied(rank, reason)
        self._wake_all()

    def stop(self) -> None:
        self.failure = EngineStopping()
        self._wake_all()

    # --- what the port promises ---------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenDelta, None]:
        life = self._admit(request)
        ended = False
        try:
            while not ended:
                await self._step(life)
                delta = self._next(life)
                ended = delta.finish is not None
                if ended:
                    self._forget(life)
                yield delta
        finally:
            self._forget(life)
            if not ended:
                self.aborted.append(request.request)

    async def abort(self, request: RequestId, *, reason: str = "") -> bool:
        life = self._lives.get(request)
        if life is None:
            return False
        life.aborted = reason or "aborted"
        self.aborted.append(request)
        self._forget(life)
        life.woken.set()
        return True

    async def flush(self, *, timeout_s: float, hold: bool = False) -> OrderReport:
        self._raise_failure()
        self.flush_calls.append((timeout_s, hold))
        order = self._new_order()
        with self._under_way():
            waited = await self._idle_within(timeout_s)
            if self.silent:
                await asyncio.sleep(self._order_grace_s)
        self._raise_failure()
        answers = [self._flushed(order, facts.rank, timeout_s, idle=waited) for facts in self.ranks]
        if all(answer.done for answer in answers):
            self._prompts.clear()
        self._flushes += 1
        return self._report(answers)

    async def state(self, *, timeout_s: float = 5.0) -> OrderReport:
        self._raise_failure()
        order = self._new_order()
        if self.silent:
            await asyncio.sleep(timeout_s)
            self._raise_failure()
        return self._report(
            [OrderAnswer(order, facts.rank, done=True, message="", load=self._load(facts)) for facts in self.ranks]
        )

    async def start_profile(self, profile: ProfileRequest, *, timeout_s: float) -> OrderReport:
        report = await self._profile_order(profile, timeout_s, conflict=self.profile is not None, why="one is on")
        self.profile = profile if report.done else self.profile
        return report

    async def stop_profile(self, *, timeout_s: float) -> OrderReport:
        report = await self._profile_order(self.profile, timeout_s, conflict=self.profile is None, why="none is on")
        self.profile = None if report.done else self.profile
        return report

    async def _profile_order(
        self, profile: ProfileRequest | None, timeout_s: float, *, conflict: bool, why: str
    ) -> OrderReport:
        self._raise_failure()
        order = self._new_order()
        with self._under_way():
            if self.silent:
                await asyncio.sleep(timeout_s)
        self._raise_failure()
        answers = []
        for rank in (facts.rank for facts in self.ranks):
            refused = conflict or rank in self.refusals
            answers.append(
                OrderAnswer(
                    order,
                    rank,
                    done=not refused,
                    message=why if conflict else self.refusals.get(rank, "obeyed"),
                    conflict=conflict,
                    files=(f"/traces/{profile.file_name(rank, None)}",) if profile and not refused else (),
                    profile_id=profile.profile_id if profile else "",
                )
            )
        return self._report(answers)

    # --- generations --------------------------------------------------------------------------

    def _admit(self, request: GenerationRequest) -> _Life:
        self._raise_failure()
        if request.request in self._lives:
            raise RequestDuplicate(request.request)
        self.submitted.append(request)
        prompt = tuple(request.prompt_token_ids)
        rank = Rank(request.rank or 0)
        life = _Life(request, rank, self._cached_tokens(prompt))
        self._prompts.append(prompt)
        self._lives[request.request] = life
        return life

    def _cached_tokens(self, prompt: tuple[int, ...]) -> int:
        """Whole blocks that an earlier prompt shares with this one; the last token is always computed."""
        block_size = self.ranks[0].block_size
        shared = max((_common(prompt, earlier) for earlier in self._prompts), default=0)
        return min(shared, len(prompt) - 1) // block_size * block_size

    async def _step(self, life: _Life) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time() + self._step_s
        await asyncio.sleep(0)
        while life.aborted is None and self.failure is None:
            wait_s = None if self._stalled else due_s - loop.time()
            if wait_s is not None and wait_s <= 0:
                return
            life.woken.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await life.woken.wait()

    def _next(self, life: _Life) -> TokenDelta:
        if life.aborted is not None:
            return life.delta(finish=Finish(FinishReason.ABORT, message=life.aborted))
        self._raise_failure()
        limits, sampling = life.request.limits, life.request.sampling
        token_id = answer_token(life.request.prompt_token_ids, life.said)
        if token_id in limits.stop_token_ids:
            return life.delta(finish=Finish(FinishReason.STOP, token_id))
        life.said += 1
        finish = Finish(FinishReason.LENGTH) if life.said >= limits.max_new_tokens else None
        logprobs: tuple[TokenLogprob, ...] = ()
        if sampling.logprobs is not None:
            logprobs = (TokenLogprob(token_id, -0.5, ((token_id, -0.5), (0, -1.5))[: sampling.logprobs]),)
        return life.delta((token_id,), finish, logprobs)

    def _forget(self, life: _Life) -> None:
        if self._lives.get(life.request.request) is life:
            del self._lives[life.request.request]
            self._changed.set()

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _wake_all(self) -> None:
        self._changed.set()
        for life in self._lives.values():
            life.woken.set()

    # --- orders -------------------------------------------------------------------------------

    @contextmanager
    def _under_way(self) -> Iterator[None]:
        self.open_orders += 1
        try:
            yield
        except asyncio.CancelledError:
            self.withdrawn += 1
            raise
        finally:
            self.open_orders -= 1

    async def _idle_within(self, timeout_s: float) -> bool:
        if timeout_s <= 0:
            return not self._lives
        try:
            async with asyncio.timeout(timeout_s):
                while self._lives and self.failure is None:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def _flushed(self, order: OrderId, rank: Rank, timeout_s: float, *, idle: bool) -> OrderAnswer:
        if rank in self.refusals:
            return OrderAnswer(order, rank, done=False, message=self.refusals[rank])
        if idle:
            return OrderAnswer(order, rank, done=True, message="cleared", cleared_blocks=len(self._prompts))
        running = len(self._lives)
        return OrderAnswer(
            order,
            rank,
            done=False,
            message=f"{running} running" + (f" after {timeout_s:g} s" if timeout_s else ""),
            timed_out=timeout_s > 0,
            blockers=(Blocker("running", running),),
        )

    def _report(self, answers: Sequence[OrderAnswer]) -> OrderReport:
        return OrderReport(
            tuple(answer for answer in answers if answer.rank not in self.silent),
            tuple(answer.rank for answer in answers if answer.rank in self.silent),
        )

    def _new_order(self) -> OrderId:
        self._orders += 1
        return OrderId(f"order-{self._orders}")

    def _load(self, facts: RankFacts) -> RankLoad:
        mine = [life for life in self._lives.values() if life.rank == facts.rank]
        return RankLoad(
            running=len(mine),
            waiting=0,
            waiting_uncached_tokens=0,
            used_tokens=sum(len(life.request.prompt_token_ids) + life.said for life in mine),
            active_tokens=sum(len(life.request.prompt_token_ids) + life.said for life in mine),
            capacity_tokens=facts.capacity_tokens,
            max_running=facts.max_running,
            requests_total=len(self.submitted),
            aborts_total=len(self.aborted),
            flushes_total=self._flushes,
        )


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
