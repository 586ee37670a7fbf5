"""A random model of two layers: the same code as a real one, at a thousandth of its cost."""

import numpy as np

from kvherd.runtime.architecture import LlamaShape
from kvherd.runtime.gguf_weights import fuse
from kvherd.runtime.weights import Floats, Weights

# 256 bytes, then <|endoftext|> <|im_start|> <|im_end|>: what the tiny tokenizer has.
TINY = LlamaShape(
    vocab_size=259,
    hidden_size=64,
    feed_forward_size=128,
    layers=2,
    heads=4,
    kv_heads=2,
    head_size=16,
    context_tokens=2048,
    eos_token_ids=(258, 256),
)


def random_weights(shape: LlamaShape, *, seed: int = 0) -> Weights:
    """Weights that depend on the seed and the shape alone, with logits spread as a trained model's are."""
    dice = np.random.default_rng(seed)

    def matrix(outputs: int, inputs: int, gain: float = 1.0) -> Floats:
        values: Floats = dice.standard_normal((outputs, inputs), dtype=np.float32)
        return values * np.float32(gain / np.sqrt(inputs))

    attention = shape.heads * shape.head_size
    embedding = matrix(shape.vocab_size, shape.hidden_size, np.sqrt(shape.hidden_size))
    return Weights(
        embedding=embedding,
        head=np.ascontiguousarray(matrix(shape.vocab_size, shape.hidden_size, 4.0).T),
        layers=tuple(
            fuse(
                matrix(attention + 2 * shape.kv_heads * shape.head_size, shape.hidden_size),
                matrix(shape.hidden_size, attention),
                matrix(2 * shape.feed_forward_size, shape.hidden_size),
                matrix(shape.hidden_size, shape.feed_forward_size),
            )
            for _ in range(shape.layers)
        ),
    )
