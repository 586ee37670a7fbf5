"""One epoch of a relayed stream, and the subscribers that read it."""

import asyncio
import copy
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field

from kvherd.core.ids import Epoch, Rank
from kvherd.core.kv.events import KvEventBatch, SnapshotChunk
from kvherd.core.kv.history import Future, RankHistory, Resumed, TooOld
from kvherd.core.kv.stream import ResumeOutOfRange, StreamLost, SubscriberTooSlow


@dataclass(slots=True)
class Life:
    """The histories of all ranks under one epoch. Once `end` is set, nothing more is appended."""

    epoch: Epoch
    histories: dict[Rank, RankHistory]
    end: StreamLost | None = None
    told: bool = False
    """Whether anyone was told what is held."""
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self) -> None:
        """Wake every subscriber that waits."""
        self._news.set()
        self._news = asyncio.Event()

    def finish(self, end: StreamLost) -> None:
        self.end = end
        self.tell()

    async def news(self) -> None:
        """Wait for the next `tell`. Look for what is new between calling this and awaiting it, or miss it."""
        await self._news.wait()

    def begin(
        self, start: int, cursors: Mapping[Rank, int], epoch: Epoch | None, *, proved: Callable[[], bool]
    ) -> "Subscription":
        """Accept a subscriber, or raise `ResumeOutOfRange`. It is told nothing until `proved`; `tell` when it is."""
        if epoch is not None and epoch != self.epoch and (cursors or start):
            raise ResumeOutOfRange(f"epoch {epoch} is over", self.epoch)
        places = self._places(start, cursors)
        for rank, cursor in places.items():
            match self.histories[rank].resume(cursor):
                case Resumed():
                    pass
                case TooOld():
                    raise ResumeOutOfRange(f"batches of rank {rank} after {cursor} are no longer kept", self.epoch)
                case Future():
                    raise ResumeOutOfRange(f"rank {rank} sent no batch {cursor} in this epoch", self.epoch)
        return Subscription(self, places, proved)

    def _places(self, start: int, cursors: Mapping[Rank, int]) -> dict[Rank, int]:
        unknown = sorted(set(cursors) - set(self.histories))
        if unknown:
            raise ResumeOutOfRange(f"there is no rank {unknown[0]} here", self.epoch)
        if cursors or not start:
            return dict(cursors)
        if len(self.histories) > 1:
            raise ResumeOutOfRange(
                "one number cannot name a place in several ranks; send one cursor a rank", self.epoch
            )
        return dict.fromkeys(self.histories, start)


class Subscription:
    """A place in each rank of a life, and nothing else: however slow its reader, it costs no memory.

    A reader that falls behind what the histories keep is cut off with `SubscriberTooSlow`.
    """

    def __init__(self, life: Life, places: dict[Rank, int], proved: Callable[[], bool]) -> None:
        self._life = life
        self._places = places
        self._proved = proved

    @property
    def epoch(self) -> Epoch:
        return self._life.epoch

    async def __aiter__(self) -> AsyncIterator[KvEventBatch | SnapshotChunk]:
        while not self._proved():
            self._check()
            await self._life.news()
        self._life.told = True
        snapshots = self._snapshots()
        while snapshots:
            for chunk in snapshots[0]:
                self._check()
                yield chunk
                await asyncio.sleep(0)  # a chunk takes some milliseconds to make, and there may be hundreds
            del snapshots[0]
        while True:
            self._check()
            batch = self._next()
            if batch is None:
                await self._life.news()
            else:
                yield batch

    def _snapshots(self) -> list[Iterator[SnapshotChunk]]:
        """Of the ranks that have no place yet, all of this moment: batches go on after them."""
        told = []
        for rank, history in self._life.histories.items():
            if rank not in self._places:
                told.append(history.snapshot())
                self._places[rank] = history.last
        return told

    def _check(self) -> None:
        """A life that is over ends every stream at once: what was not sent yet is void too."""
        if self._life.end is not None:
            raise copy.copy(self._life.end)
        for rank, place in self._places.items():
            history = self._life.histories[rank]
            if not history.keeps_after(place):
                reason = f"events worth more than {history.limit_tokens} tokens waited to be read, the limit here"
                raise SubscriberTooSlow(reason)

    def _next(self) -> KvEventBatch | None:
        for rank, history in self._life.histories.items():
            batch = history.after(self._places[rank])
            if batch is not None:
                self._places[rank] = batch.sequence
                return batch
        return None
