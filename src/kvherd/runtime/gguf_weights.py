"""Weights out of a GGUF: every tensor back to float32, fused and scaled as `weights` wants them."""

import mmap
from collections.abc import Callable
from dataclasses import replace
from math import prod, sqrt
from pathlib import Path

import numpy as np

from kvherd.core.errors import FrameInvalid, ModelMissing, ModelUnsupported
from kvherd.runtime.architecture import LlamaShape
from kvherd.runtime.weights import Floats, LayerWeights, Weights
from kvherd.wire.gguf import GgufHead, GgufTensor, decode_head


def read_head(path: Path) -> GgufHead:
    """Read a GGUF's head. Raises `ModelMissing` with the reason when there is no whole GGUF at `path`."""
    try:
        with path.open("rb") as file:
            # Closed with its last view, not here: the traceback of an error may still hold one.
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return decode_head(memoryview(mapped))
    except FrameInvalid as error:
        raise ModelMissing(str(path), f"the file is not a whole GGUF: {error.problem}") from error
    except ValueError as error:  # what mmap says of an empty file
        raise ModelMissing(str(path), "the file is empty") from error
    except OSError as error:
        raise ModelMissing(str(path), error.strerror or str(error)) from error


def read_weights(path: Path, head: GgufHead, shape: LlamaShape) -> Weights:
    """Convert every tensor. Raises `ModelMissing` for a file cut short, `ModelUnsupported` for what is strange."""
    tensors = GgufTensors(path, head)
    hidden, vocab = shape.hidden_size, shape.vocab_size
    embedding = tensors.read("token_embd.weight", (vocab, hidden))
    output = tensors.read("output.weight", (vocab, hidden)) if "output.weight" in tensors.by_name else embedding
    norm = tensors.read("output_norm.weight", (hidden,))
    return Weights(
        embedding=embedding,
        head=np.ascontiguousarray((output * norm).T),
        layers=tuple(
            _layer(lambda name, size, i=i: tensors.read(f"blk.{i}.{name}.weight", size), shape)  # type: ignore[misc]
            for i in range(shape.layers)
        ),
    )


def with_rope_divisors(path: Path, head: GgufHead, shape: LlamaShape) -> LlamaShape:
    """The shape with what the file's `rope_freqs` says of each pair (Llama 3.1 and later), if it has them.

    Raises as `read_weights`.
    """
    tensors = GgufTensors(path, head)
    if "rope_freqs.weight" not in tensors.by_name:
        return shape
    own = tensors.read("rope_freqs.weight", (shape.head_size // 2,))
    if not np.all(np.isfinite(own) & (own > 0)):
        raise ModelUnsupported(str(path), "its rope_freqs are not all above 0")
    common = shape.rope_divisors or (1.0,) * len(own)
    return replace(shape, rope_divisors=tuple(float(each) * one for each, one in zip(own, common, strict=True)))


def _layer(read: Callable[[str, tuple[int, ...]], Floats], shape: LlamaShape) -> LayerWeights:
    hidden, wide, size = shape.hidden_size, shape.feed_forward_size, shape.head_size
    attention_norm, ffn_norm = read("attn_norm", (hidden,)), read("ffn_norm", (hidden,))
    # llama.cpp stores the two halves of each rotated pair as neighbours. That order is kept: it makes a rotation
    # one product of complex numbers, and scores do not see an order that queries and keys share.
    query = read("attn_q", (shape.heads * size, hidden)) * np.float32(1 / sqrt(size))
    key, value = (read(name, (shape.kv_heads * size, hidden)) for name in ("attn_k", "attn_v"))
    gate, up = (read(name, (wide, hidden)) for name in ("ffn_gate", "ffn_up"))
    return fuse(
        np.concatenate([query, key, value]) * attention_norm,
        read("attn_output", (hidden, shape.heads * size)),
        np.concatenate([gate, up]) * ffn_norm,
        read("ffn_down", (hidden, wide)),
    )


def fuse(qkv: Floats, attention_out: Floats, gate_up: Floats, down: Floats) -> LayerWeights:
    """Lay out four (outputs, inputs) matrices for speed; `down` alone is fastest as it comes."""
    return LayerWeights(
        qkv=np.ascontiguousarray(qkv.T),
        attention_out=np.ascontiguousarray(attention_out.T),
        gate_up=np.ascontiguousarray(gate_up.T),
        down=np.ascontiguousarray(down).T,
    )


class GgufTensors:
    """The tensors of one file by llama.cpp's names."""

    def __init__(self, path: Path, head: GgufHead) -> None:
        self._path = path
        self._file = np.memmap(path, dtype=np.uint8, mode="r")
        self.by_name: dict[str, GgufTensor] = {tensor.name: tensor for tensor in head.tensors}

    def read(self, name: str, size: tuple[int, ...]) -> Floats:
        """The tensor of this name, which must have this shape, in float32 and the file's order.

        Raises `ModelMissing` and `ModelUnsupported`.
        """
        # Here, not above: importing `gguf` takes half a second, and most starts find their weights converted.
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType  # noqa: PLC0415
        from gguf.quants import dequantize  # noqa: PLC0415

        tensor = self.by_name.get(name)
        if tensor is None:
            raise ModelUnsupported(str(self._path), f"it has no tensor {name}")
        if tensor.shape != size:
            raise ModelUnsupported(str(self._path), f"tensor {name} is {tensor.shape}, where {size} should be")
        try:
            kind = GGMLQuantizationType(tensor.ggml_type)
            block, block_bytes = GGML_QUANT_SIZES[kind]
            row_bytes = size[-1] // block * block_bytes
            count = prod(size[:-1]) * row_bytes
            if tensor.offset + count > len(self._file):
                raise ModelMissing(str(self._path), f"the file ends before its tensor {name} does")
            raw = self._file[tensor.offset : tensor.offset + count].reshape(*size[:-1], row_bytes)
            plain = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}.get(kind)
            array = raw.view(plain) if plain else dequantize(raw, kind)
        except (ValueError, NotImplementedError) as error:
            raise ModelUnsupported(
                str(self._path), f"tensor {name} has a format ({tensor.ggml_type}) that cannot be read"
            ) from error
        return np.asarray(array, dtype=np.float32).reshape(size)
