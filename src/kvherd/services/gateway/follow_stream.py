"""What one worker's stream of KV events does to the index: cursors, snapshots, and the barrier after a flush."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvherd.core.ids import Epoch, Rank, WorkerId
from kvherd.core.kv.cursor import Admitted, Missing, RankCursor, Repeated, Restarted
from kvherd.core.kv.events import CacheCleared, KvEvent, KvEventBatch, SnapshotChunk
from kvherd.core.kv.index import Holder, PrefixIndex
from kvherd.core.kv.stream import EpochEnded, StreamBroken


class Gap(StreamBroken):
    """Batches are missing from a stream that promised none would be: resume from the cursors."""


@dataclass(slots=True)
class Following:
    """One worker's part of the index, and the place in its stream that it stands for.

    Everything known is void after `forget`. `skew_s`: how much an engine host's clock may be ahead of ours.
    """

    worker: WorkerId
    index: PrefixIndex
    skew_s: float = 2.0
    epoch: Epoch | None = None
    told: int = 0
    """Batches admitted and snapshots completed: what a stream that makes progress adds to."""
    _cursors: dict[Rank, RankCursor] = field(default_factory=dict)
    _incomplete: set[Rank] = field(default_factory=set)
    """Ranks that may hold blocks nobody told of: the publisher did not see the whole of their life."""
    _chunks: dict[Rank, int] = field(default_factory=dict)
    """Ranks in the middle of a snapshot, and the part that is next."""
    _barrier_s: float | None = None
    """When the last flush was answered, by our clock: ranks that have not passed it since tell of what is gone."""
    _passed: set[Rank] = field(default_factory=set)
    _dropped: set[Rank] = field(default_factory=set)
    _cleared_s: dict[Rank, float] = field(default_factory=dict)

    @property
    def cursors(self) -> dict[Rank, int]:
        """The last batch admitted of every rank whose state is whole."""
        return {rank: one.last for rank, one in self._cursors.items() if one.last is not None}

    @property
    def whole(self) -> bool:
        """No snapshot is under way."""
        return not self._chunks

    @property
    def ranks(self) -> set[Rank]:
        return set(self._cursors) | set(self._chunks)

    @property
    def incomplete(self) -> bool:
        """Some rank may hold blocks that nobody told of."""
        return bool(self._incomplete)

    def forget(self) -> None:
        self.index.clear_worker(self.worker)
        self.epoch = None
        self._incomplete.clear()
        self._cursors.clear()
        self._chunks.clear()

    def accepted(self, epoch: Epoch | None) -> None:
        """A subscription from `cursors` was accepted by this life of the publisher."""
        self._abandon_snapshots()
        if epoch != self.epoch:
            self.forget()
        self.epoch = epoch

    def take(self, item: KvEventBatch | SnapshotChunk, *, now_s: float) -> None:
        """Apply what came. Raises `Gap` or `EpochEnded` if it does not fit what came before."""
        match item:
            case SnapshotChunk():
                self._take_chunk(item)
            case KvEventBatch():
                self._take_batch(item, now_s)

    def flushed(self, *, ordered_s: float, answered_s: float) -> None:
        """A flush ordered at `ordered_s` was obeyed: nothing that was stored before it is held any more.

        Ranks whose clear has come since are right already. The others are cleared now, and until their clear comes,
        or a batch stamped later than `answered_s` by the engine's clock, their events are old ones, and dropped.
        """
        early = {rank for rank, cleared_s in self._cleared_s.items() if cleared_s >= ordered_s}
        for rank in self.ranks - early:
            self._clear(rank)
        self._barrier_s, self._passed = answered_s, early
        self._dropped.clear()

    def _take_chunk(self, chunk: SnapshotChunk) -> None:
        rank = chunk.batch.rank
        if chunk.index == 0:
            self._cursors.pop(rank, None)
            (self._incomplete.add if chunk.unknown_before else self._incomplete.discard)(rank)
            self._clear(rank)
        elif self._chunks.get(rank) != chunk.index:
            raise EpochEnded(f"part {chunk.index} of a snapshot came out of turn")
        self._chunks[rank] = chunk.index + 1
        if self._behind_barrier(rank):
            self._dropped.add(rank)
        else:
            self.index.apply(Holder(self.worker, rank), chunk.batch)
            if chunk.unknown_before:  # after it: the clear that a snapshot begins with is not the engine's
                self.index.cap_copies(Holder(self.worker, rank))
        if chunk.index + 1 == chunk.count:
            del self._chunks[rank]
            self._cursors[rank] = RankCursor(chunk.batch.sequence)
            self.told += 1

    def _take_batch(self, batch: KvEventBatch, now_s: float) -> None:
        if batch.rank in self._chunks:
            raise EpochEnded("a snapshot was broken off by a batch")
        cursor = self._cursors.setdefault(batch.rank, RankCursor())
        match cursor.judge(batch.sequence, hash(batch)):
            case Admitted():
                self.told += 1
                self._apply(batch, now_s)
            case Repeated():
                pass
            case Missing(first, last):
                raise Gap(f"batches {first} to {last} of rank {batch.rank} did not come")
            case Restarted():
                raise EpochEnded(f"the sequence of rank {batch.rank} went back to {batch.sequence}")

    def _apply(self, batch: KvEventBatch, now_s: float) -> None:
        holder = Holder(self.worker, batch.rank)
        if any(isinstance(event, CacheCleared) for event in batch.events):
            self._cleared_s[batch.rank] = now_s
            self._incomplete.discard(batch.rank)
        if self._behind_barrier(batch.rank):
            self._pass_barrier(holder, batch)
        else:
            self.index.apply(holder, batch)

    def _pass_barrier(self, holder: Holder, batch: KvEventBatch) -> None:
        assert self._barrier_s is not None
        since = list(_since_clear(batch.events))
        if since:
            self._passed.add(holder.rank)
            self.index.apply_events(holder, since)
        elif batch.timestamp_s <= self._barrier_s + self.skew_s:
            self._dropped.add(holder.rank)
        else:
            self._passed.add(holder.rank)
            if holder.rank in self._dropped:
                raise EpochEnded("events around a flush were dropped, and what is held must be told again")
            self._incomplete.discard(holder.rank)  # obeyed, and nothing was stored between
            self._clear(holder.rank)
            self.index.apply(holder, batch)

    def _behind_barrier(self, rank: Rank) -> bool:
        return self._barrier_s is not None and rank not in self._passed

    def _clear(self, rank: Rank) -> None:
        holder = Holder(self.worker, rank)
        self.index.clear(holder)
        if rank in self._incomplete:
            self.index.cap_copies(holder)

    def _abandon_snapshots(self) -> None:
        """A snapshot that was broken off is worth nothing: that rank is told from zero."""
        for rank in self._chunks:
            self.index.clear(Holder(self.worker, rank))
        self._chunks.clear()


def _since_clear(events: tuple[KvEvent, ...]) -> Iterator[KvEvent]:
    """The last clear of a batch and what follows it; nothing if there is none."""
    last = max((number for number, event in enumerate(events) if isinstance(event, CacheCleared)), default=None)
    if last is not None:
        yield from events[last:]
