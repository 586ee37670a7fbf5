"""Which worker holds which block, and how much of a prompt each of them holds: exact, or nothing.

The rules, each of which some index in use breaks:

* Credit is for blocks on the device whose stored chain to the root was seen. A block whose parent is not known is
  remembered without credit, and gets it once the parent is stored: its own hash proves the whole chain.
* A block may be held in several copies, which go one by one. It is gone with the last. Where stores may be told twice
  (`cap_copies`) it is gone with the first.
* A removed block in the middle hides those behind it until it is stored again, and then they count at once.
* A holder is one rank of one worker: a clear or restart of one leaves the others alone.

Every step is O(1) a block, removals of holders O(their blocks). What a holder has is a function of the batches applied
to it, and of nothing else.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from kvherd.core.ids import EngineHash, PrefixHash, Rank, WorkerId
from kvherd.core.kv.credits import Changes, Credits
from kvherd.core.kv.events import BlocksRemoved, BlocksStored, KvEvent, KvEventBatch, Tier
from kvherd.core.kv.hashing import PrefixHasher
from kvherd.core.kv.holding import Holding

_AT_ONCE: Final = 64
"""Blocks looked up at a time: fewer would cost more by their number, and more are in vain where a prompt is new."""
_MOST_BEGUN: Final = 65_536
"""Blocks of beginnings that are remembered."""


class Holder(NamedTuple):
    """One cache: a rank of a worker. A tuple, for a look-up makes a dictionary of hundreds."""

    worker: WorkerId
    rank: Rank


class _Begun:
    """Who has how much of a beginning that was asked for, after `count` changes. `names` are its blocks', once it was
    asked for again soon.
    """

    __slots__ = ("alive", "count", "ends", "names")

    def __init__(self) -> None:
        self.alive = self.count = 0
        self.ends: list[tuple[int, int]] = []
        self.names: set[PrefixHash] | None = None


class PrefixIndex:
    """What every enrolled worker holds.

    Blocks are named by `hasher`; whoever calls `match` makes its chain with the same key. Not for several threads.
    """

    def __init__(self, hasher: PrefixHasher) -> None:
        self.hasher = hasher
        self._models: dict[WorkerId, str] = {}
        self._holdings: dict[WorkerId, dict[Rank, Holding]] = {}
        self._masks: dict[PrefixHash, int] = {}
        # A holder is a bit of a mask: matching is one `and` a block however many holders there are.
        self._holders: dict[int, Holder] = {}
        self._free: list[int] = []
        self._changes = Changes()
        self._begun: dict[PrefixHash, _Begun] = {}
        """By the name of the last of its blocks."""
        self._begun_blocks = 0

    def enrol(self, worker: WorkerId, *, model: str) -> None:
        """Let batches of this worker in; `model` is the one that its prefixes are computed with.

        A worker enrolled anew starts empty.
        """
        self.drop(worker)
        self._models[worker] = model
        self._holdings[worker] = {}

    def drop(self, worker: WorkerId) -> None:
        """Forget the worker and all it holds; its later batches raise `KeyError` until it is enrolled again."""
        self._models.pop(worker, None)
        for holding in self._holdings.pop(worker, {}).values():
            holding.clear()
            del self._holders[holding.credits.bit]
            self._free.append(holding.credits.bit)

    def apply(self, holder: Holder, batch: KvEventBatch) -> None:
        """Let the events of one batch happen to `holder`, in order. Raises `KeyError` if its worker is not enrolled."""
        self.apply_events(holder, batch.events)

    def apply_events(self, holder: Holder, events: Iterable[KvEvent]) -> None:
        holding = self._holdings[holder.worker].get(holder.rank) or self._open(holder)
        for event in events:
            if isinstance(event, BlocksStored):
                holding.store(event)
            elif isinstance(event, BlocksRemoved):
                holding.remove(event)
            else:
                holding.clear()

    def match(self, chain: Sequence[PrefixHash]) -> dict[Holder, int]:
        """Count, for each holder, the leading blocks of `chain` that it has on its device.

        A holder that lacks the first block is absent from the answer, however many later ones it has: attention can
        reuse a prefix only.
        """
        return {self._holders[bit]: depth for bit, depth in self._ends(chain, 0)}

    def match_workers(self, chain: Sequence[PrefixHash], begun: int = 0) -> dict[WorkerId, dict[Rank, int]]:
        """The same by worker. The first `begun` blocks are likely to be asked for again soon: what is found of them is
        remembered, until one of them comes or goes somewhere.
        """
        found: dict[WorkerId, dict[Rank, int]] = {}
        for bit, depth in self._ends(chain, begun):
            worker, rank = self._holders[bit]
            ranks = found.get(worker)
            if ranks is None:
                found[worker] = {rank: depth}
            else:
                ranks[rank] = depth
        return found

    def _ends(self, chain: Sequence[PrefixHash], begun: int) -> list[tuple[int, int]]:
        """The bit of each holder that has the first block, and how many it has."""
        if begun >= _AT_ONCE:
            known = self._beginning(chain, begun)
            found, alive = known.ends.copy(), known.alive
        else:
            begun, found = 0, []
            alive = self._masks.get(chain[0], 0) if chain else 0
        if alive:
            alive = self._follow(chain, begun, len(chain), alive, found)
        while alive:
            bit = alive & -alive
            found.append((bit, len(chain)))
            alive ^= bit
        return found

    def _follow(
        self, chain: Sequence[PrefixHash], begin: int, end: int, alive: int, found: list[tuple[int, int]]
    ) -> int:
        """Of those that are `alive`, who has all blocks from one up to another; who lacks one is added to `found`."""
        masks = self._masks
        for at_once in range(begin, end, _AT_ONCE):
            until = min(end, at_once + _AT_ONCE)
            piece = list(map(masks.get, chain[at_once:until]))
            if piece.count(alive) == len(piece):  # nobody ends here, and nobody can begin
                continue
            for at, mask in enumerate(piece):
                still = alive & (mask or 0)
                gone = alive ^ still
                while gone:
                    bit = gone & -gone
                    found.append((bit, at_once + at))
                    gone ^= bit
                alive = still
                if not alive:
                    return 0
        return alive

    def _beginning(self, chain: Sequence[PrefixHash], begun: int) -> _Begun:
        """What `_follow` finds of the first blocks, by looking at what has changed since where that is less."""
        name, changes = chain[begun - 1], self._changes
        known = self._begun.get(name)
        if known is not None:
            changed = changes.since(known.count, begun // 2)
            if changed is not None:
                if known.names is None:
                    known.names = set(chain[:begun])
                if known.names.isdisjoint(changed):
                    known.count = changes.count
                    return known
        else:
            if self._begun_blocks + begun > _MOST_BEGUN:
                self._begun.clear()
                self._begun_blocks = 0
            known = self._begun[name] = _Begun()
            self._begun_blocks += begun
        known.count, known.ends = changes.count, []
        alive = self._masks.get(chain[0], 0)
        known.alive = self._follow(chain, 0, begun, alive, known.ends) if alive else 0
        return known

    def cap_copies(self, holder: Holder) -> None:
        """Count one copy of a block in each tier and no more, until `holder` is cleared.

        For a cache that held blocks nobody told of: engines asked to tell of them announce blocks that were told
        already as if stored again, and no removal answers to that. Credit may then be too low, never too high.
        """
        (self._holdings[holder.worker].get(holder.rank) or self._open(holder)).cap()

    def clear(self, holder: Holder) -> None:
        """Forget all that `holder` has, and `cap_copies`."""
        holding = self._holdings.get(holder.worker, {}).get(holder.rank)
        if holding is not None:
            holding.clear()

    def clear_worker(self, worker: WorkerId) -> None:
        """Forget all that every rank of `worker` has."""
        for holding in self._holdings.get(worker, {}).values():
            holding.clear()

    def blocks(self, holder: Holder) -> int:
        """Count the blocks that `holder` has on its device with a known chain to the root, copies not counted.

        Small pages count as the blocks that they are folded into.
        """
        holding = self._holdings.get(holder.worker, {}).get(holder.rank)
        return 0 if holding is None else holding.credits.count

    def worker_blocks(self, worker: WorkerId) -> int:
        """The sum of `blocks` over the ranks of `worker`."""
        return sum(holding.credits.count for holding in self._holdings.get(worker, {}).values())

    def bigrams(self, worker: WorkerId) -> bool:
        """Whether the blocks of `worker` are of pairs of tokens: its prompts' chains are made with `bigram_keys`."""
        holdings = self._holdings.get(worker)
        if holdings is not None:
            for holding in holdings.values():
                if holding.bigrams:
                    return True
        return False

    def beyond_device(self, worker: WorkerId) -> bool:
        """Whether `worker` holds anything in another tier, where an engine may find what it has no credit for."""
        return any(holding.beyond_device() for holding in self._holdings.get(worker, {}).values())

    def contents(self, holder: Holder) -> Mapping[EngineHash, Mapping[Tier, int]]:
        """Every block or page of `holder`, credited or not, and its copies by tier: for audits and tests, O(blocks)."""
        holding = self._holdings.get(holder.worker, {}).get(holder.rank)
        return {} if holding is None else holding.contents()

    def __len__(self) -> int:
        """How many different prefixes are held by anyone."""
        return len(self._masks)

    def _open(self, holder: Holder) -> Holding:
        bit = self._free.pop() if self._free else 1 << len(self._holders)
        holding = Holding(self.hasher, self._models[holder.worker], Credits(self._masks, bit, changes=self._changes))
        self._holdings[holder.worker][holder.rank] = holding
        self._holders[bit] = holder
        return holding
