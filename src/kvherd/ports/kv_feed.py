"""What a follower may rely on from a source of KV events, and who may ask for what."""

from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from kvherd.core.fleet.spec import GRPC
from kvherd.core.ids import Epoch, Rank
from kvherd.core.kv.events import KvEventBatch, SnapshotChunk


@dataclass(frozen=True, slots=True)
class EventSource:
    """Where a worker's KV events are: `grpc://HOST:PORT`, or an engine's own ZeroMQ sockets.

    Of the latter, `events` and `replay` are those of rank 0 (`tcp://HOST:PORT`, rank r is at PORT + r; `ipc://PATH` has
    room for one rank). `bind`: this side listens for the events, and the engine connects.
    """

    events: str
    replay: str | None = None
    ranks: int = 1
    bind: bool = False

    @property
    def direct(self) -> bool:
        return not self.events.startswith(GRPC)


@dataclass(frozen=True, slots=True)
class Subscribed:
    """The subscription is accepted: batches of this epoch follow. `epoch` None: a foreign stream without one."""

    epoch: Epoch | None


FeedItem = Subscribed | SnapshotChunk | KvEventBatch


class KvFeed(AbstractAsyncContextManager["KvFeed"], Protocol):
    """A source of one worker's KV events, all ranks. Subscribe inside its context only.

    Entering may raise `StartFailed`; it waits for no engine. A source that was left may be entered again.
    """

    def subscribe(self, cursors: dict[Rank, int], epoch: Epoch | None) -> AsyncGenerator[FeedItem, None]:
        """Yield `Subscribed` first, then batches, in order within a rank, after those cursors (empty: all there is).

        Raises a `StreamRefused` or `StreamLost` of `core/kv/stream.py` by who should do what; closing it
        unsubscribes.
        """
        ...
