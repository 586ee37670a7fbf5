"""LoRA adapters of noise, as files that stock engines load: enough to give a prompt blocks of its own."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvherd.testing.safetensors_files import Floats, write_safetensors

RANK = 8
_TARGETS = ("q_proj", "v_proj")


def write_adapter(directory: Path, model: Path, *, seed: int) -> None:
    """An adapter of the Llama in the directory `model`, in peft's files. Adapters of two seeds differ."""
    shape = json.loads((model / "config.json").read_bytes())
    told = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(_TARGETS),
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(told, indent=2))
    write_safetensors(directory / "adapter_model.safetensors", _tensors(shape, np.random.default_rng(seed)))


def _tensors(shape: dict[str, int], dice: np.random.Generator) -> Iterator[tuple[str, Floats]]:
    hidden, size = shape["hidden_size"], shape["head_dim"]
    outputs = {"q_proj": shape["num_attention_heads"] * size, "v_proj": shape["num_key_value_heads"] * size}
    for layer in range(shape["num_hidden_layers"]):
        for target in _TARGETS:
            name = f"base_model.model.model.layers.{layer}.self_attn.{target}"
            yield f"{name}.lora_A.weight", _noise(dice, RANK, hidden)
            yield f"{name}.lora_B.weight", _noise(dice, outputs[target], RANK)


def _noise(dice: np.random.Generator, rows: int, columns: int) -> Floats:
    return (0.1 * dice.standard_normal((rows, columns))).astype(np.float32)
