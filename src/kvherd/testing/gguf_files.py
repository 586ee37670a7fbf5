"""GGUF files of small Llamas, written with the package `gguf` as llama.cpp's converter writes them."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants

from kvherd.testing.plain_llama import Floats, PlainShape

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write_llama(
    path: Path,
    shape: PlainShape,
    tensors: Mapping[str, Floats],
    *,
    context_tokens: int = 256,
    matrices: GGMLQuantizationType = GGMLQuantizationType.F32,
    architecture: str = "llama",
    entries: Mapping[str, int | float | str | bool] | None = None,
    extra: Mapping[str, Floats] | None = None,
) -> dict[str, Floats]:
    """Write a model; give its tensors as a reader should see them, after quantization of the `matrices`.

    `entries` are further metadata and replace what is written by itself; `extra` are further tensors.
    """
    writer = GGUFWriter(path, architecture)
    for key, value in {**_entries(shape, context_tokens), **(entries or {})}.items():
        _add(writer, key, value)
    seen: dict[str, Floats] = {}
    for name, tensor in tensors.items():
        packed = quants.quantize(tensor, matrices) if tensor.ndim == 2 else tensor
        kind = matrices if tensor.ndim == 2 else GGMLQuantizationType.F32
        seen[name] = np.asarray(quants.dequantize(packed, kind), dtype=np.float32).reshape(tensor.shape)
        heads = {"q_proj": shape.heads, "k_proj": shape.kv_heads}.get(name.split(".")[-2])
        writer.add_tensor(gguf_name(name), _paired(packed, heads) if heads else packed, raw_dtype=kind)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return seen


def gguf_name(name: str) -> str:
    """llama.cpp's name of a Hugging Face tensor."""
    if name in _WHOLE:
        return _WHOLE[name]
    _, _, index, part = name.removesuffix(".weight").split(".", 3)
    return f"blk.{index}.{_NAMES[part]}.weight"


def _add(writer: GGUFWriter, key: str, value: float | str | bool) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)


def _entries(shape: PlainShape, context_tokens: int) -> dict[str, int | float | str | bool]:
    return {
        "llama.block_count": shape.layers,
        "llama.context_length": context_tokens,
        "llama.embedding_length": shape.hidden_size,
        "llama.feed_forward_length": shape.feed_forward_size,
        "llama.attention.head_count": shape.heads,
        "llama.attention.head_count_kv": shape.kv_heads,
        "llama.attention.key_length": shape.head_size,
        "llama.attention.layer_norm_rms_epsilon": shape.epsilon,
        "llama.rope.freq_base": shape.rope_base,
        "tokenizer.ggml.eos_token_id": 2,
    }


def _paired(packed: Floats, heads: int) -> Floats:
    """Interleave the two halves of each head's rows."""
    half = len(packed) // heads // 2
    paired: Floats = packed.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(packed.shape)
    return paired
