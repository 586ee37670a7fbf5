"""The forward pass: rows of tokens in, keys and values into the pool, logits out."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvherd.runtime.architecture import LlamaShape
from kvherd.runtime.attention import Attention, Part, plan_attention
from kvherd.runtime.batch import ForwardBatch, SequenceRows
from kvherd.runtime.blas_threads import BlasThreads
from kvherd.runtime.kv_pool import KvPool
from kvherd.runtime.row_shares import Relay, run_together, share_rows
from kvherd.runtime.scratch import Scratch
from kvherd.runtime.watch import UNWATCHED, Watch
from kvherd.runtime.weights import Floats, LayerWeights, Weights


@dataclass(frozen=True, slots=True)
class _Plan:
    """What every layer of a step shares: how each row turns, where it is written, and who attends to what."""

    turns: NDArray[np.complex64]
    written: NDArray[np.intp]
    parts: list[Part]
    relay: Relay | None


@dataclass(frozen=True, slots=True)
class _Lane:
    """What each share of a step needs for itself."""

    scratch: Scratch
    attention: Attention


class Transformer:
    """A Llama over one pool. One `forward` at a time; it holds the interpreter only between array operations."""

    def __init__(
        self, shape: LlamaShape, weights: Weights, pool: KvPool, *, threads: BlasThreads | None = None
    ) -> None:
        """With `threads`, steps of many rows share them by rows instead of in each product."""
        self.shape = shape
        self.pool = pool
        self._weights = weights
        self._turns = _turns(shape)
        self._threads = threads
        scratches = [Scratch() for _ in range(threads.count if threads else 1)]
        self._lanes = [_Lane(scratch, Attention(pool, scratch)) for scratch in scratches]

    def forward(self, batch: ForwardBatch, watch: Watch = UNWATCHED) -> Floats:
        """Run the batch. Gives one row of logits for each sequence that wants them, in the batch's order.

        The rows are those of each sequence's last token. An empty batch gives no rows. Raises `ValueError` for a token
        that is not in the vocabulary, before anything is written.
        """
        self._check(batch.sequences)
        shares = share_rows(batch.sequences, len(self._lanes), context_cost=_context_cost(self.shape))
        alone = len(shares) == 1
        hidden = self._run(self._lanes[0], shares[0], watch) if alone else self._run_shares(shares, watch)
        lap = watch.laps()
        logits: Floats = _normal(hidden, self.shape) @ self._weights.head
        lap("logits", None, logits.shape)
        return logits

    def _check(self, sequences: Sequence[SequenceRows]) -> None:
        size = self.shape.vocab_size
        for sequence in sequences:  # a negative one would read another's row without a word
            for token in sequence.token_ids:
                if not 0 <= token < size:
                    raise ValueError(f"token {token} is not in the vocabulary of {size}")

    def _run_shares(self, shares: list[list[SequenceRows]], watch: Watch) -> Floats:
        relays: list[Relay] = []
        for _ in shares:
            relays.append(Relay(self.shape.layers, relays[-1] if relays else None))

        def run(lane: _Lane, share: list[SequenceRows], relay: Relay) -> Floats:
            try:
                return self._run(lane, share, watch, relay)
            finally:
                relay.give_up()

        calls = [partial(run, *each) for each in zip(self._lanes, shares, relays, strict=False)]
        with self._threads.single() if self._threads else nullcontext():
            return np.concatenate(run_together(calls))

    def _run(self, lane: _Lane, sequences: Sequence[SequenceRows], watch: Watch, relay: Relay | None = None) -> Floats:
        """The last layer's rows that logits are made of."""
        lap = watch.laps()
        tokens = np.concatenate([np.asarray(s.token_ids, dtype=np.intp) for s in sequences] or [_NONE])
        if not len(tokens):
            return np.empty((0, self.shape.hidden_size), dtype=np.float32)
        plan = _Plan(
            turns=self._turns[np.concatenate([_positions(sequence) for sequence in sequences])][:, None, :],
            written=np.concatenate([self._slots(sequence) for sequence in sequences]),
            parts=plan_attention(sequences, self.pool),
            relay=relay,
        )
        ends = np.cumsum([len(sequence.token_ids) for sequence in sequences]) - 1
        wanted = ends[[sequence.wants_logits for sequence in sequences]]
        hidden: Floats = self._weights.embedding[tokens]
        lap("embedding", None, hidden.shape)
        last = len(self._weights.layers) - 1
        with np.errstate(over="ignore"):  # exp of a large negative gate is infinite and its silu 0, as it should be
            for index, layer in enumerate(self._weights.layers):
                mixed = self._attend(lane, index, layer, hidden, plan)
                if index == last:  # nothing reads the other rows any more
                    hidden, mixed = hidden[wanted], mixed[wanted]
                hidden += mixed @ layer.attention_out
                lap("attention", index, hidden.shape)
                self._feed_forward(lane, layer, hidden)
                lap("mlp", index, hidden.shape)
        return hidden

    def _slots(self, sequence: SequenceRows) -> NDArray[np.intp]:
        first, last = sequence.first_position, sequence.first_position + len(sequence.token_ids)
        return self.pool.slots(self.pool.covering(sequence.block_table, last), first, last)

    def _attend(self, lane: _Lane, index: int, layer: LayerWeights, hidden: Floats, plan: _Plan) -> Floats:
        """Put a layer's new keys and values into the pool, then attend; (rows, heads × head size)."""
        shape, rows, size = self.shape, len(hidden), self.shape.head_size
        rotated = shape.heads + shape.kv_heads
        qkv = lane.scratch.take("qkv", rows, layer.qkv.shape[1])
        np.matmul(_normal(hidden, self.shape), layer.qkv, out=qkv)
        pairs = qkv.view(np.complex64).reshape(rows, -1, size // 2)[:, :rotated]
        pairs *= plan.turns
        heads = qkv.reshape(rows, -1, size)
        self.pool.keys[index, plan.written] = heads[:, shape.heads : rotated]
        self.pool.values[index, plan.written] = heads[:, rotated:]
        if plan.relay is not None:
            plan.relay.wrote(index)
        queries = heads[:, : shape.heads].reshape(rows, shape.kv_heads, shape.group, size)
        mixed = lane.scratch.take("mixed", *queries.shape)
        for part in plan.parts:
            lane.attention.attend(part, index, queries, mixed)
        return mixed.reshape(rows, -1)

    def _feed_forward(self, lane: _Lane, layer: LayerWeights, hidden: Floats) -> None:
        """Add the layer's SwiGLU to `hidden`."""
        wide = self.shape.feed_forward_size
        both = lane.scratch.take("gate_up", len(hidden), 2 * wide)
        np.matmul(_normal(hidden, self.shape), layer.gate_up, out=both)
        gate, up = both[:, :wide], both[:, wide:]
        damp = lane.scratch.take("damp", len(hidden), wide)
        np.negative(gate, out=damp)
        np.exp(damp, out=damp)
        damp += 1
        np.divide(gate, damp, out=damp)
        damp *= up
        hidden += damp @ layer.down


def _normal(hidden: Floats, shape: LlamaShape) -> Floats:
    """RMS norm without its scale, which the next matrix holds."""
    square: Floats = np.einsum("ij,ij->i", hidden, hidden)
    length: Floats = np.sqrt(square / shape.hidden_size + shape.rms_epsilon).astype(np.float32)
    return hidden / length[:, None]


def _context_cost(shape: LlamaShape) -> float:
    """What one more token of context costs a row, beside all its products with weights."""
    attention = shape.heads * shape.head_size
    weights = shape.hidden_size * (2 * attention + 2 * shape.kv_heads * shape.head_size + 3 * shape.feed_forward_size)
    return 3 * attention / weights  # scores, exponentials, mixing


_NONE = np.empty(0, dtype=np.intp)


def _positions(sequence: SequenceRows) -> NDArray[np.intp]:
    return np.arange(sequence.first_position, sequence.first_position + len(sequence.token_ids))


def _turns(shape: LlamaShape) -> NDArray[np.complex64]:
    """The rotation of every pair at every position, as complex numbers of length one."""
    frequencies = shape.rope_base ** (-np.arange(0, shape.head_size, 2) / shape.head_size)
    if shape.rope_divisors:
        frequencies = frequencies / np.array(shape.rope_divisors)
    angles = np.arange(shape.context_tokens)[:, None] * frequencies
    turns: NDArray[np.complex64] = np.exp(1j * angles).astype(np.complex64)
    return turns
