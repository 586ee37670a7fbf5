"""A Llama as its paper has it: every matrix apart, every head in a loop, no pages. Slow, short, and right.

What the engine's forward pass is checked against and timed against. Weights have the names and the row order of
Hugging Face, so it shares nothing with the engine, not even a layout.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PlainShape:
    vocab_size: int
    hidden_size: int
    feed_forward_size: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    rope_base: float = 10000.0
    epsilon: float = 1e-5
    rope_divisors: tuple[float, ...] = ()

    def sizes(self, *, tied: bool) -> dict[str, tuple[int, ...]]:
        """Every tensor's name and shape."""
        hidden, wide = self.hidden_size, self.feed_forward_size
        query, key = self.heads * self.head_size, self.kv_heads * self.head_size
        sizes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, hidden),
            "model.norm.weight": (hidden,),
        }
        if not tied:
            sizes["lm_head.weight"] = (self.vocab_size, hidden)
        for index in range(self.layers):
            layer = f"model.layers.{index}."
            sizes |= {
                layer + "input_layernorm.weight": (hidden,),
                layer + "self_attn.q_proj.weight": (query, hidden),
                layer + "self_attn.k_proj.weight": (key, hidden),
                layer + "self_attn.v_proj.weight": (key, hidden),
                layer + "self_attn.o_proj.weight": (hidden, query),
                layer + "post_attention_layernorm.weight": (hidden,),
                layer + "mlp.gate_proj.weight": (wide, hidden),
                layer + "mlp.up_proj.weight": (wide, hidden),
                layer + "mlp.down_proj.weight": (hidden, wide),
            }
        return sizes


def random_tensors(shape: PlainShape, *, tied: bool = True, seed: int = 0) -> dict[str, Floats]:
    """Weights of a size that keeps activations near one."""
    dice = np.random.default_rng(seed)
    tensors: dict[str, Floats] = {}
    for name, size in shape.sizes(tied=tied).items():
        values = dice.standard_normal(size, dtype=np.float32)
        if len(size) == 1:
            tensors[name] = 1 + values * np.float32(0.1)
        else:
            tensors[name] = values / np.float32(np.sqrt(size[1]))
    return tensors


@dataclass(slots=True)
class PlainCache:
    """Keys and values so far, by layer; empty before the first token."""

    layers: dict[int, tuple[Floats, Floats]] = field(default_factory=dict)
    tokens: int = 0


class PlainLlama:
    def __init__(self, shape: PlainShape, tensors: Mapping[str, Floats]) -> None:
        self._shape = shape
        self._tensors = tensors

    def logits(self, token_ids: Sequence[int], cache: PlainCache | None = None) -> Floats:
        """Logits after every token given, (tokens, vocabulary); `cache` has the tokens before them and grows."""
        past = cache if cache is not None else PlainCache()
        embedding = self._tensors["model.embed_tokens.weight"]
        hidden = embedding[np.asarray(token_ids)]
        for index in range(self._shape.layers):
            hidden = hidden + self._attention(index, hidden, past)
            hidden = hidden + self._feed_forward(index, hidden)
        past.tokens += len(token_ids)
        final = self._norm(hidden, "model.norm.weight")
        logits: Floats = final @ self._tensors.get("lm_head.weight", embedding).T
        return logits

    def _attention(self, index: int, hidden: Floats, past: PlainCache) -> Floats:
        shape, layer = self._shape, f"model.layers.{index}."
        normal = self._norm(hidden, layer + "input_layernorm.weight")
        count, first = len(hidden), past.tokens
        query, key, value = (
            (normal @ self._tensors[f"{layer}self_attn.{name}_proj.weight"].T).reshape(count, heads, shape.head_size)
            for name, heads in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads))
        )
        query, key = self._rotate(query, first), self._rotate(key, first)
        if index in past.layers:
            key = np.concatenate([past.layers[index][0], key])
            value = np.concatenate([past.layers[index][1], value])
        past.layers[index] = (key, value)
        answers = []
        for head in range(shape.heads):
            shared = head // (shape.heads // shape.kv_heads)
            scores = query[:, head] @ key[:, shared].T / np.float32(np.sqrt(shape.head_size))
            future = np.arange(first + count)[None, :] > np.arange(first, first + count)[:, None]
            scores = np.where(future, np.float32(-np.inf), scores)
            scores = np.exp(scores - scores.max(axis=1, keepdims=True))
            answers.append(scores / scores.sum(axis=1, keepdims=True) @ value[:, shared])
        answer: Floats = np.concatenate(answers, axis=1) @ self._tensors[layer + "self_attn.o_proj.weight"].T
        return answer

    def _rotate(self, heads: Floats, first: int) -> Floats:
        half = self._shape.head_size // 2
        frequencies = self._shape.rope_base ** (-np.arange(half) / half)
        if self._shape.rope_divisors:
            frequencies = np.array([f / by for f, by in zip(frequencies, self._shape.rope_divisors, strict=True)])
        angles = (np.arange(first, first + len(heads))[:, None] * frequencies)[:, None, :]
        low, high = heads[..., :half], heads[..., half:]
        turned = np.concatenate(
            [low * np.cos(angles) - high * np.sin(angles), high * np.cos(angles) + low * np.sin(angles)], axis=-1
        )
        return turned.astype(np.float32)

    def _feed_forward(self, index: int, hidden: Floats) -> Floats:
        layer = f"model.layers.{index}."
        normal = self._norm(hidden, layer + "post_attention_layernorm.weight")
        gate = normal @ self._tensors[layer + "mlp.gate_proj.weight"].T
        up = normal @ self._tensors[layer + "mlp.up_proj.weight"].T
        answer: Floats = (gate / (1 + np.exp(-gate)) * up) @ self._tensors[layer + "mlp.down_proj.weight"].T
        return answer

    def _norm(self, hidden: Floats, name: str) -> Floats:
        square = np.mean(hidden * hidden, axis=-1, keepdims=True)
        answer: Floats = hidden / np.sqrt(square + np.float32(self._shape.epsilon)) * self._tensors[name]
        return answer
