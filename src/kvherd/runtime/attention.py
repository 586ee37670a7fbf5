"""Attention of a batch over the paged pool, one plan a step and one call a layer.

A plan is made once for a batch and serves every layer: which pool slots each group of sequences reads, and what it
must not see. Decode rows of similar context are gathered and multiplied together; a prompt chunk goes alone, in
pieces of its rows, so that scores never take more than `SCORES_BYTES`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvherd.runtime.batch import SequenceRows
from kvherd.runtime.kv_pool import KvPool
from kvherd.runtime.weights import Floats

SCORES_BYTES = 8 << 20
_WASTE = 1.5  # a group may gather this many times the slots it needs

Slots = NDArray[np.intp] | slice


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """One-row sequences: `rows` of the batch read `slots` (group, longest); `mask` is 0 or -inf, or None."""

    rows: NDArray[np.intp]
    slots: NDArray[np.intp]
    mask: Floats | None


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """Rows first..last of the batch, at `position` onwards, of one sequence that reads `slots`."""

    first: int
    last: int
    position: int
    slots: Slots


Part = DecodeGroup | ChunkRows


def plan_attention(sequences: Sequence[SequenceRows], pool: KvPool) -> list[Part]:
    """Say how the rows of a batch, in its order, attend."""
    parts: list[Part] = []
    single: list[tuple[int, NDArray[np.intp]]] = []
    row = 0
    for sequence in sequences:
        count = len(sequence.token_ids)
        slots = pool.slots(sequence.block_table, sequence.first_position + count)
        if count == 1:
            single.append((row, slots))
        else:
            parts.append(ChunkRows(row, row + count, sequence.first_position, _as_run(slots)))
        row += count
    if len(single) == 1:
        ((row, slots),) = single
        parts.append(ChunkRows(row, row + 1, len(slots) - 1, _as_run(slots)))
    else:
        parts.extend(_group(members) for members in _alike(single))
    return parts


def _as_run(slots: NDArray[np.intp]) -> Slots:
    """Neighbouring slots as a slice, which reads the pool in place."""
    first, last = int(slots[0]), int(slots[-1])
    if last - first == len(slots) - 1 and bool((np.diff(slots) == 1).all()):
        return slice(first, last + 1)
    return slots


def _alike(single: list[tuple[int, NDArray[np.intp]]]) -> Iterable[list[tuple[int, NDArray[np.intp]]]]:
    """Split one-row sequences so that none is padded far beyond its context."""
    group: list[tuple[int, NDArray[np.intp]]] = []
    needed = 0
    for member in sorted(single, key=lambda each: len(each[1])):
        context = len(member[1])
        if group and (len(group) + 1) * context > _WASTE * (needed + context):
            yield group
            group, needed = [], 0
        group.append(member)
        needed += context
    if group:
        yield group


def _group(members: list[tuple[int, NDArray[np.intp]]]) -> DecodeGroup:
    contexts = np.array([len(slots) for _, slots in members])
    longest = int(contexts.max())
    slots = np.stack([np.pad(slots, (0, longest - len(slots)), mode="edge") for _, slots in members])
    seen = np.arange(longest)[None, :] < contexts[:, None]
    mask = None if seen.all() else np.where(seen, 0, -np.inf).astype(np.float32)[:, None, None, :]
    return DecodeGroup(np.array([row for row, _ in members], dtype=np.intp), slots, mask)


def attend(part: Part, queries: Floats, keys: Floats, values: Floats, out: Floats) -> None:
    """Write the attention of one part's rows.

    `queries` and `out` are (rows, kv heads, group, head size), `keys` and `values` one layer of the pool.
    """
    match part:
        case DecodeGroup():
            _attend_group(part, queries, keys, values, out)
        case ChunkRows():
            _attend_chunk(part, queries, keys, values, out)


def _attend_group(part: DecodeGroup, queries: Floats, keys: Floats, values: Floats, out: Floats) -> None:
    gathered = keys[part.slots]  # (group, longest, kv heads, head size)
    scores = queries[part.rows] @ gathered.transpose(0, 2, 3, 1)
    if part.mask is not None:
        scores += part.mask
    _softmax(scores)
    out[part.rows] = scores @ values[part.slots].transpose(0, 2, 1, 3)


def _attend_chunk(part: ChunkRows, queries: Floats, keys: Floats, values: Floats, out: Floats) -> None:
    _, kv_heads, group, size = queries.shape
    key, value = keys[part.slots].transpose(1, 2, 0), values[part.slots].transpose(1, 0, 2)
    context = key.shape[-1]
    piece = max(16, SCORES_BYTES // (4 * kv_heads * group * context))
    for first in range(part.first, part.last, piece):
        last = min(first + piece, part.last)
        count = last - first
        seen = part.position + last - part.first  # the last row of the piece sees this many tokens
        asked = queries[first:last].transpose(1, 2, 0, 3).reshape(kv_heads, group * count, size)
        scores = asked @ key[:, :, :seen]
        if count > 1:
            future = np.triu(np.full((count, count), -np.inf, dtype=np.float32), k=1)
            scores.reshape(kv_heads, group, count, seen)[..., seen - count :] += future
        _softmax(scores)
        answer = scores @ value[:, :seen]
        out[first:last] = answer.reshape(kv_heads, group, count, size).transpose(2, 0, 1, 3)


def _softmax(scores: Floats) -> None:
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
