"""The KV event streams that subscribers hold over gRPC, and their end."""

from kvherd.core.kv.stream import ResumeOutOfRange, StreamRefused
from kvherd.ports.kv_stream import KvStream
from kvherd.services.kv_relay.grpc_edge import Context, OpenCalls
from kvherd.wire.kv_pb import EPOCH_KEY, decode_subscribe, encode_item


class EventStreams:
    """Serves SubscribeKvEvents until `close`: implements `ports.kv_stream.KvEventDoor`.

    A refusal comes before any header, with the epoch in the trailers: a client that saw headers first would resume
    with the same cursor for ever. An accepted subscription gets its headers at once. `server` is what is stopping
    when streams end because of `close`.
    """

    def __init__(self, events: KvStream, *, server: str = "the engine") -> None:
        self._events = events
        self._open = OpenCalls(server)

    def __len__(self) -> int:
        return len(self._open)

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
        async with self._open.one(context):
            await context.send_initial_metadata(((EPOCH_KEY, str(subscription.epoch)),))
            async for item in subscription:
                await context.write(encode_item(item))

    def close(self) -> None:
        self._open.close()
