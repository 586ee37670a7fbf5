"""What a follower may rely on from a source of KV events, and who may ask for what."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from kvherd.core.ids import Epoch, Rank
from kvherd.core.kv.events import KvEventBatch, SnapshotChunk


@dataclass(frozen=True, slots=True)
class Subscribed:
    """The subscription is accepted: batches of this epoch follow. `epoch` None: a foreign stream without one."""

    epoch: Epoch | None


FeedItem = Subscribed | SnapshotChunk | KvEventBatch


class KvFeed(Protocol):
    """A source of one worker's KV events, all ranks."""

    def subscribe(self, cursors: dict[Rank, int], epoch: Epoch | None) -> AsyncGenerator[FeedItem, None]:
        """Yield `Subscribed` first, then batches, in order within a rank, after those cursors (empty: all there is).

        Raises a `StreamRefused` or `StreamLost` of `core/kv/stream.py` by who should do what; closing it
        unsubscribes.
        """
        ...
