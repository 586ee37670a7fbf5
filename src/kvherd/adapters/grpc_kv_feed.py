"""A worker's KV events over gRPC: from kvherd's engine and bridge, and from the field's own servicers.

The call is the same in SGLang's and vLLM's engine protocol; which one a server speaks is found by asking.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

import grpc
import grpc.aio
from smg_grpc_proto.generated import common_pb2 as pb

from kvherd.adapters.addresses import addresses_of
from kvherd.adapters.tls import ClientTls
from kvherd.core.ids import Epoch, Rank
from kvherd.core.kv.stream import BatchUntranslatable, EventsUnsupported, StreamBroken, StreamUntranslatable
from kvherd.ports.kv_feed import FeedItem, Subscribed
from kvherd.wire.kv_pb import KvPbDecoder, encode_subscribe, epoch_in
from kvherd.wire.kv_status import stream_error

METHODS: Final = (
    "/sglang.grpc.scheduler.SglangScheduler/SubscribeKvEvents",
    "/vllm.grpc.engine.VllmEngine/SubscribeKvEvents",
)
MAX_MESSAGE_BYTES: Final = 64 * 2**20
"""kvherd cuts its batches to half a megabyte; the field's servicers pass on whatever an engine publishes."""
_REFUSAL_S: Final = 0.05


class GrpcKvFeed:
    """Implements `KvFeed`. `target` is HOST:PORT, with `tls` over TLS; every subscription has a connection of its own.

    A server that tells no epoch in its headers is a foreign one: `Subscribed(None)`, and the sequence is all there is.
    """

    def __init__(
        self,
        target: str,
        *,
        metadata: Sequence[tuple[str, str]] = (),
        tls: ClientTls | None = None,
    ) -> None:
        self.target = target
        self._metadata = tuple(metadata)
        self._tls = tls
        self._methods: tuple[str, ...] = METHODS

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is held between subscriptions."""

    async def subscribe(self, cursors: dict[Rank, int], epoch: Epoch | None) -> AsyncGenerator[FeedItem, None]:
        await self._look_where()
        start, metadata = encode_subscribe(cursors, epoch)
        request = pb.SubscribeKvEventsRequest(start_sequence_number=start)
        async with self._channel() as channel:
            call, told = await self._call(channel, request, [*self._metadata, *metadata])
            try:
                yield Subscribed(told)
                decoder = KvPbDecoder()
                async for message in call:
                    item = decoder.decode(message)
                    if item is not None:
                        yield item
            except grpc.aio.AioRpcError as error:
                raise _meaning(error) from error
            except BatchUntranslatable as error:
                raise StreamUntranslatable(error.reason) from error
            finally:
                call.cancel()
        raise StreamBroken("the server ended the stream")

    async def _look_where(self) -> None:
        """grpc looks names up by itself: what it would reach is looked at first."""
        host, _, port = self.target.rpartition(":")
        try:
            await addresses_of(asyncio.get_running_loop(), host.strip("[]"), int(port))
        except OSError as error:
            raise StreamBroken(f"it cannot be reached: {error.strerror or error}") from None

    async def _call(
        self, channel: grpc.aio.Channel, request: pb.SubscribeKvEventsRequest, metadata: Iterable[tuple[str, str]]
    ) -> tuple[grpc.aio.UnaryStreamCall, Epoch | None]:
        """The accepted call, under the first name that the server knows, and the epoch it told."""
        for method in self._methods:
            stub = channel.unary_stream(
                method,
                request_serializer=pb.SubscribeKvEventsRequest.SerializeToString,
                response_deserializer=pb.KvEventBatch.FromString,
            )
            call = stub(request, metadata=tuple(metadata))
            try:
                told = await _accepted(call)
            except EventsUnsupported:
                continue
            self._methods = (method,)
            return call, told
        self._methods = METHODS
        raise EventsUnsupported

    def _channel(self) -> grpc.aio.Channel:
        options: list[tuple[str, str | int]] = [
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        if self._tls is not None:
            return self._tls.grpc_channel(self.target, options)
        return grpc.aio.insecure_channel(self.target, options=options)


async def _accepted(call: grpc.aio.UnaryStreamCall) -> Epoch | None:
    """Wait for the headers. Raises what a refusal means."""
    try:
        told = epoch_in(await call.initial_metadata())
        if told is None:
            # A refusal without headers looks like empty headers until its status is read, a moment later.
            with suppress(TimeoutError):
                async with asyncio.timeout(_REFUSAL_S):
                    await call.wait_for_connection()
                    await call.code()
        if call.done():
            raise await _refusal(call)
    except grpc.aio.AioRpcError as error:
        raise _meaning(error) from error
    except asyncio.CancelledError:
        call.cancel()
        raise
    return told


async def _refusal(call: grpc.aio.UnaryStreamCall) -> Exception:
    code, details = await call.code(), await call.details()
    return stream_error(code.name, details or "no reason given", epoch_in(await call.trailing_metadata()))


def _meaning(error: grpc.aio.AioRpcError) -> Exception:
    return stream_error(error.code().name, error.details() or "no reason given", epoch_in(error.trailing_metadata()))
