"""What a servicer may rely on from whatever numbers an engine's KV events for it."""

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Protocol

from kvherd.core.ids import Epoch, Rank
from kvherd.core.kv.events import KvEventBatch, SnapshotChunk

Flushed = Callable[[float], None]
"""Told that the engine obeyed a flush, and when it was ordered by the event loop's clock; its caller is answered after.
"""


class KvSubscription(Protocol):
    """An accepted subscription; iterate it once. There is nothing to close: it is not remembered anywhere."""

    @property
    def epoch(self) -> Epoch: ...

    def __aiter__(self) -> AsyncIterator[KvEventBatch | SnapshotChunk]:
        """Batches of every rank, each rank's in order and without a gap, for as long as its engine lives.

        One that has everything waits. Raises a `StreamLost`; nothing of the epoch was left out before it.
        """
        ...


class KvStream(Protocol):
    """The KV events of one engine, all ranks, for any number of subscribers."""

    @property
    def epoch(self) -> Epoch: ...

    def subscribe(
        self,
        *,
        start_sequence_number: int = 0,
        cursors: Mapping[Rank, int] | None = None,
        epoch: Epoch | None = None,
    ) -> KvSubscription:
        """Accept a subscription, or raise a `StreamRefused`; returns at once.

        A cursor names the last batch that the subscriber admitted. A rank without one is told all that it holds first,
        as a snapshot. A bare `start_sequence_number` is the cursor of an engine's only rank; 0 is none.
        """
        ...


class KvEventDoor(Protocol):
    """Serves SubscribeKvEvents for one engine, whichever service of gRPC the call belongs to."""

    async def serve(self, start_sequence_number: int, context: object) -> None:
        """Stream to one subscriber, whose call has this `grpc.aio.ServicerContext`.

        Raises `StreamRefused` before the headers, `StreamLost` after them, `FieldInvalid` for metadata that is wrong.
        """
        ...

    def close(self) -> None:
        """End every stream with UNAVAILABLE."""
        ...
