"""One rank's scheduler: requests, orders and finished steps in; plans and news out.

Rules for whoever drives it:
1. Carry out the `News` of every call. Within one, publish the events first.
2. `plan_step` gives the next forward pass, or None when there is nothing to run. Run it, then call `complete_step`
   with a choice for each row that chooses, in order. No other plan is made in between; every other call may come
   in between.
3. Call `expire` when `next_deadline_s` has come. All times are of one clock, and never go back.

4. `plan_write` gives blocks to copy to host memory, or None. Copy them beside whatever step runs, then call
   `complete_write`. No other write is planned in between.
5. `plan_ask` gives blocks to find in the store or to read from it into host memory, `plan_put` blocks to write from
   there to the store, each or None: the same again, with `complete_look`, `complete_fetch` and `complete_put`. Ask for
   this plan before a step's: requests that need not wait for the store are in the step then.

Data-parallel ranks are this class once a rank.
"""

import math
from collections.abc import Iterator
from collections.abc import Sequence as Listing
from dataclasses import replace

from kvherd.core.engine.generation import Finish, FinishReason, GenerationRequest, TokenDelta
from kvherd.core.engine.reports import Blocker, OrderAnswer, RankLoad
from kvherd.core.errors import RequestDuplicate
from kvherd.core.ids import OrderId, Rank, RequestId
from kvherd.core.kv.events import Tier
from kvherd.core.scheduler.endings import ending, refusal
from kvherd.core.scheduler.flushes import Flushes, PendingFlush
from kvherd.core.scheduler.kv_memory import KvMemory
from kvherd.core.scheduler.planner import StepPlanner
from kvherd.core.scheduler.sequence import Sequence
from kvherd.core.scheduler.steps import Choice, FetchPlan, LookPlan, News, PutPlan, SchedulerLimits, StepPlan, WritePlan
from kvherd.core.scheduler.totals import Totals
from kvherd.core.scheduler.waiting import WaitingQueue

Progress = tuple[RequestId, TokenDelta]


class Scheduler:
    """All of one rank's decisions. Not safe in two threads at once."""

    def __init__(self, rank: Rank, limits: SchedulerLimits) -> None:
        self._rank = rank
        self._limits = limits
        self._memory = KvMemory(
            blocks=limits.pool_blocks,
            block_size=limits.block_size,
            host_blocks=limits.host_blocks,
            store=limits.store,
            store_patience_s=limits.store_patience_s,
        )
        self._waiting = WaitingQueue()
        self._planner = StepPlanner(limits, self._memory, self._waiting)
        self._flushes = Flushes(rank)
        self._totals = Totals()
        self._alive: dict[RequestId, Sequence] = {}
        self._stepping: StepPlan | None = None
        self._serial = 0

    @property
    def stepping(self) -> bool:
        """A plan is out and not completed."""
        return self._stepping is not None

    @property
    def next_deadline_s(self) -> float | None:
        """When `expire` is due."""
        times_s = (self._flushes.next_deadline_s, self._memory.storage.next_deadline_s)
        return min((time_s for time_s in times_s if time_s is not None), default=None)

    def submit(self, request: GenerationRequest, now_s: float) -> News:
        """Queue a request. One that can never run, or for which there is no place, ends at once with the reason.

        Raises `RequestDuplicate` if its id is alive; that one goes on.
        """
        if request.request in self._alive:
            raise RequestDuplicate(request.request)
        self._totals.requests += 1
        problem = refusal(request, self._limits)
        if problem is None and len(self._waiting) >= self._limits.max_waiting:
            problem = f"{self._limits.max_waiting} requests are waiting here already, the limit; try again later"
        if problem is not None:
            finish = Finish(FinishReason.ABORT, message=problem)
            return News(progress=((request.request, TokenDelta((), len(request.prompt_token_ids), 0, 0, (), finish)),))
        sequence = self._sequence(request)
        cached = self._memory.tree.match(sequence.namespace, sequence.tokens, blocks=sequence.shareable_blocks)
        sequence.uncached_tokens = len(sequence.tokens) - len(cached) * self._limits.block_size
        self._alive[request.request] = sequence
        self._waiting.add(sequence)
        self._memory.storage.expect(sequence, now_s)
        return self._settle(now_s)

    def abort(self, request: RequestId, reason: str, now_s: float) -> News:
        """End a request now. Its blocks are free at once, or when the step that computes in them is complete."""
        sequence = self._alive.get(request)
        if sequence is None:
            return News()
        expired = self._expire(now_s)
        last = self._abort(sequence, reason)
        return self._settle(now_s, [last], expired)

    def abort_all(self, reason: str, now_s: float) -> News:
        """End every request, and refuse every flush that waits."""
        progress = [self._abort(sequence, reason) for sequence in list(self._alive.values())]
        return News(tuple(progress), tuple(self._flushes.refuse_all(reason)), self._memory.take_events())

    def flush(
        self, order: OrderId, *, timeout_s: float, hold: bool, now_s: float, asked_s: float | None = None
    ) -> News:
        """Clear the cache now if idle; else wait for that at most `timeout_s` seconds, or refuse if that is 0.

        The seconds count from `asked_s`, when the caller called; it may have waited to be heard.
        With `hold`, requests that come from now on are not admitted until this flush is answered.
        """
        blockers = self._blockers()
        refused = self._flushes.refusal(timeout_s, blockers)
        if refused is not None:
            return News(answers=(self._flushes.refused(order, refused, blockers),))
        self._serial += 1
        began_s = now_s if asked_s is None else min(asked_s, now_s)
        deadline_s = began_s + timeout_s if blockers else math.inf  # idle: it is done before this returns
        self._flushes.add(PendingFlush(order, self._serial, timeout_s, deadline_s, hold))
        return self._settle(now_s)

    def withdraw(self, order: OrderId, now_s: float) -> News:
        """Forget a flush whose caller left; what it held back may run. There is no answer."""
        self._flushes.withdraw(order)
        return self._settle(now_s)

    def state(self, order: OrderId, now_s: float) -> News:
        """Answer with the load of this moment."""
        return News(answers=(OrderAnswer(order, self._rank, done=True, message="", load=self.load(now_s)),))

    def expire(self, now_s: float) -> News:
        """Time has passed: flushes whose time has come are answered so, requests do not wait for the store for ever."""
        return self._settle(now_s)

    def plan_step(self) -> StepPlan | None:
        """Decide the next forward pass; None if nothing can run (its rows may be fewer than what runs)."""
        assert self._stepping is None, "a step is planned before the last one was completed"
        rows = self._planner.plan(admit_before=self._flushes.hold_from)
        loads = self._memory.take_loads()
        if not rows and not loads:
            return None
        self._stepping = StepPlan(rows, self._memory.take_events(), loads)
        return self._stepping

    def plan_write(self) -> WritePlan | None:
        """Decide which blocks to copy to host memory next; None if none wait, or a flush waits for the last write."""
        if self._memory.host.writing or self._flushes:
            return None
        copies = self._memory.start_writes()
        return WritePlan(copies, self._memory.take_events()) if copies else None

    def complete_write(self, now_s: float) -> News:
        """The planned write is done."""
        expired = self._expire(now_s)  # with what was in its way then
        self._memory.written()
        return self._settle(now_s, expired=expired)

    def plan_ask(self, now_s: float) -> LookPlan | FetchPlan | None:
        """Decide what to ask the store next; None if nobody waits for it."""
        if self._memory.storage.asked:
            return None
        plan = self._memory.start_ask(now_s, before=self._flushes.hold_from)
        return replace(plan, events=self._memory.take_events()) if isinstance(plan, FetchPlan) else plan

    def complete_look(self, found: int, now_s: float) -> News:
        """The planned look is done: so many of its blocks are there, from the first on."""
        self._memory.storage.looked(found)
        return self._settle(now_s)

    def complete_fetch(self, verified: Listing[bool], now_s: float) -> News:
        """The planned fetch is done; `verified` says of each block whether its bytes are in place and right."""
        expired = self._expire(now_s)
        self._memory.fetched(verified)
        return self._settle(now_s, expired=expired)

    def plan_put(self) -> PutPlan | None:
        """Decide which blocks to write to the store next; None if none wait, or a flush waits for the last put."""
        if self._memory.storage.putting or self._flushes:
            return None
        blocks = self._memory.storage.start_put()
        return PutPlan(tuple(blocks)) if blocks else None

    def complete_put(self, kept: Listing[bool], now_s: float) -> News:
        """The planned put is done; `kept` says of each block whether the store has it."""
        expired = self._expire(now_s)
        self._memory.storage.finish_put(kept)
        return self._settle(now_s, expired=expired)

    def complete_step(self, choices: Listing[Choice], now_s: float) -> News:
        """The planned step is computed; `choices` has one for each of its rows that `chooses`, in order."""
        assert self._stepping is not None, "no step was planned"
        expired = self._expire(now_s)  # with what was in its way then, not after this step
        plan, self._stepping = self._stepping, None
        self._totals.steps += 1
        self._totals.loaded_tokens += self._memory.host.loaded() * self._limits.block_size
        chosen = iter(choices)
        progress: list[Progress] = []
        for row in plan.rows:
            sequence = self._planner.running[row.serial]
            sequence.advance(len(row.token_ids))
            self._cache_full_blocks(sequence)
            choice = next(chosen) if row.chooses else None
            if sequence.ended:
                self._planner.release(sequence)
            elif choice is not None:
                progress.append(self._take(sequence, choice))
        self._totals.generated(sum(len(delta.token_ids) for _, delta in progress), now_s)
        return self._settle(now_s, progress, expired)

    def load(self, now_s: float) -> RankLoad:
        """How busy the rank is, and its totals."""
        size, tree, running = self._limits.block_size, self._memory.tree, self._planner.running.values()
        private = sum(sequence.computed - len(sequence.path) * size for sequence in running)
        totals = self._totals
        cached, free = self._memory.unused
        return RankLoad(
            running=len(running),
            waiting=len(self._waiting),
            waiting_uncached_tokens=sum(sequence.uncached_tokens for sequence in self._waiting),
            used_tokens=tree.size * size + private,
            active_tokens=(tree.size - tree.unpinned) * size + private,
            capacity_tokens=self._limits.pool_blocks * size,
            max_running=self._limits.max_running,
            gen_tokens_per_s=totals.tokens_per_s(now_s),
            prompt_tokens_total=totals.prompt_tokens,
            cached_tokens_total=totals.cached_tokens,
            generated_tokens_total=totals.generated_tokens,
            evicted_tokens_total=self._memory.evicted_blocks * size,
            requests_total=totals.requests,
            aborts_total=totals.aborts,
            flushes_total=totals.flushes,
            steps_total=totals.steps,
            host_used_tokens=len(self._memory.host) * size,
            host_capacity_tokens=self._limits.host_blocks * size,
            host_loaded_tokens_total=totals.loaded_tokens,
            store_fetched_tokens_total=self._memory.storage.fetched_blocks * size,
            store_put_tokens_total=self._memory.storage.put_blocks * size,
            store_failed_puts_total=self._memory.storage.failed_puts,
            used_blocks=self._limits.pool_blocks - cached - free,
            cached_blocks=cached,
            free_blocks=free,
            flushes_waiting=len(self._flushes),
        )

    def cached_chains(self, tier: Tier = Tier.DEVICE) -> Iterator[tuple[int, ...]]:
        """The hashes of every block in a tier, each behind those of its prefix: what the events should have told."""
        for node in self._memory.tree.nodes():
            if not (node.on_device if tier is Tier.DEVICE else node.on_host):
                continue
            chain: list[int] = []
            at = node
            while at.parent is not None and at.hash is not None:
                chain.append(at.hash)
                at = at.parent
            yield tuple(reversed(chain))

    def _sequence(self, request: GenerationRequest) -> Sequence:
        self._serial += 1
        sampling = request.sampling
        if sampling.seed is None:
            sampling = replace(sampling, seed=(self._limits.seed * 1_000_003 + self._serial) % 2**63)
        return Sequence(request, self._serial, self._limits.block_size, sampling, list(request.prompt_token_ids))

    def _take(self, sequence: Sequence, choice: Choice) -> Progress:
        """Add the chosen token to its answer, or end it."""
        if sequence.cached_tokens is None:
            sequence.settle_cached()
            self._totals.prompt_tokens += sequence.prompt_tokens
            self._totals.cached_tokens += sequence.cached_so_far()
        limits, said = sequence.request.limits, len(sequence.output)
        finish = ending(limits, self._limits.eos_token_ids, said=said, token_id=choice.token_id)
        tokens: tuple[int, ...] = ()
        if finish is None or (finish.matched is None and said < limits.max_new_tokens):
            tokens = (choice.token_id,)
            sequence.output.append(choice.token_id)
            sequence.tokens.append(choice.token_id)
        if finish is not None:
            self._end(sequence)
        return sequence.request.request, sequence.delta(tokens, logprob=choice.logprob, finish=finish)

    def _abort(self, sequence: Sequence, reason: str) -> Progress:
        self._totals.aborts += 1
        last = sequence.delta(finish=Finish(FinishReason.ABORT, message=reason))
        self._end(sequence)
        return sequence.request.request, last

    def _end(self, sequence: Sequence) -> None:
        """It is over for its caller; its blocks go as soon as no step computes in them."""
        del self._alive[sequence.request.request]
        sequence.ended = True
        if sequence.serial not in self._planner.running:
            self._waiting.remove(sequence)
            self._memory.storage.release(sequence)
        elif self._stepping is None or all(row.serial != sequence.serial for row in self._stepping.rows):
            self._planner.release(sequence)

    def _cache_full_blocks(self, sequence: Sequence) -> None:
        full = sequence.computed // self._limits.block_size
        held = len(sequence.path)
        added = self._memory.cache(sequence.namespace, sequence.path, sequence.tokens, sequence.blocks[held:full])
        sequence.path.extend(added)
        sequence.blocks[held:full] = [node.block for node in added]

    def _blockers(self) -> tuple[Blocker, ...]:
        """What keeps the rank from being idle; requests that a flush holds back do not."""
        running = len(self._planner.running)
        queued = self._waiting.count_before(self._flushes.hold_from)
        host, storage = self._memory.host, self._memory.storage
        counts = (
            ("running", running),
            ("queued", queued),
            ("writing", host.writing),
            ("storing", storage.putting),
            ("prefetching", storage.fetching),
        )
        return tuple(Blocker(kind, count) for kind, count in counts if count)

    def _expire(self, now_s: float) -> list[OrderAnswer]:
        return self._flushes.expire(now_s, self._blockers())

    def _settle(self, now_s: float, progress: Listing[Progress] = (), expired: Listing[OrderAnswer] = ()) -> News:
        """After anything changed: expire flushes, then clear if any still waits and nothing is in its way."""
        self._memory.storage.give_up(now_s)
        answers = [*expired, *self._expire(now_s)]
        if self._flushes and not self._blockers():
            self._totals.flushes += 1
            answers += self._flushes.cleared(self._memory.clear())
        return News(tuple(progress), tuple(answers), self._memory.take_events())

    def validate(self) -> None:
        """Raise `AssertionError` unless every block, pin and request is in exactly one place."""
        running = list(self._planner.running.values())
        waiting = list(self._waiting)
        self._memory.validate([block for sequence in running for block in sequence.private_blocks()])
        pins: dict[int, int] = {}
        for sequence in running:
            assert len(sequence.path) == sequence.computed // self._limits.block_size
            assert [node.block for node in sequence.path] == sequence.blocks[: len(sequence.path)]
            for node in sequence.path:
                pins[id(node)] = pins.get(id(node), 0) + 1
        assert all(node.pins == pins.get(id(node), 0) for node in self._memory.tree.nodes())
        kept = {id(node) for node in self._memory.storage.pinned()}
        assert (
            self._stepping is not None
            or not any(node.host_pins for node in self._memory.tree.nodes() if id(node) not in kept)
            or self._memory.host.writing
        )
        assert all(not sequence.blocks and not sequence.path for sequence in waiting)
        assert [sequence.serial for sequence in waiting] == sorted(sequence.serial for sequence in waiting)
        living = {sequence.serial for sequence in [*waiting, *running] if not sequence.ended}
        assert living == {sequence.serial for sequence in self._alive.values()}
        assert self._stepping is not None or not any(sequence.ended for sequence in running)
