"""A prefix cache that behaves as vLLM's does, block by block: what it holds, evicts, reports as cached, and says of it.

* The last token of a prompt is always computed; a block that is computed again is a second copy, stored and removed on
  its own.
* Freed blocks are reused least recently used first, a request's last ones before its first; those without a hash at
  once.
* A reset is told with the next step only.
* The token sampled last is in no block.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from kvherd.core.ids import EngineHash
from kvherd.core.kv.events import BlocksRemoved, BlocksStored, CacheCleared, KvEvent


@dataclass
class Running:
    """A request under way: its tokens, computed ones first, and the physical blocks that they are in."""

    tokens: list[int]
    salt: str | None
    cached_tokens: int
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    hashes: list[EngineHash] = field(default_factory=list)


class PagedCache:
    """`blocks` physical blocks of `block_size` tokens, for one request after another or several at once."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.said: list[KvEvent] = []
        self._free = OrderedDict.fromkeys(range(blocks))
        self._blocks = blocks
        self._uses = [0] * blocks
        self._hashes: dict[int, EngineHash] = {}
        self._copies: dict[EngineHash, dict[int, None]] = {}
        self._cleared = False

    @property
    def truth(self) -> dict[EngineHash, int]:
        """What is held, and in how many copies."""
        return {block: len(copies) for block, copies in self._copies.items()}

    @property
    def used_share(self) -> float:
        return 1 - len(self._free) / self._blocks

    def begin(self, prompt: Sequence[int], *, salt: str | None = None, full_report: bool = False) -> Running:
        """Find what is cached of a prompt, and compute the rest of it. Raises `MemoryError` if it does not fit."""
        names = self._names(prompt, salt)
        most = (len(prompt) - 1) // self.block_size
        hits = 0
        while hits < most and names[hits] in self._copies:
            hits += 1
        running = Running(list(prompt), salt, hits * self.block_size, hits * self.block_size)
        running.hashes = names[:hits]
        if full_report and hits:
            self._say_stored(running, 0, hits)
        for name in running.hashes:
            self._use(running, next(iter(self._copies[name])))
        self._compute(running, len(prompt))
        return running

    def decode(self, running: Running, token: int) -> None:
        """A token was sampled; the one before it is computed now."""
        running.tokens.append(token)
        self._compute(running, len(running.tokens) - 1)

    def end(self, running: Running) -> None:
        for block in reversed(running.blocks):
            self._uses[block] -= 1
            if not self._uses[block]:
                self._free[block] = None
                self._free.move_to_end(block, last=block in self._hashes)
        running.blocks.clear()

    def reset(self) -> bool:
        """Forget everything, if nothing runs."""
        if len(self._free) < self._blocks:
            return False
        self._hashes.clear()
        self._copies.clear()
        self._cleared = True
        return True

    def take_said(self) -> tuple[KvEvent, ...]:
        """The events of a step. A step is what `begin` or `decode` was called for."""
        said = (CacheCleared(), *self.said) if self._cleared else tuple(self.said)
        self._cleared = False
        self.said.clear()
        return said

    def _compute(self, running: Running, tokens: int) -> None:
        size = self.block_size
        while len(running.blocks) * size < tokens:
            self._use(running, self._new_block())
        running.computed = max(running.computed, tokens)
        full, known = tokens // size, len(running.hashes)
        if full > known:
            running.hashes = self._names(running.tokens[: full * size], running.salt)
            for place in range(known, full):
                name = running.hashes[place]
                self._hashes[running.blocks[place]] = name
                self._copies.setdefault(name, {})[running.blocks[place]] = None
            self._say_stored(running, known, full)

    def _new_block(self) -> int:
        if not self._free:
            raise MemoryError("every block is in use")
        block, _ = self._free.popitem(last=False)
        name = self._hashes.pop(block, None)
        if name is not None:
            del self._copies[name][block]
            if not self._copies[name]:
                del self._copies[name]
            self.said.append(BlocksRemoved((name,)))
        return block

    def _use(self, running: Running, block: int) -> None:
        self._free.pop(block, None)
        self._uses[block] += 1
        running.blocks.append(block)

    def _say_stored(self, running: Running, first: int, end: int) -> None:
        size = self.block_size
        self.said.append(
            BlocksStored(
                tuple(running.hashes[first:end]),
                running.hashes[first - 1] if first else None,
                tuple(running.tokens[first * size : end * size]),
                size,
                salt=None if first else running.salt,
            )
        )

    def _names(self, tokens: Sequence[int], salt: str | None) -> list[EngineHash]:
        names, parent = [], repr(salt).encode()
        for place in range(0, len(tokens) // self.block_size * self.block_size, self.block_size):
            own = repr(tuple(tokens[place : place + self.block_size])).encode()
            parent = blake2b(parent + own, digest_size=8).digest()
            names.append(EngineHash(int.from_bytes(parent, "big")))
        return names
