"""What a late subscriber is told: the batches it missed, all that is held, or that its cursor cannot be honoured.

One `RankHistory` is one rank in one epoch. It numbers batches itself, densely, from a base that the dice choose: a
random multiple of 2**32 below 2**62. Engines count every life from 0, so a cursor of another life would look plausible
to them; here it falls outside, for clients that know of no epochs too. A cursor names the last batch admitted.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from kvherd.core.ids import Rank
from kvherd.core.kv.events import CacheCleared, KvEvent, KvEventBatch, SnapshotChunk
from kvherd.core.kv.live_state import LiveState
from kvherd.core.kv.pieces import BLOCK_OVERHEAD_TOKENS, PIECE_TOKENS, pieces, weight
from kvherd.core.kv.retelling import Retelling

HISTORY_TOKENS: Final = 4_194_304
"""Default bound of the batches kept, by `pieces.weight`: about 175,000 blocks of 16 tokens."""

_STEP: Final = 2**32
_BASES: Final = 2**30


def roll_base(dice: Callable[[int], int]) -> int:
    """A first number for an epoch; `dice(n)` gives a random number in 0..n-1."""
    return (1 + dice(_BASES - 1)) * _STEP


@dataclass(frozen=True, slots=True)
class Resumed:
    """Everything after the cursor is here: `RankHistory.after` gives it."""


@dataclass(frozen=True, slots=True)
class TooOld:
    """Batches after the cursor are no longer kept, or it does not name a place to go on from."""


@dataclass(frozen=True, slots=True)
class Future:
    """No such batch was sent in this epoch: the cursor is of another life."""


Resume = Resumed | TooOld | Future


@dataclass(slots=True)
class RankHistory:
    """A bounded run of the latest batches, and the state after them.

    `unknown_before` batches of the publisher's life were never seen, so it may hold blocks nobody told of: an engine
    that is asked to tell of them announces others a second time, so copies are capped at one a tier. A clear ends it.
    """

    rank: Rank
    base: int
    limit_tokens: int = HISTORY_TOKENS
    unknown_before: int = 0
    state: LiveState = field(default_factory=LiveState)
    stamped_s: float = 0.0
    """When the publisher stamped the last batch that is part of `state`; 0 if there is none."""
    last: int = field(init=False)
    _ring: deque[KvEventBatch] = field(default_factory=deque)
    _weight: int = 0
    _floor: int = field(init=False)
    """The oldest number that may be resumed from."""

    def __post_init__(self) -> None:
        self.last = self._floor = self.base

    def append(self, timestamp_s: float, events: Iterable[KvEvent]) -> int:
        """Number the events and keep them, as one batch or several; returns how many. No events make an empty batch."""
        whole = tuple(events)
        room = _weight(whole)
        parts = [whole] if room <= PIECE_TOKENS else list(pieces(whole))
        self.stamped_s = timestamp_s
        self._weight += room if len(parts) == 1 else sum(map(_weight, parts))
        for part in parts:
            self.last += 1
            self._ring.append(KvEventBatch(self.last, timestamp_s, self.rank, part))
            self.state.apply(part, capped=self.unknown_before > 0)
            if self.unknown_before and CacheCleared() in part:
                self.unknown_before = 0
        while self._weight > self.limit_tokens and len(self._ring) > 1:
            self._weight -= _weight(self._ring.popleft().events)
        self._floor = max(self._floor, self._ring[0].sequence - 1)
        return len(parts)

    def resume(self, cursor: int) -> Resume:
        if cursor > self.last or cursor < self.base:
            return Future()
        return Resumed() if cursor >= self._floor else TooOld()

    def keeps_after(self, cursor: int) -> bool:
        """Whether every batch after `cursor` is still kept."""
        return cursor >= self.last or cursor + 1 >= self._ring[0].sequence

    def after(self, cursor: int) -> KvEventBatch | None:
        """The batch after `cursor`, or None if that is the latest. Raises `LookupError` if it is no longer kept."""
        if cursor >= self.last:
            return None
        offset = cursor + 1 - self._ring[0].sequence
        if offset < 0:
            raise LookupError(cursor)
        return self._ring[offset]

    def snapshot(self) -> Iterator[SnapshotChunk]:
        """All that is held now, as chunks whose numbers end at `last`: batches go on after them without a gap.

        A chunk is made when it is asked for, and what happens meanwhile changes none. A subscriber that is cut off
        between two chunks must not resume there, so from now on nobody can.
        """
        told = self.state.retell(PIECE_TOKENS - BLOCK_OVERHEAD_TOKENS)
        if told.count > 1:
            self._floor = self.last
        return _chunks(told, KvEventBatch(self.last, self.stamped_s, self.rank, ()), self.unknown_before)


def _chunks(told: Retelling, last: KvEventBatch, unknown_before: int) -> Iterator[SnapshotChunk]:
    count = told.count
    before: tuple[KvEvent, ...] = (CacheCleared(),)
    for index, part in enumerate(told):
        batch = replace(last, sequence=last.sequence - count + 1 + index, events=before + part)
        yield SnapshotChunk(index, count, unknown_before, batch)
        before = ()


def _weight(events: Iterable[KvEvent]) -> int:
    return 1 + sum(map(weight, events))
