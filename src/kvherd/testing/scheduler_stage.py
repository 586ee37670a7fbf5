"""A scheduler on a stage: a model that is a function of all tokens before, kept in a real (small) pool.

The pool keeps, for each slot, a digest of every token up to it. A row reads the digest before its first token from
the slot its block table names: a wrong table, a block reused too early or evicted while in use gives wrong tokens.
"""

from dataclasses import dataclass, field

from kvherd.core.engine.generation import FinishReason, GenerationRequest, Limits, Sampling, TokenDelta
from kvherd.core.engine.reports import OrderAnswer
from kvherd.core.ids import OrderId, Rank, RequestId
from kvherd.core.kv.events import BlocksRemoved, BlocksStored, CacheCleared, KvEvent, Tier
from kvherd.core.scheduler.scheduler import Scheduler
from kvherd.core.scheduler.steps import Choice, Copy, News, SchedulerLimits, StepPlan, StepRow, WritePlan

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
) -> SchedulerLimits:
    return SchedulerLimits(
        pool_blocks=pool_blocks,
        vocab_size=VOCABULARY,
        max_context_tokens=200,
        block_size=block_size,
        max_running=max_running,
        max_waiting=max_waiting,
        host_blocks=host_blocks,
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

    def __init__(self, of: SchedulerLimits) -> None:
        self.limits = of
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

    def step(self) -> bool:
        """One whole step; False if there was none to make."""
        if self.plan is None and not self.start_step():
            return False
        self.finish_step()
        return True

    def run_dry(self, at_most: int = 5000) -> None:
        for _ in range(at_most):
            if not self.step():
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
