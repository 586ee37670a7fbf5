"""A store of blocks in memory, with faults."""

import threading
from collections.abc import Sequence
from hashlib import blake2b

from kvherd.core.ids import BlockName


class MemoryBlockStore:
    """Implements `BlockStore`. A call hangs while `open` is not set, until its time is over."""

    def __init__(self, *, most_blocks: int = 1_000_000) -> None:
        self.blocks: dict[BlockName, bytes] = {}
        self._digests: dict[BlockName, bytes] = {}
        self._most_blocks = most_blocks
        self.open = threading.Event()
        self.open.set()

    def find(self, names: Sequence[BlockName], *, timeout_s: float) -> int:
        if not self.open.wait(timeout_s):
            return 0
        return next((at for at, name in enumerate(names) if name not in self.blocks), len(names))

    def read(self, names: Sequence[BlockName], into: Sequence[memoryview], *, timeout_s: float) -> list[bool]:
        served = self.open.wait(timeout_s)
        return [served and self._read(name, buffer) for name, buffer in zip(names, into, strict=True)]

    def put(self, names: Sequence[BlockName], blocks: Sequence[memoryview], *, timeout_s: float) -> list[bool]:
        served = self.open.wait(timeout_s)
        return [served and self._put(name, block) for name, block in zip(names, blocks, strict=True)]

    def lose(self, name: BlockName) -> None:
        del self.blocks[name]

    def damage(self, name: BlockName, *, at: int) -> None:
        """Change one byte, as a bad disk does."""
        block = bytearray(self.blocks[name])
        block[at] ^= 1
        self.blocks[name] = bytes(block)

    def shorten(self, name: BlockName) -> None:
        self.blocks[name] = self.blocks[name][:-1]

    def _read(self, name: BlockName, buffer: memoryview) -> bool:
        block = self.blocks.get(name, b"")
        if len(block) != buffer.nbytes:
            return False
        buffer[:] = block
        return blake2b(buffer).digest() == self._digests[name]

    def _put(self, name: BlockName, block: memoryview) -> bool:
        if name not in self.blocks and len(self.blocks) >= self._most_blocks:
            return False
        self.blocks[name] = bytes(block)
        self._digests[name] = blake2b(block).digest()
        return True
