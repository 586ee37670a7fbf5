"""A scheduler on a stage: a model that is a function of all tokens before, kept in a real (small) pool.

The pool keeps, for each slot, a digest of every token up to it. A row reads the digest before its first token from
the slot its block table names: a wrong table, a block reused too early or evicted while in use gives wrong tokens.
"""

from dataclasses import dataclass, field

from kvherd.core.engine.generation import FinishReason, GenerationRequest, Limits, Sampling, TokenDelta
from kvherd.core.engine.reports import OrderAnswer
from kvherd.core.ids import BlockName, OrderId, Rank, RequestId
from kvherd.core.kv.events import BlocksRemoved, BlocksStored, CacheCleared, KvEvent, Tier
from kvherd.core.scheduler.scheduler import Scheduler
from kvherd.core.scheduler.steps import (
    Choice,
    Copy,
    FetchPlan,
    LookPlan,
    News,
    SchedulerLimits,
    StepPlan,
    StepRow,
    WritePlan,
)

VOCABULARY = 50
EOS = 7


def limits(
    *,
    pool_blocks: int = 16,
    block_size: int = 4,
    max_running: int = 8,
    chunk_tokens: int = 16,
    max_waiting: int = 99,
    host_blocks: int = 0,
    store: str | None = None,
) -> SchedulerLimits:
    return SchedulerLimits(
        pool_blocks=pool_blocks,
        vocab_size=VOCABULARY,
        max_context_tokens=200,
        block_size=block_size,
        max_running=max_running,
        max_waiting=max_waiting,
        host_blocks=host_blocks,
        store=store,
        store_patience_s=1.0,
        chunk_tokens=chunk_tokens,
        eos_token_ids=(EOS,),
    )


def request(
    name: str,
    prompt: list[int],
    tokens: int = 4,
    *,
    min_tokens: int = 0,
    stop: tuple[int, ...] = (),
    ignore_eos: bool = True,
    salt: str | None = None,
) -> GenerationRequest:
    return GenerationRequest(
        RequestId(name),
        prompt,
        Limits(tokens, min_new_tokens=min_tokens, stop_token_ids=stop, ignore_eos=ignore_eos),
        Sampling(temperature=0),
        cache_salt=salt,
    )


class PagedToyModel:
    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._slots: dict[tuple[int, int], int] = {}
        self._host: dict[tuple[int, int], int] = {}
        self.computed: dict[int, set[int]] = {}
        """Positions ever computed, by the identity of the request's prompt."""

    def run(self, plan: StepPlan) -> list[Choice]:
        for copy in plan.loads:
            for at in range(self._block_size):
                self._slots[copy.block, at] = self._host[copy.slot, at]
        rows = [(row, self._write(row)) for row in plan.rows]
        return [self._choose(row, digest) for row, digest in rows if row.chooses]

    def save(self, copies: tuple[Copy, ...], half: int) -> None:
        """Copy one half of each block to the host: between the two, anything may happen to the pool."""
        middle = self._block_size // 2
        for copy in copies:
            for at in range(middle) if half == 0 else range(middle, self._block_size):
                self._host[copy.slot, at] = self._slots[copy.block, at]

    def host_block(self, slot: int) -> tuple[int, ...]:
        return tuple(self._host[slot, at] for at in range(self._block_size))

    def fill_host(self, slot: int, block: tuple[int, ...]) -> None:
        for at in range(self._block_size):
            self._host[slot, at] = block[at] if at < len(block) else -1

    def _write(self, row: StepRow) -> int:
        digest = self._slots[self._slot(row, row.position - 1)] if row.position else 1
        for position, token in enumerate(row.token_ids, start=row.position):
            digest = (digest * 1_000_003 + token + 1) % (2**61 - 1)
            self._slots[self._slot(row, position)] = digest
            self.computed.setdefault(id(row.prompt), set()).add(position)
        assert self._slot(row, row.position + len(row.token_ids) - 1)[0] == row.blocks[-1], "blocks beyond the context"
        return digest

    def _slot(self, row: StepRow, position: int) -> tuple[int, int]:
        return row.blocks[position // self._block_size], position % self._block_size

    def _choose(self, row: StepRow, digest: int) -> Choice:
        token = digest % VOCABULARY
        while token in row.forbidden:
            token = (token + 1) % VOCABULARY
        return Choice(token)


@dataclass
class ToyStore:
    """Blocks by name, each a digest a token. One name never means two things: that is the scheduler's promise.

    Of the names in `rotten` it has the block, and its bytes are found to be wrong when they are in place.
    """

    blocks: dict[str, tuple[int, ...]] = field(default_factory=dict)
    rotten: set[str] = field(default_factory=set)
    full: bool = False

    def find(self, names: tuple[BlockName, ...]) -> int:
        return next((at for at, name in enumerate(names) if name not in self.blocks), len(names))

    def put(self, name: str, block: tuple[int, ...]) -> bool:
        assert self.blocks.get(name, block) == block, "one name for two different blocks"
        if not self.full:
            self.blocks[name] = block
        return not self.full


@dataclass
class Follower:
    """An index as somebody keeps it who has only the events: hash → (parent, tokens). Refuses what cannot be."""

    blocks: dict[int, tuple[int | None, tuple[int, ...]]] = field(default_factory=dict)
    host: dict[int, tuple[int | None, tuple[int, ...]]] = field(default_factory=dict)

    def follow(self, events: tuple[KvEvent, ...]) -> None:
        for event in events:
            match event:
                case BlocksStored(hashes, parent, tokens, size, tier):
                    held = self._in(tier)
                    assert len(tokens) == len(hashes) * size
                    for at, name in enumerate(hashes):
                        assert name not in held, "a block stored twice"
                        assert parent is None or parent in held, "a block stored behind one that is not held"
                        held[name] = (parent, tokens[at * size : (at + 1) * size])
                        parent = name
                case BlocksRemoved(hashes, tier):
                    for name in hashes:
                        del self._in(tier)[name]
                case CacheCleared():
                    self.blocks.clear()
                    self.host.clear()

    def _in(self, tier: Tier) -> dict[int, tuple[int | None, tuple[int, ...]]]:
        return self.blocks if tier is Tier.DEVICE else self.host


class Stage:
    """Drives one scheduler and checks every promise after every move."""

    def __init__(self, of: SchedulerLimits, store: ToyStore | None = None) -> None:
        self.limits = of
        self.store = store or ToyStore()
        self.ask: LookPlan | FetchPlan | None = None
        self.put: dict[BlockName, tuple[int, tuple[int, ...]]] = {}
        self.scheduler = Scheduler(Rank(0), of)
        self.model = PagedToyModel(of.block_size)
        self.follower = Follower()
        self.now_s = 0.0
        self.plan: StepPlan | None = None
        self.write: WritePlan | None = None
        self.said: dict[str, list[TokenDelta]] = {}
        self.answers: dict[str, list[tuple[float, OrderAnswer]]] = {}
        self.requests: dict[str, GenerationRequest] = {}
        self.events: list[KvEvent] = []

    def submit(self, what: GenerationRequest) -> None:
        self.said[what.request] = []
        self.requests[what.request] = what
        self._hear(self.scheduler.submit(what, self.now_s))

    def abort(self, name: str, reason: str = "gone") -> None:
        self._hear(self.scheduler.abort(RequestId(name), reason, self.now_s))

    def flush(self, name: str, timeout_s: float = 0.0, *, hold: bool = False) -> None:
        self.answers[name] = []
        self._hear(self.scheduler.flush(OrderId(name), timeout_s=timeout_s, hold=hold, now_s=self.now_s))

    def withdraw(self, name: str) -> None:
        self._hear(self.scheduler.withdraw(OrderId(name), self.now_s))

    def start_step(self) -> bool:
        self.plan = self.scheduler.plan_step()
        if self.plan is not None:
            assert self.plan.rows or self.plan.loads
            assert len({row.serial for row in self.plan.rows}) == len(self.plan.rows)
            self._follow(self.plan.events)
        self.check()
        return self.plan is not None

    def finish_step(self) -> None:
        assert self.plan is not None
        choices = self.model.run(self.plan)
        self.plan = None
        self._hear(self.scheduler.complete_step(choices, self.now_s))

    def start_write(self) -> bool:
        self.write = self.scheduler.plan_write()
        if self.write is not None:
            self._follow(self.write.events)
            self.model.save(self.write.copies, 0)
        self.check()
        return self.write is not None

    def finish_write(self) -> None:
        assert self.write is not None
        self.model.save(self.write.copies, 1)
        self.write = None
        self._hear(self.scheduler.complete_write(self.now_s))

    def write_all(self) -> None:
        """Copy everything that waits for it to the host tier."""
        while self.write is not None or self.start_write():
            self.finish_write()

    def start_ask(self) -> bool:
        self.ask = self.scheduler.plan_ask(self.now_s)
        if isinstance(self.ask, FetchPlan):
            self._follow(self.ask.events)
            for each in self.ask.blocks:
                self.model.fill_host(each.slot, ())
        self.check()
        return self.ask is not None

    def finish_ask(self) -> None:
        ask, self.ask = self.ask, None
        match ask:
            case LookPlan(names):
                self._hear(self.scheduler.complete_look(self.store.find(names), self.now_s))
            case FetchPlan(blocks):
                verified = [each.name in self.store.blocks and each.name not in self.store.rotten for each in blocks]
                for each, right in zip(blocks, verified, strict=True):
                    self.model.fill_host(each.slot, self.store.blocks[each.name] if right else ())
                self._hear(self.scheduler.complete_fetch(verified, self.now_s))
            case None:
                raise AssertionError("nothing was asked")

    def start_put(self) -> bool:
        plan = self.scheduler.plan_put()
        if plan is not None:
            middle = self.limits.block_size // 2
            self.put = {each.name: (each.slot, self.model.host_block(each.slot)[:middle]) for each in plan.blocks}
        self.check()
        return plan is not None

    def finish_put(self) -> None:
        put, self.put = self.put, {}
        middle = self.limits.block_size // 2
        kept = [
            self.store.put(name, (*first, *self.model.host_block(slot)[middle:])) for name, (slot, first) in put.items()
        ]
        self._hear(self.scheduler.complete_put(kept, self.now_s))

    def put_all(self) -> None:
        """Write everything that waits for it to the host tier, and from there to the store."""
        self.write_all()
        while self.put or self.start_put():
            self.finish_put()

    @property
    def asked(self) -> tuple[BlockName, ...]:
        """What the store is asked for now."""
        match self.ask:
            case LookPlan(names):
                return names
            case FetchPlan(blocks):
                return tuple(each.name for each in blocks)
            case None:
                return ()

    @property
    def copying(self) -> bool:
        """Something is being copied between tiers."""
        return self.write is not None or self.ask is not None or bool(self.put)

    def move(self, what: str) -> None:
        """End a "step", "write", "ask" or "put" that is under way, or begin one if there is something to do."""
        match what:
            case "step":
                self.finish_step() if self.plan is not None else self.start_step()
            case "write":
                self.finish_write() if self.write is not None else self.start_write()
            case "ask":
                self.finish_ask() if self.ask is not None else self.start_ask()
            case "put":
                self.finish_put() if self.put else self.start_put()
            case _:
                raise ValueError(what)

    def step(self) -> bool:
        """One whole step; False if there was none to make."""
        if self.plan is None and not self.start_step():
            return False
        self.finish_step()
        return True

    def run_dry(self, at_most: int = 5000) -> None:
        for _ in range(at_most):
            if self.ask is not None or self.start_ask():
                self.finish_ask()
            elif not self.step():
                return
        raise AssertionError(f"still busy after {at_most} steps: {self.scheduler.load(self.now_s)}")

    def pass_time(self, seconds: float) -> None:
        """Let the clock run, stopping at each deadline, as the loop's poller does."""
        end_s = self.now_s + seconds
        while (due_s := self.scheduler.next_deadline_s) is not None and due_s <= end_s:
            self.now_s = max(self.now_s, due_s)
            self._hear(self.scheduler.expire(self.now_s))
        self.now_s = end_s

    def tokens(self, name: str) -> list[int]:
        return [token for delta in self.said[name] for token in delta.token_ids]

    def cached(self, name: str) -> int:
        return self.said[name][-1].cached_tokens

    def ended(self, name: str) -> FinishReason | None:
        last = self.said[name][-1].finish if self.said[name] else None
        return last.reason if last is not None else None

    def answer(self, name: str) -> OrderAnswer:
        assert len(self.answers[name]) == 1, f"{name} was answered {len(self.answers[name])} times"
        return self.answers[name][0][1]

    def _hear(self, news: News) -> None:
        self._follow(news.events)
        for name, delta in news.progress:
            heard = self.said[name]
            assert not heard or heard[-1].finish is None, f"{name} spoke after its end"
            assert not heard or heard[0].cached_tokens == delta.cached_tokens, "cached tokens changed afterwards"
            if not heard and (delta.finish is None or delta.finish.reason is not FinishReason.ABORT):
                assert delta.cached_tokens == self._not_computed(name), f"{name} was not told the truth"
            assert 0 <= delta.host_tokens <= delta.cached_tokens - delta.storage_tokens
            heard.append(delta)
            assert delta.completion_tokens == len(self.tokens(name))
        for answer in news.answers:
            self.answers[answer.order].append((self.now_s, answer))
        self.check()

    def _not_computed(self, name: str) -> int:
        prompt = self.requests[name].prompt_token_ids
        return len(prompt) - len(self.model.computed.get(id(prompt), set()) & set(range(len(prompt))))

    def _follow(self, events: tuple[KvEvent, ...]) -> None:
        self.events.extend(events)
        self.follower.follow(events)

    def check(self) -> None:
        self.scheduler.validate()
        for tier, told in ((Tier.DEVICE, self.follower.blocks), (Tier.HOST, self.follower.host)):
            chains = self.scheduler.cached_chains(tier)
            held = {chain[-1]: chain[-2] if len(chain) > 1 else None for chain in chains}
            assert held == {name: parent for name, (parent, _) in told.items()}


def cold_answer(what: GenerationRequest, of: SchedulerLimits) -> list[int]:
    """What a scheduler that never saw another request says."""
    stage = Stage(of)
    stage.submit(what)
    stage.run_dry()
    return stage.tokens(what.request)
