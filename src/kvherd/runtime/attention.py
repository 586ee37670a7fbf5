"""Attention of a batch over the paged pool: one plan a step, one call a layer.

A plan is made once for a batch and serves every layer: which blocks each group of sequences reads, and what it must
not see. One-row sequences of similar context are gathered and multiplied together; a prompt chunk goes alone, in
pieces of its rows, so that scores take no more than about `SCORES_BYTES` however long the context is.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from kvherd.runtime.batch import SequenceRows
from kvherd.runtime.kv_pool import Blocks, KvPool
from kvherd.runtime.scratch import Scratch
from kvherd.runtime.weights import Floats

SCORES_BYTES = 4 << 20
_PIECE_ROWS = 64  # a longer piece computes more scores that no row sees, a shorter one multiplies slower
_WASTE = 1.5  # a group may read this many times the blocks it needs
_MOST_BLOCKS = 2048  # a group reads at most so many, unless one sequence has more


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """One-row sequences: `rows` of the batch read `blocks` (group, most blocks); `unseen` is 0 or -inf."""

    rows: NDArray[np.intp]
    blocks: Blocks
    unseen: Floats


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """Rows first..last of the batch, at `position` onwards, of one sequence that reads `blocks`."""

    first: int
    last: int
    position: int
    blocks: Blocks


Part = DecodeGroup | ChunkRows
_Single = tuple[int, int, Blocks]  # row, context, blocks


def plan_attention(sequences: Sequence[SequenceRows], pool: KvPool) -> list[Part]:
    """Say how the rows of a batch, in its order, attend."""
    parts: list[Part] = []
    single: list[_Single] = []
    row = 0
    for sequence in sequences:
        count = len(sequence.token_ids)
        context = sequence.first_position + count
        blocks = pool.covering(sequence.block_table, context)
        if count == 1:
            single.append((row, context, blocks))
        elif count:
            parts.append(ChunkRows(row, row + count, sequence.first_position, blocks))
        row += count
    parts.extend(_group(members, pool.block_size) for members in _alike(single))
    return parts


def _alike(single: list[_Single]) -> Iterable[list[_Single]]:
    """Split one-row sequences so that none is padded far beyond its context."""
    group: list[_Single] = []
    needed = 0
    for member in sorted(single, key=lambda each: len(each[2])):
        most = len(member[2])
        padded = (len(group) + 1) * most
        if group and (padded > _WASTE * (needed + most) or padded > _MOST_BLOCKS):
            yield group
            group, needed = [], 0
        group.append(member)
        needed += most
    if group:
        yield group


def _group(members: list[_Single], block_size: int) -> DecodeGroup:
    most = len(members[-1][2])
    blocks = np.stack([np.pad(blocks, (0, most - len(blocks)), mode="edge") for _, _, blocks in members])
    contexts = np.array([context for _, context, _ in members])
    seen = np.arange(most * block_size) < contexts[:, None]
    unseen = np.where(seen, 0, -np.inf).astype(np.float32)[:, None, None, None, :]
    return DecodeGroup(np.array([row for row, _, _ in members], dtype=np.intp), blocks, unseen)


class Attention:
    """Attends with the buffers of one transformer."""

    def __init__(self, pool: KvPool, scratch: Scratch) -> None:
        self._pool = pool
        self._scratch = scratch

    def attend(self, part: Part, layer: int, queries: Floats, out: Floats) -> None:
        """Write the attention of one part's rows. `queries` and `out` are (rows, kv heads, group, head size)."""
        match part:
            case DecodeGroup():
                self._attend_group(part, layer, queries, out)
            case ChunkRows():
                self._attend_chunk(part, layer, queries, out)

    def _read(self, name: str, layer: Floats, blocks: Blocks) -> Floats:
        size = blocks.size * self._pool.block_size
        return self._pool.read(layer, blocks, self._scratch.take(name, size * layer.shape[1] * layer.shape[2]))

    def _attend_group(self, part: DecodeGroup, layer: int, queries: Floats, out: Floats) -> None:
        # One query head at a time, as a product of a vector and a matrix: three rows at a time took twice as long.
        asked = queries[part.rows][:, :, :, None, :]
        keys = self._read("gathered", self._pool.keys[layer], part.blocks).transpose(0, 2, 3, 1)[:, :, None]
        scores = self._scratch.take("scores", *asked.shape[:-1], keys.shape[-1])
        np.matmul(asked, keys, out=scores)
        scores += part.unseen
        total = _exponentials(scores)
        values = self._read("gathered", self._pool.values[layer], part.blocks).transpose(0, 2, 1, 3)[:, :, None]
        out[part.rows] = (np.matmul(scores, values) / total)[:, :, :, 0]

    def _attend_chunk(self, part: ChunkRows, layer: int, queries: Floats, out: Floats) -> None:
        heads_of_all = queries.shape[1] * queries.shape[2]
        context = part.position + part.last - part.first
        piece = min(_PIECE_ROWS, max(16, SCORES_BYTES // (4 * heads_of_all * context)))
        keys = self._read("keys", self._pool.keys[layer], part.blocks).transpose(1, 2, 0)
        values = self._read("values", self._pool.values[layer], part.blocks).transpose(1, 0, 2)
        for first in range(part.first, part.last, piece):
            last = min(first + piece, part.last)
            seen = part.position + last - part.first  # so many tokens the last row of the piece sees
            out[first:last] = self._piece(queries[first:last], keys[:, :, :seen], values[:, :seen])

    def _piece(self, queries: Floats, keys: Floats, values: Floats) -> Floats:
        """Attention of the latest rows of what `keys` (kv heads, head size, tokens) and `values` hold."""
        count, heads, group, size = queries.shape
        seen = keys.shape[2]
        asked = queries.transpose(1, 2, 0, 3).reshape(heads, group * count, size)
        scores = self._scratch.take("scores", heads, group * count, seen)
        np.matmul(asked, keys, out=scores)
        if count > 1:
            scores.reshape(heads, group, count, seen)[..., seen - count :] += _future(count)
        total = _exponentials(scores)
        answer: Floats = np.matmul(scores, values)
        answer /= total
        return answer.reshape(heads, group, count, size).transpose(2, 0, 1, 3)


@lru_cache(maxsize=128)
def _future(count: int) -> Floats:
    """What each of `count` new tokens must not see of the others. To be read only."""
    future: Floats = np.triu(np.full((count, count), -np.inf, dtype=np.float32), k=1)
    return future


def _exponentials(scores: Floats) -> Floats:
    """Turn scores into unnormalised weights in place; give each row's total."""
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    total: Floats = scores.sum(axis=-1, keepdims=True)
    return total
