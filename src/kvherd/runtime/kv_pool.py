"""Keys and values of every token in the pool, by layer and block."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvherd.runtime.architecture import LlamaShape
from kvherd.runtime.weights import Floats


class KvPool:
    """`blocks` blocks of `block_size` tokens; a slot is block × `block_size` + offset.

    `keys[layer]` and `values[layer]` are (slots, kv heads, head size). Pages are touched when first written.
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

    def slots(self, block_table: Sequence[int], tokens: int) -> NDArray[np.intp]:
        """The slots of the first `tokens` positions of a sequence."""
        blocks = np.asarray(block_table[: -(-tokens // self.block_size)], dtype=np.intp)
        slots = blocks[:, None] * self.block_size + np.arange(self.block_size, dtype=np.intp)
        return slots.reshape(-1)[:tokens]
