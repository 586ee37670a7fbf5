"""Keys and values of every token in the pool, by layer and block."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvherd.runtime.architecture import LlamaShape
from kvherd.runtime.weights import Floats

Blocks = NDArray[np.intp]


class KvPool:
    """`blocks` blocks of `block_size` tokens; a slot is block × `block_size` + offset.

    `keys[layer]` and `values[layer]` are (slots, kv heads, head size), always finite. Memory is taken when first
    written.
    """

    def __init__(self, shape: LlamaShape, *, blocks: int, block_size: int) -> None:
        self.blocks = blocks
        self.block_size = block_size
        size = (shape.layers, blocks * block_size, shape.kv_heads, shape.head_size)
        self.keys: Floats = np.zeros(size, dtype=np.float32)
        self.values: Floats = np.zeros(size, dtype=np.float32)

    @property
    def size_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def covering(self, block_table: Sequence[int], tokens: int) -> Blocks:
        """The blocks that hold the first `tokens` positions of a sequence."""
        return np.asarray(block_table[: -(-tokens // self.block_size)], dtype=np.intp)

    def slots(self, blocks: Blocks, first: int, last: int) -> NDArray[np.intp]:
        """The slots of positions `first` to `last` (exclusive) of a sequence whose blocks these are."""
        positions = np.arange(first, last)
        slots: NDArray[np.intp] = blocks[positions // self.block_size] * self.block_size + positions % self.block_size
        return slots

    def read(self, layer: Floats, blocks: Blocks, into: Floats) -> Floats:
        """The (…, tokens, kv heads, head size) of blocks given as (…, blocks), copied `into` if they lie apart.

        `layer` is one layer of the keys or the values. Whole blocks are read, also where only a part is written.
        """
        count, (_, heads, size) = blocks.shape[-1], layer.shape
        tokens = count * self.block_size
        if blocks.size == count and _neighbours(blocks.reshape(-1)):
            first = int(blocks.flat[0]) * self.block_size
            return layer[first : first + tokens].reshape(*blocks.shape[:-1], tokens, heads, size)
        by_block = layer.reshape(-1, self.block_size * heads * size)
        # "clip" because any other mode makes numpy copy through a buffer of its own
        np.take(by_block, blocks, axis=0, out=into.reshape(*blocks.shape, -1), mode="clip")
        return into.reshape(*blocks.shape[:-1], tokens, heads, size)


def _neighbours(blocks: Blocks) -> bool:
    return int(blocks[-1] - blocks[0]) == len(blocks) - 1 and bool((np.diff(blocks) == 1).all())
