"""Copies of blocks in host memory, beside the pool that steps compute in."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from kvherd.core.scheduler.steps import Copy
from kvherd.runtime.kv_pool import KvPool
from kvherd.runtime.weights import Floats

LAYOUT: Final = "keys and values by layer, token and head in float32"
"""How a block's bytes are to be read; another layout needs other words."""


class HostPool:
    """`slots` blocks, each with its keys and values of every layer side by side. Memory is taken when first written.

    `save`, `load` and views may be used in several threads at once, as long as they are not about the same slot.
    """

    def __init__(self, pool: KvPool, *, slots: int) -> None:
        self._pool = pool
        layers, _, heads, size = pool.keys.shape
        self._blocks: Floats = np.zeros((slots, 2, layers, pool.block_size, heads, size), dtype=np.float32)
        self._keys, self._values = self._blocks[:, 0], self._blocks[:, 1]

    @property
    def size_bytes(self) -> int:
        return self._blocks.nbytes

    def view(self, slot: int) -> memoryview:
        """The bytes of a slot, to read or to write."""
        return memoryview(self._blocks[slot]).cast("B")

    def save(self, copies: Sequence[Copy]) -> None:
        """Copy blocks of the pool here, as they are while it is read."""
        size = self._pool.block_size
        for copy in copies:
            slots = slice(copy.block * size, (copy.block + 1) * size)
            self._keys[copy.slot] = self._pool.keys[:, slots]
            self._values[copy.slot] = self._pool.values[:, slots]

    def load(self, copies: Sequence[Copy]) -> None:
        """Copy them back, to whichever blocks."""
        size = self._pool.block_size
        for copy in copies:
            slots = slice(copy.block * size, (copy.block + 1) * size)
            self._pool.keys[:, slots] = self._keys[copy.slot]
            self._pool.values[:, slots] = self._values[copy.slot]
