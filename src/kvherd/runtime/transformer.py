"""The forward pass: rows of tokens in, keys and values into the pool, logits out."""

import numpy as np
from numpy.typing import NDArray

from kvherd.runtime.architecture import LlamaShape
from kvherd.runtime.attention import attend, plan_attention
from kvherd.runtime.batch import ForwardBatch
from kvherd.runtime.kv_pool import KvPool
from kvherd.runtime.weights import Floats, LayerWeights, Weights


class Transformer:
    """A Llama over one pool. One `forward` at a time; it holds the interpreter only between array operations."""

    def __init__(self, shape: LlamaShape, weights: Weights, pool: KvPool) -> None:
        self.shape = shape
        self.pool = pool
        self._weights = weights
        self._turns = _turns(shape)

    def forward(self, batch: ForwardBatch) -> Floats:
        """Run the batch. Gives one row of logits for each sequence that wants them, in the batch's order.

        The rows are those of each sequence's last token. An empty batch gives no rows.
        """
        sequences = batch.sequences
        tokens = np.concatenate([np.asarray(s.token_ids, dtype=np.intp) for s in sequences] or [_NONE])
        if not len(tokens):
            return np.empty((0, self.shape.vocab_size), dtype=np.float32)
        positions = np.concatenate(
            [np.arange(s.first_position, s.first_position + len(s.token_ids)) for s in sequences]
        )
        written = np.concatenate(
            [self.pool.slots(s.block_table, s.first_position + len(s.token_ids))[s.first_position :] for s in sequences]
        )
        ends = np.cumsum([len(s.token_ids) for s in sequences]) - 1
        wanted = ends[[s.wants_logits for s in sequences]]
        parts = plan_attention(sequences, self.pool)
        turns = self._turns[positions][:, None, :]
        hidden = self._weights.embedding[tokens]
        last = len(self._weights.layers) - 1
        with np.errstate(over="ignore"):  # exp of a large negative gate is infinite and its silu 0, as it should be
            for index, layer in enumerate(self._weights.layers):
                mixed = np.empty((len(tokens), self.shape.heads * self.shape.head_size), dtype=np.float32)
                query = self._store(index, layer, hidden, turns, written)
                for part in parts:
                    attend(part, query, self.pool.keys[index], self.pool.values[index], mixed.reshape(query.shape))
                if index == last:  # nothing reads the other rows any more
                    hidden, mixed = hidden[wanted], mixed[wanted]
                hidden += mixed @ layer.attention_out
                hidden += self._feed_forward(layer, hidden)
        return self._normal(hidden) @ self._weights.head

    def _store(
        self, index: int, layer: LayerWeights, hidden: Floats, turns: NDArray[np.complex64], written: NDArray[np.intp]
    ) -> Floats:
        """Put the new keys and values of a layer into the pool; give the queries (rows, kv heads, group, size)."""
        shape = self.shape
        rows, size = len(hidden), shape.head_size
        rotated = shape.heads + shape.kv_heads
        qkv = self._normal(hidden) @ layer.qkv
        pairs = qkv.view(np.complex64).reshape(rows, -1, size // 2)[:, :rotated]
        pairs *= turns
        heads = qkv.reshape(rows, -1, size)
        self.pool.keys[index, written] = heads[:, shape.heads : rotated]
        self.pool.values[index, written] = heads[:, rotated:]
        return heads[:, : shape.heads].reshape(rows, shape.kv_heads, shape.group, size)

    def _feed_forward(self, layer: LayerWeights, hidden: Floats) -> Floats:
        both = self._normal(hidden) @ layer.gate_up
        gate, up = both[:, : self.shape.feed_forward_size], both[:, self.shape.feed_forward_size :]
        damp = np.exp(-gate)
        damp += 1
        up *= gate
        up /= damp
        added: Floats = up @ layer.down
        return added

    def _normal(self, hidden: Floats) -> Floats:
        """RMS norm without its scale, which the next matrix holds."""
        mean = np.einsum("ij,ij->i", hidden, hidden)[:, None] / np.float32(self.shape.hidden_size)
        scale: Floats = np.reciprocal(np.sqrt(mean + self.shape.rms_epsilon), dtype=np.float32)
        return hidden * scale


_NONE = np.empty(0, dtype=np.intp)


def _turns(shape: LlamaShape) -> NDArray[np.complex64]:
    """The rotation of every pair at every position, as complex numbers of length one."""
    frequencies = shape.rope_base ** (-np.arange(0, shape.head_size, 2) / shape.head_size)
    angles = np.arange(shape.context_tokens)[:, None] * frequencies
    turns: NDArray[np.complex64] = np.exp(1j * angles).astype(np.complex64)
    return turns
