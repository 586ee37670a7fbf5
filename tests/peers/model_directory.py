"""Write the packaged SmolLM2 as an ordinary model directory, which stock engines can serve.

    .venv/bin/python tests/peers/model_directory.py DIRECTORY [LAYERS]

Its tokenizer and chat template are whole. Of the transformer only the first LAYERS (4) are kept: what it says is
nonsense then, but what is cached of a prompt does not depend on that, and it takes a CPU a tenth of the time.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from kvherd.adapters.gguf_vocabulary import read_vocabulary
from kvherd.adapters.model_files import locate
from kvherd.adapters.vocabulary import hf_files
from kvherd.runtime.architecture import LlamaShape, shape_of
from kvherd.runtime.gguf_weights import GgufTensors, read_head
from kvherd.runtime.weights import Floats
from kvherd.testing.safetensors_files import write_safetensors

LAYERS = 4
MODEL = "smollm2"


def write_model_directory(directory: Path, layers: int = LAYERS) -> None:
    """Write the files of the first `layers` layers. The directory must be writable; what it holds is replaced."""
    path = locate(MODEL).path
    assert path is not None
    head = read_head(path)
    whole = shape_of(str(path), head)
    shape = replace(whole, layers=min(layers, whole.layers))
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in hf_files(read_vocabulary(path)).items():
        (directory / name).write_bytes(content)
    config = json.loads((directory / "config.json").read_bytes())
    told = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
    (directory / "config.json").write_text(json.dumps(config | _config(shape), indent=2))
    (directory / "generation_config.json").write_text(json.dumps(told, indent=2))
    write_safetensors(directory / "model.safetensors", _tensors(GgufTensors(path, head), shape))


def _config(shape: LlamaShape) -> dict[str, object]:
    return {
        "num_hidden_layers": shape.layers,
        "head_dim": shape.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": round(shape.rms_epsilon, 9),
        "rope_theta": shape.rope_base,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }


def _tensors(gguf: GgufTensors, shape: LlamaShape) -> Iterator[tuple[str, Floats]]:
    hidden, wide, size = shape.hidden_size, shape.feed_forward_size, shape.head_size
    inner, shared = shape.heads * size, shape.kv_heads * size
    yield "model.embed_tokens.weight", gguf.read("token_embd.weight", (shape.vocab_size, hidden))
    yield "model.norm.weight", gguf.read("output_norm.weight", (hidden,))
    for layer in range(shape.layers):

        def read(name: str, *dimensions: int, layer: int = layer) -> Floats:
            return gguf.read(f"blk.{layer}.{name}.weight", dimensions)

        named = {
            "input_layernorm": read("attn_norm", hidden),
            "post_attention_layernorm": read("ffn_norm", hidden),
            "self_attn.q_proj": _halves_apart(read("attn_q", inner, hidden), shape.heads),
            "self_attn.k_proj": _halves_apart(read("attn_k", shared, hidden), shape.kv_heads),
            "self_attn.v_proj": read("attn_v", shared, hidden),
            "self_attn.o_proj": read("attn_output", hidden, inner),
            "mlp.gate_proj": read("ffn_gate", wide, hidden),
            "mlp.up_proj": read("ffn_up", wide, hidden),
            "mlp.down_proj": read("ffn_down", hidden, wide),
        }
        for name, array in named.items():
            yield f"model.layers.{layer}.{name}.weight", array


def _halves_apart(matrix: Floats, heads: int) -> Floats:
    """A GGUF has the two rows of each rotated pair as neighbours, a model directory in a head's two halves."""
    rows, columns = matrix.shape
    pairs = matrix.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(0, 2, 1, 3).reshape(rows, columns)


if __name__ == "__main__":
    write_model_directory(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else LAYERS)
