"""The KV event streams that subscribers hold over gRPC, and their end."""

import asyncio
import logging
from collections import Counter

from kvherd.core.kv.events import KvEventBatch, SnapshotChunk
from kvherd.core.kv.stream import KvStreamError, ResumeOutOfRange, StreamRefused, SubscriberTooSlow
from kvherd.ports.kv_stream import KvStream
from kvherd.services.kv_relay.grpc_edge import Context, OpenCalls, send_headers
from kvherd.wire.kv_pb import EPOCH_KEY, decode_subscribe, encode_item

log = logging.getLogger(__name__)

STALL_S = 30.0


class EventStreams:
    """Serves SubscribeKvEvents until `close`: implements `ports.kv_stream.KvEventDoor`.

    A refusal comes before any header, with the epoch in the trailers: a client that saw headers first would resume
    with the same cursor for ever. An accepted subscription gets its headers at once. `server` is what is stopping
    when streams end because of `close`. A subscriber that takes no message for `stall_s` is cut off.

    `counts` has `accepted`, `refused` and `cut_off`, since the start.
    """

    def __init__(self, events: KvStream, *, server: str = "the engine", stall_s: float = STALL_S) -> None:
        self.counts: Counter[str] = Counter()
        self._events = events
        self._stall_s = stall_s
        self._open = OpenCalls(server)

    def __len__(self) -> int:
        return len(self._open)

    async def serve(self, start_sequence_number: int, context: Context) -> None:
        call = decode_subscribe(start_sequence_number, context.invocation_metadata() or ())
        try:
            subscription = self._events.subscribe(
                start_sequence_number=call.start_sequence_number, cursors=call.cursors, epoch=call.epoch
            )
        except KvStreamError as refusal:
            self.counts["refused"] += 1
            if isinstance(refusal, StreamRefused):
                epoch = refusal.epoch if isinstance(refusal, ResumeOutOfRange) else None
                context.set_trailing_metadata(((EPOCH_KEY, str(epoch or self._events.epoch)),))
            raise
        async with self._open.one(context):
            self.counts["accepted"] += 1
            await send_headers(context, ((EPOCH_KEY, str(subscription.epoch)),))
            try:
                async for item in subscription:
                    await self._send(item, context)
            except SubscriberTooSlow as error:
                self.counts["cut_off"] += 1
                log.warning("the subscriber at %s is %s", context.peer(), error)
                raise

    async def _send(self, item: KvEventBatch | SnapshotChunk, context: Context) -> None:
        """Raises `SubscriberTooSlow`: what is being written is no place in the history, which would bound it."""
        try:
            async with asyncio.timeout(self._stall_s):
                await context.write(encode_item(item))
        except TimeoutError:
            raise SubscriberTooSlow(f"no message was taken for {self._stall_s:g} s") from None

    def close(self) -> None:
        self._open.close()
