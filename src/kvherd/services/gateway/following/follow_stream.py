"""What one worker's stream of KV events does to the index: cursors, snapshots, and the barrier after a flush."""

from dataclasses import dataclass, field
from typing import assert_never

from kvherd.core.ids import Epoch, Rank, WorkerId
from kvherd.core.kv.barrier import Current, FlushBarrier, Outdated, Unsure
from kvherd.core.kv.cursor import Admitted, Missing, RankCursor, Repeated, Restarted
from kvherd.core.kv.events import BlocksStored, CacheCleared, KvEventBatch, SnapshotChunk
from kvherd.core.kv.index import Holder, PrefixIndex
from kvherd.core.kv.stream import EpochEnded, StreamBroken


class Gap(StreamBroken):
    """Batches are missing from a stream that promised none would be: resume from the cursors."""


@dataclass(slots=True)
class Following:
    """One worker's part of the index, and the place in its stream that it stands for.

    Everything known is void after `forget`.
    """

    worker: WorkerId
    index: PrefixIndex
    barrier: FlushBarrier = field(default_factory=FlushBarrier)
    epoch: Epoch | None = None
    told: int = 0
    """Batches admitted and snapshots completed: what a stream that makes progress adds to."""
    _cursors: dict[Rank, RankCursor] = field(default_factory=dict)
    _incomplete: set[Rank] = field(default_factory=set)
    """Ranks that may hold blocks nobody told of: the publisher did not see the whole of their life."""
    _chunks: dict[Rank, int] = field(default_factory=dict)
    """Ranks in the middle of a snapshot, and the part that is next."""

    @property
    def cursors(self) -> dict[Rank, int]:
        """The last batch admitted of every rank whose state is whole."""
        return {rank: one.last for rank, one in self._cursors.items() if one.last is not None}

    @property
    def whole(self) -> bool:
        """No snapshot is under way, or still to come: only a foreign stream begins without one."""
        return not self._chunks and (self.epoch is None or bool(self._cursors))

    @property
    def ranks(self) -> set[Rank]:
        return set(self._cursors) | set(self._chunks)

    @property
    def incomplete(self) -> bool:
        """Some rank may hold blocks that nobody told of, or that were told behind a barrier and not believed."""
        return bool(self._incomplete) or self.barrier.owes

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

        Ranks whose clear has come since are right already. The others are cleared now, and their events are dropped
        for as long as they may be old ones.
        """
        for rank in self.barrier.flushed(self.ranks, ordered_s=ordered_s, answered_s=answered_s):
            self._clear(rank)

    def doubted(self, *, ordered_s: float, given_up_s: float) -> None:
        """A flush ordered at `ordered_s` was sent, and may be obeyed unheard: as `flushed`, until it turns out."""
        for rank in self.barrier.doubted(self.ranks, ordered_s=ordered_s, given_up_s=given_up_s):
            self._clear(rank)

    def _take_chunk(self, chunk: SnapshotChunk) -> None:
        rank = chunk.batch.rank
        if chunk.index == 0:
            self._cursors.pop(rank, None)
            (self._incomplete.add if chunk.unknown_before else self._incomplete.discard)(rank)
            self._clear(rank)
        elif self._chunks.get(rank) != chunk.index:
            raise EpochEnded(f"part {chunk.index} of a snapshot came out of turn")
        self._chunks[rank] = chunk.index + 1
        if not self._believed(chunk):
            if chunk.unknown_before or any(isinstance(event, BlocksStored) for event in chunk.batch.events):
                self.barrier.drop(rank)
        else:
            self.index.apply(Holder(self.worker, rank), chunk.batch)
            if chunk.unknown_before:  # after it: the clear that a snapshot begins with is not the engine's
                self.index.cap_copies(Holder(self.worker, rank))
        if chunk.index + 1 == chunk.count:
            del self._chunks[rank]
            self._cursors[rank] = RankCursor(chunk.batch.sequence)
            self.told += 1

    def _believed(self, chunk: SnapshotChunk) -> bool:
        """Whether it is of after the last flush. A foreign one may be stamped with the time of its making."""
        stamped_s = 0.0 if self.epoch is None else chunk.batch.timestamp_s
        return self.barrier.judge_snapshot(chunk.batch.rank, stamped_s)

    def _take_batch(self, batch: KvEventBatch, now_s: float) -> None:
        if batch.rank in self._chunks:
            raise EpochEnded("a snapshot was broken off by a batch")
        cursor = self._cursors.get(batch.rank) or self._cursors.setdefault(batch.rank, RankCursor())
        match cursor.judge(batch.sequence, _mark(batch)):
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
        if self._incomplete and CacheCleared() in batch.events:
            self._incomplete.discard(batch.rank)
        match self.barrier.judge(batch, now_s=now_s):
            case Current(events, anew):
                if anew:
                    self._incomplete.discard(batch.rank)  # obeyed, and nothing was stored between
                    self._clear(batch.rank)
                self.index.apply_events(holder, events)
            case Outdated():
                pass
            case Unsure():
                raise EpochEnded("events around a flush were dropped, and what is held must be told again")
            case verdict:
                assert_never(verdict)

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


def _mark(batch: KvEventBatch) -> int:
    """Tells batches of one number apart. Tokens are left out: the engine's hashes stand for them."""
    told = [None if isinstance(event, CacheCleared) else event.block_hashes for event in batch.events]
    return hash((batch.timestamp_s, *told))
