"""The pool of blocks and what is cached in it and behind it, kept in step; every change becomes a KV event.

A block is free, or private to one sequence, or a node of the prefix tree. There is one copy of a cached block: a
sequence that computed a block which another cached meanwhile takes the other's and gives its own back, so a store
is never published twice.
"""

from collections.abc import Sequence

from kvherd.core.ids import EngineHash
from kvherd.core.kv.events import BlocksRemoved, BlocksStored, CacheCleared, KvEvent, Tier
from kvherd.core.scheduler.hashes import Namespace
from kvherd.core.scheduler.host_tier import HostTier
from kvherd.core.scheduler.prefix_tree import Node, PrefixTree
from kvherd.core.scheduler.steps import Copy, FetchPlan, LookPlan
from kvherd.core.scheduler.storage_tier import StorageTier


class KvMemory:
    """All methods are total: what cannot be had is an answer, not an error."""

    def __init__(
        self,
        *,
        blocks: int,
        block_size: int,
        host_blocks: int = 0,
        store: str | None = None,
        store_patience_s: float = 2.0,
    ) -> None:
        self.block_size = block_size
        self.blocks = blocks
        self.tree = PrefixTree(block_size)
        self.host = HostTier(host_blocks, self.tree)
        self.storage = StorageTier(
            store if host_blocks else None, self.host, self.tree, block_size=block_size, patience_s=store_patience_s
        )
        self.evicted_blocks = 0
        self._loads: list[Copy] = []
        self._free = list(range(blocks - 1, -1, -1))
        self._events: list[KvEvent] = []

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give: free ones, and cached ones that nobody pins."""
        return len(self._free) + self.tree.unpinned

    @property
    def unused(self) -> tuple[int, int]:
        """Blocks that no sequence uses: cached ones, and free ones."""
        return self.tree.unpinned, len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Take blocks, evicting as few as needed; None, and nothing changed, if there are not that many."""
        if count > self.available:
            return None
        evicted = [self._evict() for _ in range(count - len(self._free))]
        if evicted:
            self._events.append(BlocksRemoved(tuple(evicted)))
        return [self._free.pop() for _ in range(count)]

    def give_back(self, blocks: Sequence[int]) -> None:
        """Free private blocks."""
        self._free.extend(reversed(blocks))

    def cache(self, namespace: Namespace, path: list[Node], tokens: Sequence[int], own: Sequence[int]) -> list[Node]:
        """Cache the blocks behind `path`, which hold the next blocks of `tokens`; all are pinned for the caller.

        Answers with the nodes to extend the path by. Where another sequence was faster its block is taken, and the
        caller's own is free.
        """
        node = path[-1] if path else self.tree.root(namespace)
        added: list[Node] = []
        fresh: list[Node] = []
        for index, block in enumerate(own, start=len(path)):
            known = self.tree.child(node, tokens, index)
            if known is None:
                node = self.tree.insert(node, tokens, index, block)
                fresh.append(node)
            elif known.on_device:
                self.tree.pin([known])
                self.give_back([block])
                node = known
            else:
                self.tree.bring(known, block)
                node = known
                fresh.append(node)
            added.append(node)
        self._tell_stored(fresh, Tier.DEVICE)
        self.host.cached(fresh)
        return added

    def load(self, nodes: Sequence[Node], blocks: Sequence[int]) -> int:
        """Bring nodes of host memory, one behind the other, into these private blocks, with the next step. Answers how
        many of them the store had brought there for this.
        """
        brought = sum(node.store_brought for node in nodes)
        for node, block in zip(nodes, blocks, strict=True):
            self.tree.bring(node, block)
            self._loads.append(self.host.load(node))
        self._tell_stored(nodes, Tier.DEVICE)
        return brought

    def take_loads(self) -> tuple[Copy, ...]:
        """What the step that is planned has to load; until `HostTier.loaded` the slots are kept."""
        loads = tuple(self._loads)
        self._loads.clear()
        return loads

    def start_writes(self) -> tuple[Copy, ...]:
        """Blocks to write to host memory now; none if none wait. No write is under way."""
        copies, dropped = self.host.start_writes()
        self._tell_dropped(dropped)
        return tuple(copies)

    def written(self) -> None:
        """That write is done."""
        held = self.host.written()
        for node in held:
            self._tell_stored([node], Tier.HOST)
        self.storage.cached(held)

    def start_ask(self, now_s: float, *, before: float) -> LookPlan | FetchPlan | None:
        """What to ask the store for requests of a turn before `before`; None if nothing. Nothing is asked now."""
        dropped: list[Node] = []
        plan = self.storage.start_ask(now_s, before=before, dropped=dropped)
        self._tell_dropped(dropped)
        return plan

    def fetched(self, verified: Sequence[bool]) -> None:
        """That fetch is done; which of its blocks are in place."""
        self._tell_stored(self.storage.fetched(verified), Tier.HOST)

    def clear(self) -> int:
        """Free every cached block, in every tier; answers how many. Only when nothing runs or is copied."""
        nodes = self.tree.clear()
        self._free.extend(node.block for node in nodes if node.on_device)
        self.storage.clear()
        self.host.clear()
        self._events.append(CacheCleared())
        return len(nodes)

    def take_events(self) -> tuple[KvEvent, ...]:
        """What happened to the cache since the last call, in order."""
        events = tuple(self._events)
        self._events.clear()
        return events

    def _evict(self) -> EngineHash:
        evicted = self.tree.evict()
        assert evicted is not None, "unpinned nodes are counted but none can be evicted"
        node, block = evicted
        assert node.hash is not None, "a root was evicted"
        self._free.append(block)
        self.evicted_blocks += 1
        return node.hash

    def _tell_dropped(self, nodes: Sequence[Node]) -> None:
        hashes = tuple(node.hash for node in nodes if node.hash is not None)
        if hashes:
            self._events.append(BlocksRemoved(hashes, Tier.HOST))

    def _tell_stored(self, nodes: Sequence[Node], tier: Tier) -> None:
        """One event for nodes of which each is the parent of the next; none for none."""
        if not nodes:
            return
        first = nodes[0]
        self._events.append(
            BlocksStored(
                block_hashes=tuple(node.hash for node in nodes if node.hash is not None),
                parent_hash=first.parent.hash if first.parent is not None else None,
                token_ids=tuple(token for node in nodes for token in node.tokens),
                block_size=self.block_size,
                tier=tier,
                lora=first.namespace.lora,
                salt=first.namespace.salt,
            )
        )

    def validate(self, private: Sequence[int]) -> None:
        """Raise `AssertionError` unless each block is in exactly one place; `private` are those of sequences."""
        self.tree.validate()
        self.host.validate()
        cached = [node.block for node in self.tree.nodes() if node.on_device]
        everywhere = sorted([*self._free, *private, *cached])
        assert everywhere == list(range(self.blocks)), (
            f"{len(self._free)} free, {len(private)} private and {len(cached)} cached of {self.blocks} blocks"
        )
