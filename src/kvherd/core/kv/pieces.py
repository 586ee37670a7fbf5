"""Batches cut to a size that any receiver takes: by default a gRPC client refuses messages over 4 MiB."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

from kvherd.core.kv.events import BlocksRemoved, BlocksStored, CacheCleared, KvEvent

PIECE_TOKENS: Final = 65_536
"""About 0.5 MiB on the wire with the largest token ids."""
BLOCK_OVERHEAD_TOKENS: Final = 8
"""A block's hash and fields take about as much room as this many tokens."""


def weight(event: KvEvent) -> int:
    """Roughly how much room an event takes, in tokens."""
    if isinstance(event, BlocksStored):
        return len(event.block_hashes) * (event.block_size + BLOCK_OVERHEAD_TOKENS)
    if isinstance(event, BlocksRemoved):
        return len(event.block_hashes) * BLOCK_OVERHEAD_TOKENS
    return BLOCK_OVERHEAD_TOKENS


def pieces(events: Iterable[KvEvent], limit: int = PIECE_TOKENS) -> Iterator[tuple[KvEvent, ...]]:
    """Group events, in order, into tuples of at most `limit`; an event larger than that is cut between its blocks.

    A single block is never cut. No events give no piece.
    """
    piece: list[KvEvent] = []
    room = limit
    for event in events:
        for part in _cut(event, limit):
            needs = weight(part)
            if piece and needs > room:
                yield tuple(piece)
                piece, room = [], limit
            piece.append(part)
            room -= needs
    if piece:
        yield tuple(piece)


def _cut(event: KvEvent, limit: int) -> Iterator[KvEvent]:
    if weight(event) <= limit:
        yield event
        return
    match event:
        case BlocksStored():
            at_once = max(1, limit // (event.block_size + BLOCK_OVERHEAD_TOKENS))
            for start in range(0, len(event.block_hashes), at_once):
                yield _part(event, start, start + at_once)
        case BlocksRemoved():
            at_once = max(1, limit // BLOCK_OVERHEAD_TOKENS)
            for start in range(0, len(event.block_hashes), at_once):
                yield replace(event, block_hashes=event.block_hashes[start : start + at_once])
        case CacheCleared():
            yield event


def _part(event: BlocksStored, start: int, end: int) -> BlocksStored:
    return replace(
        event,
        block_hashes=event.block_hashes[start:end],
        parent_hash=event.block_hashes[start - 1] if start else event.parent_hash,
        token_ids=event.token_ids[start * event.block_size : end * event.block_size],
        extra_keys=event.extra_keys[start:end] if event.extra_keys else (),
    )
