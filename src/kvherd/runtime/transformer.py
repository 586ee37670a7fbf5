"""The forward pass: rows of tokens in, keys and values into the pool, logits out."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvherd.runtime.architecture import LlamaShape
from kvherd.runtime.attention import Attention, Part, plan_attention
from kvherd.runtime.batch import ForwardBatch, SequenceRows
from kvherd.runtime.kv_pool import KvPool
from kvherd.runtime.scratch import Scratch
from kvherd.runtime.weights import Floats, LayerWeights, Weights


@dataclass(frozen=True, slots=True)
class _Plan:
    """What every layer of a step shares: how each row turns, where it is written, and who attends to what."""

    turns: NDArray[np.complex64]
    written: NDArray[np.intp]
    parts: list[Part]


class Transformer:
    """A Llama over one pool. One `forward` at a time; it holds the interpreter only between array operations."""

    def __init__(self, shape: LlamaShape, weights: Weights, pool: KvPool) -> None:
        self.shape = shape
        self.pool = pool
        self._weights = weights
        self._turns = _turns(shape)
        self._scratch = Scratch()
        self._attention = Attention(pool, self._scratch)

    def forward(self, batch: ForwardBatch) -> Floats:
        """Run the batch. Gives one row of logits for each sequence that wants them, in the batch's order.

        The rows are those of each sequence's last token. An empty batch gives no rows.
        """
        sequences = batch.sequences
        tokens = np.concatenate([np.asarray(s.token_ids, dtype=np.intp) for s in sequences] or [_NONE])
        if not len(tokens):
            return np.empty((0, self.shape.vocab_size), dtype=np.float32)
        plan = _Plan(
            turns=self._turns[np.concatenate([_positions(sequence) for sequence in sequences])][:, None, :],
            written=np.concatenate([self._slots(sequence) for sequence in sequences]),
            parts=plan_attention(sequences, self.pool),
        )
        ends = np.cumsum([len(sequence.token_ids) for sequence in sequences]) - 1
        wanted = ends[[sequence.wants_logits for sequence in sequences]]
        hidden = self._weights.embedding[tokens]
        last = len(self._weights.layers) - 1
        with np.errstate(over="ignore"):  # exp of a large negative gate is infinite and its silu 0, as it should be
            for index, layer in enumerate(self._weights.layers):
                mixed = self._attend(index, layer, hidden, plan)
                if index == last:  # nothing reads the other rows any more
                    hidden, mixed = hidden[wanted], mixed[wanted]
                hidden += mixed @ layer.attention_out
                self._feed_forward(layer, hidden)
        logits: Floats = self._normal(hidden) @ self._weights.head
        return logits

    def _slots(self, sequence: SequenceRows) -> NDArray[np.intp]:
        first, last = sequence.first_position, sequence.first_position + len(sequence.token_ids)
        return self.pool.slots(self.pool.covering(sequence.block_table, last), first, last)

    def _attend(self, index: int, layer: LayerWeights, hidden: Floats, plan: _Plan) -> Floats:
        """Put a layer's new keys and values into the pool, then attend; (rows, heads × head size)."""
        shape, rows, size = self.shape, len(hidden), self.shape.head_size
        rotated = shape.heads + shape.kv_heads
        qkv = self._scratch.take("qkv", rows, layer.qkv.shape[1])
        np.matmul(self._normal(hidden), layer.qkv, out=qkv)
        pairs = qkv.view(np.complex64).reshape(rows, -1, size // 2)[:, :rotated]
        pairs *= plan.turns
        heads = qkv.reshape(rows, -1, size)
        self.pool.keys[index, plan.written] = heads[:, shape.heads : rotated]
        self.pool.values[index, plan.written] = heads[:, rotated:]
        queries = heads[:, : shape.heads].reshape(rows, shape.kv_heads, shape.group, size)
        mixed = self._scratch.take("mixed", *queries.shape)
        for part in plan.parts:
            self._attention.attend(part, index, queries, mixed)
        return mixed.reshape(rows, -1)

    def _feed_forward(self, layer: LayerWeights, hidden: Floats) -> None:
        """Add the layer's SwiGLU to `hidden`."""
        wide = self.shape.feed_forward_size
        both = self._scratch.take("gate_up", len(hidden), 2 * wide)
        np.matmul(self._normal(hidden), layer.gate_up, out=both)
        gate, up = both[:, :wide], both[:, wide:]
        damp = self._scratch.take("damp", len(hidden), wide)
        np.negative(gate, out=damp)
        np.exp(damp, out=damp)
        damp += 1
        np.divide(gate, damp, out=damp)
        damp *= up
        hidden += damp @ layer.down

    def _normal(self, hidden: Floats) -> Floats:
        """RMS norm without its scale, which the next matrix holds."""
        square: Floats = np.einsum("ij,ij->i", hidden, hidden)
        length: Floats = np.sqrt(square / self.shape.hidden_size + self.shape.rms_epsilon).astype(np.float32)
        return hidden / length[:, None]


_NONE = np.empty(0, dtype=np.intp)


def _positions(sequence: SequenceRows) -> NDArray[np.intp]:
    return np.arange(sequence.first_position, sequence.first_position + len(sequence.token_ids))


def _turns(shape: LlamaShape) -> NDArray[np.complex64]:
    """The rotation of every pair at every position, as complex numbers of length one."""
    frequencies = shape.rope_base ** (-np.arange(0, shape.head_size, 2) / shape.head_size)
    angles = np.arange(shape.context_tokens)[:, None] * frequencies
    turns: NDArray[np.complex64] = np.exp(1j * angles).astype(np.complex64)
    return turns
