"""A model's arrays, in the layout that the forward pass multiplies fastest."""

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; every matrix is (inputs, outputs) and already holds the norm's and the attention's scale.

    `qkv` gives queries, keys and values side by side, each head's rotated pairs as neighbours; `gate_up` the two
    halves of the feed-forward network.
    """

    qkv: Floats
    attention_out: Floats
    gate_up: Floats
    down: Floats


@dataclass(frozen=True, slots=True)
class Weights:
    """`embedding` is (vocabulary, hidden); `head` is (hidden, vocabulary) and holds the last norm's scale."""

    embedding: Floats
    layers: tuple[LayerWeights, ...]
    head: Floats

    def named(self) -> dict[str, Floats]:
        """Every array by a stable name."""
        arrays = {"embedding": self.embedding, "head": self.head}
        for index, layer in enumerate(self.layers):
            for name in LAYER_ARRAYS:
                arrays[f"{index}.{name}"] = getattr(layer, name)
        return arrays

    @property
    def size_bytes(self) -> int:
        return sum(array.nbytes for array in self.named().values())


def digest(weights: Weights) -> str:
    """32 hexadecimal digits of every number in them."""
    whole = blake2b(digest_size=16)
    for name, array in sorted(weights.named().items()):
        whole.update(f"{name} {array.shape} {array.flags.c_contiguous}".encode())
        whole.update((array if array.flags.c_contiguous else np.ascontiguousarray(array.T)).data)
    return whole.hexdigest()


LAYER_ARRAYS = ("qkv", "attention_out", "gate_up", "down")


def from_named(arrays: dict[str, Floats], layers: int) -> Weights:
    """The inverse of `Weights.named`. Raises `KeyError` for an array that is not there."""
    return Weights(
        embedding=arrays["embedding"],
        head=arrays["head"],
        layers=tuple(LayerWeights(*(arrays[f"{index}.{name}"] for name in LAYER_ARRAYS)) for index in range(layers)),
    )
