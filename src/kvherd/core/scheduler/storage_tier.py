"""Blocks in a store outside the engine: read into the host tier before their prompt runs, written from there behind.

Rules:
1. A block's name tells the store's namespace (the weights and how their blocks are laid out), the prompt's own, and
   every token up to the block's end. It never means other bytes: a flush has nothing to forget in the store.
2. A fetch fills slots of host memory that are nobody else's until it is over. A block that was not verified in place
   is not cached, nor is any behind it.
3. A put reads slots that are not given away meanwhile.
4. Room is made in host memory only for blocks that the store says it has.
5. Nothing depends on the store. A request waits for it at most `patience_s`, and is computed then; a store
   that was late is left alone for a while.
"""

from array import array
from collections import deque
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

from kvherd.core.ids import BlockName
from kvherd.core.scheduler.hashes import Namespace
from kvherd.core.scheduler.host_tier import HostTier
from kvherd.core.scheduler.prefix_tree import Node, PrefixTree
from kvherd.core.scheduler.sequence import Sequence
from kvherd.core.scheduler.steps import FetchPlan, LookPlan, NamedSlot

AT_ONCE: Final = 32
"""Blocks in one fetch or put, for which a flush may have to wait."""
REST_S: Final = 30.0
"""How long a store that was late is not asked."""


class Names:
    """Names the blocks of prompts in one store's namespace."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    def root(self, namespace: Namespace) -> BlockName:
        """What the first block of a prompt follows."""
        return _name(repr((self._namespace, namespace.lora, namespace.salt)).encode())

    def after(self, parent: BlockName, tokens: Listing[int]) -> BlockName:
        """The block of these tokens behind `parent`."""
        return _name(bytes.fromhex(parent) + array("Q", tokens).tobytes())


def _name(what: bytes) -> BlockName:
    return BlockName(blake2b(what, digest_size=16).hexdigest())


@dataclass(slots=True)
class _Expecting:
    """A request that waits for the store. `found`: so many of its blocks are here or there; None before the look."""

    sequence: Sequence
    until_s: float
    names: list[BlockName] = field(default_factory=list)
    found: int | None = None


@dataclass(frozen=True, slots=True)
class _Ask:
    """What the store is asked now: to look for a request's blocks from `first` on, or to read them into `slots`.

    `anchor` is the block before them, None the root.
    """

    waiter: _Expecting
    first: int
    began_s: float
    slots: tuple[int, ...] = ()
    anchor: Node | None = None


class StorageTier:
    """`namespace` None is no store. One look or fetch, and one put, are under way at most."""

    def __init__(
        self, namespace: str | None, host: HostTier, tree: PrefixTree, *, block_size: int, patience_s: float
    ) -> None:
        self._names = Names(namespace or "")
        self._enabled = namespace is not None
        self._host = host
        self._tree = tree
        self._block_size = block_size
        self._patience_s = patience_s
        self._expecting: dict[int, _Expecting] = {}
        self._asked: _Ask | None = None
        self._rests_until_s = 0.0
        self._queue: deque[Node] = deque(maxlen=host.slots)
        self._putting: tuple[Node, ...] = ()
        self.fetched_blocks = 0
        self.put_blocks = 0
        self.failed_puts = 0

    @property
    def asked(self) -> bool:
        """A look or a fetch is under way."""
        return self._asked is not None

    @property
    def fetching(self) -> int:
        """How many blocks are being read."""
        return len(self._asked.slots) if self._asked is not None else 0

    @property
    def putting(self) -> int:
        """How many blocks are being written to the store."""
        return len(self._putting)

    @property
    def next_deadline_s(self) -> float | None:
        """When the next request stops waiting for the store."""
        return min((waiter.until_s for waiter in self._expecting.values()), default=None)

    def expect(self, sequence: Sequence, now_s: float) -> None:
        """It just came: let it wait for what the store may have of its prompt, unless nothing is missing."""
        if not self._enabled or now_s < self._rests_until_s:
            return
        if len(self._path(sequence)) < sequence.shareable_blocks:
            sequence.awaits_store = True
            self._expecting[sequence.serial] = _Expecting(sequence, now_s + self._patience_s)

    def release(self, sequence: Sequence) -> None:
        """It waits for the store no more."""
        sequence.awaits_store = False
        self._expecting.pop(sequence.serial, None)

    def give_up(self, now_s: float) -> None:
        """Let those run whose time has come."""
        if self._asked is not None and now_s >= self._asked.began_s + self._patience_s:
            self._rests_until_s = now_s + REST_S
        for waiter in list(self._expecting.values()):
            if waiter.until_s <= now_s or now_s < self._rests_until_s:
                self.release(waiter.sequence)

    def start_ask(self, now_s: float, *, before: float, dropped: list[Node]) -> LookPlan | FetchPlan | None:
        """What to ask the store next for the first request of a turn before `before`; None if nothing.

        Nothing is asked now. Whose copies are dropped to make room is added to `dropped`.
        """
        assert self._asked is None, "the store is asked already"
        for serial in sorted(self._expecting):
            waiter = self._expecting[serial]
            if serial >= before:
                return None
            plan = self._look(waiter, now_s) if waiter.found is None else self._fetch(waiter, now_s, dropped)
            if plan is not None:
                return plan
            self.release(waiter.sequence)
        return None

    def looked(self, found: int) -> None:
        """The look is done: so many of its blocks are in the store, from the first on."""
        asked, self._asked = self._asked, None
        assert asked is not None, "nobody looks"
        asked.waiter.found = asked.first + found
        if not found:
            self.release(asked.waiter.sequence)

    def fetched(self, verified: Listing[bool]) -> list[Node]:
        """The fetch is done: which of its blocks are in place. Answers with the blocks that have a copy here now and
        had none before, each the parent of the next.
        """
        asked, self._asked = self._asked, None
        assert asked is not None, "no fetch is under way"
        sequence = asked.waiter.sequence
        node = asked.anchor or self._tree.root(sequence.namespace)
        if asked.anchor is not None:
            node.host_pins -= 1
        held: list[Node] = []
        arrived = list(verified).index(False) if False in verified else len(asked.slots)
        for index, slot in enumerate(asked.slots[:arrived], start=asked.first):
            known = self._tree.child(node, sequence.tokens, index)
            node = known or self._tree.insert_away(node, sequence.tokens, index)
            if node.on_host:
                self._host.give_back([slot])
            else:
                self._host.adopt(node, slot)
                node.store_brought = not node.on_device
                held.append(node)
        self._host.give_back(asked.slots[arrived:])
        self._tree.forget_if_empty(sequence.namespace)
        self.fetched_blocks += arrived
        if arrived < len(asked.slots) or asked.first + arrived == asked.waiter.found:
            self.release(sequence)
        return held

    def cached(self, nodes: Listing[Node]) -> None:
        """These were written to the host; the oldest of too many that wait for the store are left out."""
        if self._enabled:
            self._queue.extend(nodes)

    def start_put(self) -> list[NamedSlot]:
        """What to write next; nothing if nothing waits. No put is under way."""
        assert not self._putting, "a put is under way"
        nodes: list[Node] = []
        while self._queue and len(nodes) < AT_ONCE:
            node = self._queue.popleft()
            if node.on_host:
                node.host_pins += 1
                nodes.append(node)
        self._putting = tuple(nodes)
        return [NamedSlot(self._named(node), node.host) for node in nodes]

    def finish_put(self, kept: Listing[bool]) -> None:
        """The put is done: which blocks are in the store now. The others are not tried again."""
        for node in self._putting:
            node.host_pins -= 1
        self._putting = ()
        self.put_blocks += sum(kept)
        self.failed_puts += len(kept) - sum(kept)

    def clear(self) -> None:
        """Forget what waits to be written. Only when nothing is read or written."""
        assert not self.fetching, "a fetch is under way"
        assert not self._putting, "a put is under way"
        self._queue.clear()

    def pinned(self) -> list[Node]:
        """Blocks whose copies are kept for what is under way."""
        anchor = self._asked.anchor if self._asked is not None else None
        return [*self._putting, *([anchor] if anchor is not None else [])]

    def _path(self, sequence: Sequence) -> list[Node]:
        return self._tree.match(sequence.namespace, sequence.tokens, blocks=sequence.shareable_blocks)

    def _look(self, waiter: _Expecting, now_s: float) -> LookPlan | None:
        """Ask how many of its blocks there are behind those that are known here."""
        sequence, size = waiter.sequence, self._block_size
        first = len(self._path(sequence))
        if first == sequence.shareable_blocks:
            return None
        name = self._names.root(sequence.namespace)
        for index in range(sequence.shareable_blocks):
            name = self._names.after(name, sequence.tokens[index * size : (index + 1) * size])
            waiter.names.append(name)
        self._asked = _Ask(waiter, first, now_s)
        return LookPlan(tuple(waiter.names[first:]))

    def _fetch(self, waiter: _Expecting, now_s: float, dropped: list[Node]) -> FetchPlan | None:
        """Read what the store has behind the part of its prompt that has a copy in host memory."""
        path = self._path(waiter.sequence)
        there = [node for node in path if node.on_host]  # whole prefixes only: these are the first ones
        first, found = len(there), waiter.found or 0
        if len(path) >= found:
            return None
        anchor = there[-1] if there else None
        if anchor is not None:
            anchor.host_pins += 1
        slots = self._host.lend(min(AT_ONCE, found - first), dropped)
        if not slots:
            if anchor is not None:
                anchor.host_pins -= 1
            return None
        self._asked = _Ask(waiter, first, now_s, tuple(slots), anchor)
        return FetchPlan(tuple(map(NamedSlot, waiter.names[first:], slots)))

    def _named(self, node: Node) -> BlockName:
        """Its name in the store, and those of the blocks before it, each worked out once."""
        unnamed: list[Node] = []
        step = node
        while step.store_name is None and step.parent is not None:
            unnamed.append(step)
            step = step.parent
        name = step.store_name or self._names.root(node.namespace)
        for each in reversed(unnamed):
            name = each.store_name = self._names.after(name, each.tokens)
        return name
