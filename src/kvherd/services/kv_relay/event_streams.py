"""The KV event streams that subscribers hold over gRPC, and their end."""

import asyncio
from typing import Any, TypeAlias

import grpc

from kvherd.core.kv.stream import ResumeOutOfRange, StreamRefused
from kvherd.ports.kv_stream import KvStream
from kvherd.wire.kv_pb import EPOCH_KEY, decode_subscribe, encode_item

Context: TypeAlias = Any
"""A `grpc.aio.ServicerContext`; grpc has no types."""


class EventStreams:
    """Serves SubscribeKvEvents until `close`: implements `ports.kv_stream.KvEventDoor`.

    A refusal comes before any header, with the epoch in the trailers: a client that saw headers first would resume
    with the same cursor for ever. An accepted subscription gets its headers at once. `server` is what is stopping
    when streams end because of `close`.
    """

    def __init__(self, events: KvStream, *, server: str = "the engine") -> None:
        self._events = events
        self._server = server
        self._readers: set[asyncio.Task[Any]] = set()
        self._closing = False

    def __len__(self) -> int:
        return len(self._readers)

    async def serve(self, start_sequence_number: int, context: Context) -> None:
        call = decode_subscribe(start_sequence_number, context.invocation_metadata() or ())
        try:
            subscription = self._events.subscribe(
                start_sequence_number=call.start_sequence_number, cursors=call.cursors, epoch=call.epoch
            )
        except StreamRefused as refusal:
            epoch = refusal.epoch if isinstance(refusal, ResumeOutOfRange) else None
            context.set_trailing_metadata(((EPOCH_KEY, str(epoch or self._events.epoch)),))
            raise
        reader = asyncio.current_task()
        assert reader is not None, "an RPC runs in a task"
        self._readers.add(reader)
        try:
            await context.send_initial_metadata(((EPOCH_KEY, str(subscription.epoch)),))
            async for item in subscription:
                await context.write(encode_item(item))
        except asyncio.CancelledError:
            if not self._closing:
                raise
            reader.uncancel()
            try:
                await context.abort(grpc.StatusCode.UNAVAILABLE, f"{self._server} is stopping")
            except grpc.aio.InternalError:  # the subscriber left at the same moment: there is nobody to tell
                raise asyncio.CancelledError from None
        finally:
            self._readers.discard(reader)

    def close(self) -> None:
        self._closing = True
        for reader in self._readers:
            reader.cancel()
