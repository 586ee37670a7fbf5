"""Copies of cached blocks in host memory: written behind, dropped in order of use, and where they were when needed.

Rules:
1. A block is written only behind its parent: what the tier holds is whole prefixes, and only its leaves are dropped.
2. A write reads a block that nobody keeps in its place. If the block was evicted meanwhile, its node has left the
   tree, the copy is worth nothing, and its slot is free again.
3. A slot is not given to another block while a step loads from it.
"""

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from kvherd.core.scheduler.prefix_tree import NOWHERE, Node, PrefixTree
from kvherd.core.scheduler.steps import Copy

AT_ONCE: Final = 16
"""Blocks in one write: a few milliseconds, for which a flush may have to wait."""


@dataclass(frozen=True, slots=True)
class _Write:
    node: Node
    parent: Node
    slot: int


class HostTier:
    """`slots` blocks of host memory; 0 is no tier. Knows nodes of `tree` only."""

    def __init__(self, slots: int, tree: PrefixTree) -> None:
        self.slots = slots
        self._tree = tree
        self._free = list(range(slots - 1, -1, -1))
        self._by_use: OrderedDict[Node, None] = OrderedDict()
        self._queue: deque[Node] = deque(maxlen=slots)
        self._writes: tuple[_Write, ...] = ()
        self._loading: list[Node] = []
        self._lent: set[int] = set()

    def __len__(self) -> int:
        """How many blocks have a copy here."""
        return len(self._by_use)

    @property
    def writing(self) -> int:
        """How many blocks are being written."""
        return len(self._writes)

    def cached(self, nodes: Iterable[Node]) -> None:
        """These are on the device now; the oldest of too many that wait to be written are left out."""
        if self.slots:
            self._queue.extend(nodes)

    def start_writes(self) -> tuple[list[Copy], list[Node]]:
        """What to copy from the pool next, and whose copies were dropped to make room. Nothing is being written."""
        assert not self._writes, "a write is under way"
        begun: dict[Node, _Write] = {}
        dropped: list[Node] = []
        while self._queue and len(begun) < AT_ONCE:
            for node in reversed(_unwritten(self._queue.popleft(), begun)):
                assert node.parent is not None, "a root is never unwritten"
                slot = self._take_slot(node.parent, dropped)
                if slot is None:
                    break
                node.parent.host_pins += 1
                begun[node] = _Write(node, node.parent, slot)
        self._writes = tuple(begun.values())
        return [Copy(each.node.block, each.slot) for each in self._writes], dropped

    def written(self) -> list[Node]:
        """The write is done; answers with the blocks that now have a copy here, parents before children."""
        writes, self._writes = self._writes, ()
        held: list[Node] = []
        for write in writes:
            node, parent = write.node, write.parent
            parent.host_pins -= 1
            if node.on_device and not node.on_host:  # the store may have brought it meanwhile
                assert parent.is_root or parent.on_host, "children are evicted before their parents"
                self.adopt(node, write.slot)
                held.append(node)
            else:
                self._free.append(write.slot)
        return held

    def lend(self, count: int, dropped: list[Node]) -> list[int]:
        """Up to so many slots, for blocks that come from elsewhere; whose copies made room is added to `dropped`."""
        slots: list[int] = []
        while len(slots) < count and (slot := self._take_slot(None, dropped)) is not None:
            slots.append(slot)
        self._lent.update(slots)
        return slots

    def give_back(self, slots: Iterable[int]) -> None:
        """Lent slots that hold nothing of use."""
        for slot in slots:
            self._lent.remove(slot)
            self._free.append(slot)

    def adopt(self, node: Node, slot: int) -> None:
        """This slot, which was lent or written, holds the block of `node` now, and had none of it before."""
        self._lent.discard(slot)
        node.host = slot
        if node.parent is not None:
            node.parent.host_children += 1
        self.used([node])

    def load(self, node: Node) -> Copy:
        """The node was given a block of the pool; where to copy it from. Its slot stays until `loaded`."""
        node.host_pins += 1
        self._loading.append(node)
        return Copy(node.block, node.host)

    def loaded(self) -> int:
        """The step that loads is done; answers how many blocks it loaded."""
        for node in self._loading:
            node.host_pins -= 1
        count = len(self._loading)
        self._loading.clear()
        return count

    def used(self, path: Sequence[Node]) -> None:
        """A prefix that ends with `path` was asked for: its blocks are dropped last, children before parents."""
        node: Node | None = path[-1] if path else None
        while node is not None and not node.is_root:
            if node.on_host:
                self._by_use[node] = None
                self._by_use.move_to_end(node)
            node = node.parent

    def clear(self) -> None:
        """Forget everything. Only when nothing is being written or loaded."""
        assert not self._writes, "a write is under way"
        assert not self._loading, "a load is under way"
        assert not self._lent, "slots are lent"
        self._free = list(range(self.slots - 1, -1, -1))
        self._by_use.clear()
        self._queue.clear()

    def nodes(self) -> Iterable[Node]:
        return self._by_use.keys()

    def _take_slot(self, behind: Node | None, dropped: list[Node]) -> int | None:
        if self._free:
            return self._free.pop()
        node = next((node for node in self._by_use if self._droppable(node) and node is not behind), None)
        if node is None:
            return None
        dropped.append(node)
        slot = node.host
        del self._by_use[node]
        self._tree.leave_host(node)
        return slot

    def _droppable(self, node: Node) -> bool:
        return not node.host_pins and not node.host_children

    def validate(self) -> None:
        """Raise `AssertionError` unless every slot is in exactly one place and the rules hold."""
        held = [node.host for node in self._by_use]
        slots = sorted([*self._free, *held, *self._lent, *(write.slot for write in self._writes)])
        assert slots == list(range(self.slots)), f"{len(self._free)} free, {len(held)} held of {self.slots} slots"
        found = [node for node in self._tree.nodes() if node.on_host]
        assert set(found) == set(self._by_use)
        for node in found:
            assert node.parent is not None
            assert node.parent.is_root or node.parent.on_host, f"{node} is held without its parent"
            assert node.host_children == sum(child.on_host for child in node.children.values())
        assert NOWHERE not in held


def _unwritten(node: Node, begun: Collection[Node]) -> list[Node]:
    """The node and what is missing before it, the nearest first; nothing if it is not on the device any more."""
    missing: list[Node] = []
    step: Node | None = node if node.on_device else None
    while step is not None and not step.is_root and not step.on_host and step not in begun:
        missing.append(step)
        step = step.parent
    return missing
