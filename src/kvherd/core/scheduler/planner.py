"""Which tokens the next forward pass computes.

Rules:
1. Decode rows come first; prompts share what is left of the budget, the oldest first, at least one block of them.
2. A sequence is admitted only when its whole context has blocks, so a prompt never stops half-way for memory; only
   a growing answer can. Then the youngest running sequence gives all of its blocks back and waits again.
3. The oldest never gives its blocks back, and a request larger than the pool is refused at the door: so something
   always runs to its end, and nothing waits for ever.
4. A chunk ends at a block boundary or at the prompt's end, and a block that another sequence computes in this very
   step is not computed twice: whoever needs it too takes it from the cache in the next step.
"""

from kvherd.core.ids import EngineHash
from kvherd.core.scheduler.endings import forbidden_tokens
from kvherd.core.scheduler.hashes import block_hash
from kvherd.core.scheduler.kv_memory import KvMemory
from kvherd.core.scheduler.prefix_tree import Node
from kvherd.core.scheduler.sequence import Sequence
from kvherd.core.scheduler.steps import SchedulerLimits, StepRow
from kvherd.core.scheduler.waiting import WaitingQueue


class _Draft:
    """A step in the making."""

    def __init__(self, chunk_tokens: int) -> None:
        self.rows: dict[int, StepRow] = {}
        self.budget = chunk_tokens
        self.claimed: set[EngineHash] = set()

    def add(self, row: StepRow) -> None:
        self.rows[row.serial] = row
        self.budget -= len(row.token_ids)


class StepPlanner:
    """Moves sequences from `waiting` to `running` and back, and gives them blocks of `memory`."""

    def __init__(self, limits: SchedulerLimits, memory: KvMemory, waiting: WaitingQueue) -> None:
        self._limits = limits
        self._memory = memory
        self._waiting = waiting
        self.running: dict[int, Sequence] = {}

    def plan(self, *, admit_before: float) -> tuple[StepRow, ...]:
        """The rows of the next step; none if nothing can run. Requests of that turn or later are not admitted."""
        draft = _Draft(self._limits.chunk_tokens)
        for sequence in self._by_turn():
            if sequence.serial in self.running and sequence.decoding and self._grow(sequence):
                draft.add(self._row(sequence, 1))
        draft.budget = max(draft.budget, self._limits.block_size)
        for sequence in self._by_turn():
            if sequence.serial not in draft.rows:
                self._continue_prompt(sequence, draft)
        self._admit(draft, admit_before)
        return tuple(draft.rows.values())

    def release(self, sequence: Sequence) -> None:
        """Take its blocks away; what is cached of them stays cached."""
        self._memory.give_back(sequence.private_blocks())
        self._memory.tree.unpin(sequence.path)
        sequence.restart()
        self.running.pop(sequence.serial, None)

    def _by_turn(self) -> list[Sequence]:
        return [self.running[serial] for serial in sorted(self.running)]

    def _grow(self, sequence: Sequence) -> bool:
        """Make room for its next token; False if it had to give way itself.

        Whoever gives way has no row yet: the oldest are served first.
        """
        while True:
            blocks = self._memory.allocate(sequence.blocks_for(sequence.computed + 1))
            if blocks is not None:
                sequence.blocks.extend(blocks)
                return True
            youngest = self.running[max(self.running)]
            self._preempt(youngest)
            if youngest is sequence:
                return False

    def _preempt(self, sequence: Sequence) -> None:
        self.release(sequence)
        sequence.uncached_tokens = len(sequence.tokens)
        self._waiting.add(sequence)

    def _admit(self, draft: _Draft, admit_before: float) -> None:
        for sequence in self._waiting.before(admit_before):
            if draft.budget <= 0 or len(self.running) >= self._limits.max_running:
                return
            if sequence.awaits_store:
                continue
            path = self._memory.tree.match(sequence.namespace, sequence.tokens, blocks=sequence.shareable_blocks)
            if self._being_computed(sequence, path, draft):
                continue
            if not self._seat(sequence, path):
                return  # the others wait behind it, however small: it would starve
            self._waiting.remove(sequence)
            self.running[sequence.serial] = sequence
            self._continue_prompt(sequence, draft)

    def _seat(self, sequence: Sequence, path: list[Node]) -> bool:
        """Reserve blocks for all of its context, leaving each running sequence one to grow into."""
        here = [node for node in path if node.on_device]
        needed = sequence.blocks_for(len(sequence.tokens)) - len(here)
        takes_from_cache = sum(node.pins == 0 for node in here)
        if needed + len(self.running) > self._memory.available - takes_from_cache:
            return False
        self._memory.tree.pin(here)
        blocks = self._memory.allocate(needed)
        assert blocks is not None, "available blocks could not be allocated"
        away = path[len(here) :]
        brought = self._memory.load(away, blocks[: len(away)])
        self._memory.host.used(path)
        sequence.path = path
        sequence.blocks = [*(node.block for node in here), *blocks]
        sequence.computed = len(path) * self._limits.block_size
        sequence.loaded_from(host=len(away) - brought, storage=brought)
        return True

    def _continue_prompt(self, sequence: Sequence, draft: _Draft) -> None:
        self._take_cached(sequence)
        if draft.budget <= 0 or self._being_computed(sequence, sequence.path, draft):
            return
        end = sequence.computed + draft.budget
        if end < len(sequence.tokens):
            end -= end % self._limits.block_size
        new_tokens = min(end, len(sequence.tokens)) - sequence.computed
        if new_tokens > 0:
            self._claim(sequence, new_tokens, draft)
            draft.add(self._row(sequence, new_tokens))

    def _take_cached(self, sequence: Sequence) -> None:
        """Skip blocks that others computed since it was admitted; one that is away again by now is loaded."""
        tree = self._memory.tree
        while len(sequence.path) < sequence.shareable_blocks:
            index = len(sequence.path)
            node = tree.child(self._tip(sequence, sequence.path), sequence.tokens, index)
            if node is None:
                return
            if node.on_device:
                tree.pin([node])
                self._memory.give_back([sequence.blocks[index]])
            else:
                brought = self._memory.load([node], [sequence.blocks[index]])
                sequence.loaded_from(host=1 - brought, storage=brought)
            sequence.path.append(node)
            sequence.blocks[index] = node.block
            sequence.computed += self._limits.block_size

    def _being_computed(self, sequence: Sequence, path: list[Node], draft: _Draft) -> bool:
        """Whether its next block is another's in this step already."""
        if len(path) >= sequence.shareable_blocks:
            return False
        return self._next_hashes(sequence, path, 1)[0] in draft.claimed

    def _claim(self, sequence: Sequence, new_tokens: int, draft: _Draft) -> None:
        full = (sequence.computed + new_tokens) // self._limits.block_size - len(sequence.path)
        draft.claimed.update(self._next_hashes(sequence, sequence.path, full))

    def _next_hashes(self, sequence: Sequence, path: list[Node], count: int) -> list[EngineHash]:
        size = self._limits.block_size
        parent = path[-1].hash if path else None
        hashes = []
        for index in range(len(path), len(path) + count):
            parent = block_hash(parent, sequence.tokens[index * size : (index + 1) * size], sequence.namespace)
            hashes.append(parent)
        return hashes

    def _tip(self, sequence: Sequence, path: list[Node]) -> Node:
        return path[-1] if path else self._memory.tree.root(sequence.namespace)

    def _row(self, sequence: Sequence, new_tokens: int) -> StepRow:
        end = sequence.computed + new_tokens
        request = sequence.request
        return StepRow(
            serial=sequence.serial,
            token_ids=tuple(sequence.tokens[sequence.computed : end]),
            position=sequence.computed,
            blocks=tuple(sequence.blocks[: -(-end // self._limits.block_size)]),
            chooses=end == len(sequence.tokens),
            sampling=sequence.sampling,
            prompt=request.prompt_token_ids,
            output=sequence.output,
            forbidden=forbidden_tokens(request.limits, self._limits.eos_token_ids, said=len(sequence.output)),
        )
