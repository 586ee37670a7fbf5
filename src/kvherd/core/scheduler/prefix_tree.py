"""Which prefixes are in the pool: a tree of full blocks, each the child of the block before it.

Rules:
1. A node is one block of the pool whose keys and values are computed. It holds its exact tokens: two prefixes are
   the same only if all their tokens are, whatever their hashes.
2. A running sequence pins every node on its path, so a node's pins are never fewer than its child's.
3. Only an unpinned leaf is evicted, the one released longest ago first. Hence every unpinned node can be evicted.
"""

import heapq
from collections.abc import Iterator, Sequence

from kvherd.core.ids import EngineHash
from kvherd.core.scheduler.hashes import Namespace, block_hash

Tokens = tuple[int, ...]


class Node:
    """One cached block. A root has no block, no tokens and no hash."""

    __slots__ = ("block", "children", "hash", "namespace", "parent", "pins", "released", "serial", "tokens")

    def __init__(self, parent: "Node | None", tokens: Tokens, namespace: Namespace, block: int, serial: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.namespace = namespace
        self.block = block
        self.serial = serial
        self.hash: EngineHash | None = block_hash(parent.hash, tokens, namespace) if parent is not None else None
        self.children: dict[Tokens, Node] = {}
        self.pins = 0
        self.released = 0

    @property
    def evictable(self) -> bool:
        return self.pins == 0 and not self.children

    def __repr__(self) -> str:
        return f"<block {self.block} pins={self.pins} children={len(self.children)}>"


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
        """The longest cached prefix of `tokens`, at most so many blocks. Changes nothing."""
        path: list[Node] = []
        node = self._roots.get(namespace)
        while node is not None and len(path) < blocks:
            node = self.child(node, tokens, len(path))
            if node is not None:
                path.append(node)
        return path

    def child(self, node: Node, tokens: Sequence[int], index: int) -> Node | None:
        """The cached block `index` of `tokens` behind `node`, which is block `index - 1`. Changes nothing."""
        return node.children.get(self._block(tokens, index))

    def root(self, namespace: Namespace) -> Node:
        if namespace not in self._roots:
            self._roots[namespace] = Node(None, (), namespace, -1, 0)
        return self._roots[namespace]

    def insert(self, parent: Node, tokens: Sequence[int], index: int, block: int) -> Node:
        """Make `block`, which holds block `index` of `tokens`, a pinned child of `parent`; it must not have it yet."""
        self._serial += 1
        node = Node(parent, self._block(tokens, index), parent.namespace, block, self._serial)
        parent.children[node.tokens] = node
        node.pins = 1
        self.size += 1
        return node

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

    def evict(self) -> Node | None:
        """Take the oldest unpinned leaf out of the tree; None if every block is pinned. Its block is the caller's."""
        while self._oldest:
            released, _, node = heapq.heappop(self._oldest)
            if node.parent is not None and node.evictable and node.released == released:
                self._remove(node, node.parent)
                return node
        return None

    def clear(self) -> list[Node]:
        """Forget everything; the nodes' blocks are the caller's. Only when nothing is pinned."""
        nodes = list(self.nodes())
        self._roots.clear()
        self._oldest.clear()
        self.size = self.unpinned = 0
        return nodes

    def nodes(self) -> Iterator[Node]:
        """Every cached block, parents before children."""
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

    def _remove(self, node: Node, parent: Node) -> None:
        del parent.children[node.tokens]
        node.parent = None
        self.size -= 1
        self.unpinned -= 1
        if parent.parent is not None:
            self._offer(parent)
        elif not parent.children:
            self._roots.pop(parent.namespace, None)  # salts come and go; their empty roots must not pile up

    def validate(self) -> None:
        """Raise `AssertionError` unless the rules above hold."""
        seen = list(self.nodes())
        assert len(seen) == self.size, f"{len(seen)} nodes, {self.size} counted"
        assert sum(node.pins == 0 for node in seen) == self.unpinned
        offered = {id(node) for released, _, node in self._oldest if node.released == released}
        for node in seen:
            assert node.parent is not None
            assert node.parent.children[node.tokens] is node
            assert len(node.tokens) == self._block_size
            assert node.hash == block_hash(node.parent.hash, node.tokens, node.namespace)
            assert node.parent.parent is None or node.parent.pins >= node.pins, f"{node.parent} above {node}"
            assert not node.evictable or id(node) in offered, f"{node} could never be evicted"
