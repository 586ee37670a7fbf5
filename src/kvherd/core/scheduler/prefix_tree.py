"""Which prefixes are in the pool, or in host memory: a tree of full blocks, each the child of the block before it.

Rules:
1. A node is one block whose keys and values are computed: on the device, in a block of the pool; in a slot of host
   memory; or both. It holds its exact tokens: two prefixes are the same only if all their tokens are, whatever their
   hashes.
2. Parents of nodes on the device are on the device. A running sequence pins every node on its path there, so a node's
   pins are never fewer than its child's.
3. Only an unpinned node without a child on the device is evicted from it, the one released longest ago first. Hence
   every unpinned node can be evicted. Without a copy in host memory it leaves the tree.
"""

import heapq
from collections.abc import Iterator, Sequence
from typing import Final

from kvherd.core.ids import BlockName, EngineHash
from kvherd.core.scheduler.hashes import Namespace, block_hash

Tokens = tuple[int, ...]
NOWHERE: Final = -1
"""The block of a node that is not on the device, the slot of one that is not in host memory."""


class Node:
    """One cached block. A root has no block, no tokens and no hash.

    `host_pins` keep its slot in host memory from being given away. `store_brought`: it came from the store, and nobody
    has used it yet.
    """

    __slots__ = (
        "block",
        "children",
        "device_children",
        "hash",
        "host",
        "host_children",
        "host_pins",
        "namespace",
        "parent",
        "pins",
        "released",
        "serial",
        "store_brought",
        "store_name",
        "tokens",
    )

    def __init__(self, parent: "Node | None", tokens: Tokens, namespace: Namespace, block: int, serial: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.namespace = namespace
        self.block = block
        self.serial = serial
        self.hash: EngineHash | None = block_hash(parent.hash, tokens, namespace) if parent is not None else None
        self.children: dict[Tokens, Node] = {}
        self.device_children = 0
        self.pins = 0
        self.released = 0
        self.host = NOWHERE
        self.host_children = 0
        self.host_pins = 0
        self.store_name: BlockName | None = None
        self.store_brought = False

    @property
    def is_root(self) -> bool:
        return self.hash is None

    @property
    def on_device(self) -> bool:
        return self.block != NOWHERE

    @property
    def on_host(self) -> bool:
        return self.host != NOWHERE

    @property
    def evictable(self) -> bool:
        return self.pins == 0 and self.block != NOWHERE and not self.device_children

    def __repr__(self) -> str:
        return f"<block {self.block} host={self.host} pins={self.pins} children={len(self.children)}>"


class PrefixTree:
    """The cached blocks of one rank. Knows blocks by number only: the pool they come from is the caller's."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._roots: dict[Namespace, Node] = {}
        self._oldest: list[tuple[int, int, Node]] = []  # a heap that may hold entries of another time
        self._clock = 0
        self._serial = 0
        self.size = 0
        self.unpinned = 0

    def match(self, namespace: Namespace, tokens: Sequence[int], *, blocks: int) -> list[Node]:
        """The longest known prefix of `tokens`, at most so many blocks: first those on the device, then those in host
        memory only. Changes nothing.
        """
        path: list[Node] = []
        node = self._roots.get(namespace)
        while node is not None and len(path) < blocks:
            node = self.child(node, tokens, len(path))
            if node is not None:
                path.append(node)
        return path

    def child(self, node: Node, tokens: Sequence[int], index: int) -> Node | None:
        """The known block `index` of `tokens` behind `node`, which is block `index - 1`. Changes nothing."""
        return node.children.get(self._block(tokens, index))

    def root(self, namespace: Namespace) -> Node:
        if namespace not in self._roots:
            self._roots[namespace] = Node(None, (), namespace, NOWHERE, 0)
        return self._roots[namespace]

    def insert(self, parent: Node, tokens: Sequence[int], index: int, block: int) -> Node:
        """Make `block`, which holds block `index` of `tokens`, a pinned child of `parent`; it must not have it yet."""
        self._serial += 1
        node = Node(parent, self._block(tokens, index), parent.namespace, block, self._serial)
        parent.children[node.tokens] = node
        node.pins = 1
        parent.device_children += 1
        self.size += 1
        return node

    def insert_away(self, parent: Node, tokens: Sequence[int], index: int) -> Node:
        """Make block `index` of `tokens`, about to be in host memory, a child of `parent`, which has none such."""
        self._serial += 1
        node = Node(parent, self._block(tokens, index), parent.namespace, NOWHERE, self._serial)
        parent.children[node.tokens] = node
        return node

    def bring(self, node: Node, block: int) -> None:
        """Put a node that is in host memory only into `block` of the pool, pinned. Its parent is on the device."""
        node.block, node.pins, node.store_brought = block, 1, False
        if node.parent is not None:
            node.parent.device_children += 1
        self.size += 1

    def leave_host(self, node: Node) -> None:
        """Its slot goes to another; a node that is nowhere then leaves the tree."""
        node.host = NOWHERE
        if node.parent is not None:
            node.parent.host_children -= 1
            if not node.on_device:
                self._remove(node, node.parent)

    def pin(self, nodes: Sequence[Node]) -> None:
        """Keep these from eviction until as many `unpin`s."""
        for node in nodes:
            if node.pins == 0:
                self.unpinned -= 1
            node.pins += 1

    def unpin(self, nodes: Sequence[Node]) -> None:
        """Take one pin off each; those without any become the youngest candidates of eviction."""
        self._clock += 1
        for node in nodes:
            node.pins -= 1
            if node.pins == 0:
                self.unpinned += 1
                node.released = self._clock
                self._offer(node)

    def evict(self) -> tuple[Node, int] | None:
        """Take the oldest evictable node off the device; None if every block is pinned. The block is the caller's."""
        while self._oldest:
            released, _, node = heapq.heappop(self._oldest)
            parent = node.parent
            if parent is None or not node.evictable or node.released != released:
                continue
            block, node.block = node.block, NOWHERE
            self.size -= 1
            self.unpinned -= 1
            parent.device_children -= 1
            if not parent.is_root:
                self._offer(parent)
            if not node.on_host:
                self._remove(node, parent)
            return node, block
        return None

    def clear(self) -> list[Node]:
        """Forget everything; the nodes' blocks and slots are the caller's. Only when nothing is pinned."""
        nodes = list(self.nodes())
        self._roots.clear()
        self._oldest.clear()
        self.size = self.unpinned = 0
        return nodes

    def nodes(self) -> Iterator[Node]:
        """Every known block, parents before children."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _block(self, tokens: Sequence[int], index: int) -> Tokens:
        start = index * self._block_size
        return tuple(tokens[start : start + self._block_size])

    def _offer(self, node: Node) -> None:
        if not node.evictable:
            return
        heapq.heappush(self._oldest, (node.released, node.serial, node))
        if len(self._oldest) > 2 * self.size + 64:  # a hot leaf leaves an entry here at each release
            self._oldest = [(each.released, each.serial, each) for each in self.nodes() if each.evictable]
            heapq.heapify(self._oldest)

    def forget_if_empty(self, namespace: Namespace) -> None:
        """Salts come and go; their empty roots must not pile up."""
        root = self._roots.get(namespace)
        if root is not None and not root.children:
            del self._roots[namespace]

    def _remove(self, node: Node, parent: Node) -> None:
        del parent.children[node.tokens]
        node.parent = None
        if parent.is_root:
            self.forget_if_empty(parent.namespace)

    def validate(self) -> None:
        """Raise `AssertionError` unless the rules above hold."""
        known = list(self.nodes())
        seen = [node for node in known if node.on_device]
        assert len(seen) == self.size, f"{len(seen)} nodes, {self.size} counted"
        assert sum(node.pins == 0 for node in seen) == self.unpinned
        assert all(node.on_device or (node.on_host and not node.pins) for node in known)
        offered = {id(node) for released, _, node in self._oldest if node.released == released}
        for node in seen:
            assert node.parent is not None
            assert node.parent.children[node.tokens] is node
            assert len(node.tokens) == self._block_size
            assert node.hash == block_hash(node.parent.hash, node.tokens, node.namespace)
            assert node.parent.is_root or node.parent.on_device, f"{node.parent} above {node}"
            assert node.parent.is_root or node.parent.pins >= node.pins, f"{node.parent} above {node}"
            assert node.device_children == sum(child.on_device for child in node.children.values())
            assert not node.evictable or id(node) in offered, f"{node} could never be evicted"
