"""Subscribers over a real wire that stop reading: cut off after a while, told why, and no burden to the others."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from smg_grpc_proto.generated import common_pb2

from kvherd.core.ids import EngineHash, Epoch, Rank
from kvherd.core.kv.events import BlocksStored, KvEventBatch
from kvherd.core.kv.stream import StreamBroken
from kvherd.services.kv_relay.event_streams import EventStreams
from kvherd.services.kv_relay.grpc_edge import Context, rpc
from kvherd.testing.patience import until

BLOCKS = tuple(EngineHash(number) for number in range(1000))
LARGE = BlocksStored(BLOCKS, None, tuple(range(16 * len(BLOCKS))), 16)


class Flood:
    """A `KvStream` that has one more batch whenever somebody asks, `limit` of them; then it waits."""

    epoch = Epoch("a" * 32)

    def __init__(self, limit: int) -> None:
        self.sent = 0
        self._limit = limit

    def subscribe(
        self, *, start_sequence_number: int = 0, cursors: Mapping[Rank, int] | None = None, epoch: Epoch | None = None
    ) -> "Flood":
        if start_sequence_number:
            raise StreamBroken("in doubt")
        return self

    async def __aiter__(self) -> AsyncIterator[KvEventBatch]:
        for number in range(1, self._limit + 1):
            self.sent += 1
            yield KvEventBatch(number, 0.0, Rank(0), (LARGE,))
        await asyncio.Event().wait()


class Door(grpc.GenericRpcHandler):  # type: ignore[misc] # grpc has no types
    def __init__(self, streams: EventStreams) -> None:
        self._streams = streams

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.unary_stream_rpc_method_handler(
            self._serve,
            request_deserializer=common_pb2.SubscribeKvEventsRequest.FromString,
            response_serializer=common_pb2.KvEventBatch.SerializeToString,
        )

    @rpc
    async def _serve(self, request: common_pb2.SubscribeKvEventsRequest, context: Context) -> None:
        await self._streams.serve(request.start_sequence_number, context)


@asynccontextmanager
async def served(streams: EventStreams) -> AsyncIterator[grpc.aio.UnaryStreamMultiCallable]:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Door(streams),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel.unary_stream(
                "/x/SubscribeKvEvents",
                request_serializer=common_pb2.SubscribeKvEventsRequest.SerializeToString,
                response_deserializer=common_pb2.KvEventBatch.FromString,
            )
    finally:
        streams.close()
        await server.stop(5)


async def drained(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


@pytest.mark.net
async def test_a_subscriber_that_takes_nothing_is_cut_off_with_its_status_behind_what_it_was_sent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    streams = EventStreams(Flood(1_000_000), stall_s=0.3)
    async with served(streams) as subscribe:
        call = subscribe(common_pb2.SubscribeKvEventsRequest())
        await call.read()
        await until(lambda: streams.counts["cut_off"] == 1, within_s=40)
        await until(lambda: len(streams) == 0, within_s=40)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await drained(call)
        assert ended.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert ended.value.details() == "cut off: no message was taken for 0.3 s; subscribe from zero"
    (said,) = [record.message for record in caplog.records if record.name.startswith(("kvherd", "grpc"))]
    assert said.startswith("the subscriber at ipv4:127.0.0.1:")
    assert "is cut off: no message was taken" in said


class TakingContext:
    """The side of a call that takes every message at once."""

    def __init__(self) -> None:
        self.taken = 0

    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def send_initial_metadata(self, _metadata: object) -> None: ...

    async def write(self, _message: object) -> None:
        self.taken += 1


async def test_a_quiet_stream_is_no_stall() -> None:
    streams, context = EventStreams(Flood(3), stall_s=1.0), TakingContext()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(3600):
            await streams.serve(0, context)
    assert context.taken == 3
    assert streams.counts == {"accepted": 1}


class SlowContext(TakingContext):
    """Headers take a while to be sent, and until then gRPC refuses to send a status."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[object] = []

    async def send_initial_metadata(self, _metadata: object) -> None:
        await asyncio.sleep(0.5)
        self.sent.append("headers")

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        self.sent.append((code, details))
        raise grpc.aio.AbortError


async def test_a_call_that_is_ended_while_its_headers_are_being_sent_gets_them_and_then_its_status() -> None:
    streams, context = EventStreams(Flood(0), server="the bridge"), SlowContext()
    serving = asyncio.ensure_future(streams.serve(0, context))
    await asyncio.sleep(0.1)
    streams.close()
    with pytest.raises(grpc.aio.AbortError):
        await serving
    assert context.sent == ["headers", (grpc.StatusCode.UNAVAILABLE, "the bridge is stopping")]


async def test_a_status_that_nobody_takes_is_not_waited_for_for_ever() -> None:
    class Stuck(SlowContext):
        async def abort(self, code: grpc.StatusCode, details: str) -> None:
            await asyncio.Event().wait()

    streams = EventStreams(Flood(0), server="the bridge")
    serving = asyncio.ensure_future(streams.serve(0, Stuck()))
    await asyncio.sleep(1)
    streams.close()
    await asyncio.wait((serving,), timeout=10)
    assert serving.cancelled()
    assert len(streams) == 0


@pytest.mark.net
async def test_a_server_that_stops_does_not_wait_for_a_subscriber_that_takes_nothing() -> None:
    flood = Flood(1_000_000)
    streams = EventStreams(flood, stall_s=3600)
    async with served(streams) as subscribe:
        call = subscribe(common_pb2.SubscribeKvEventsRequest())
        await call.read()
        seen = -1
        while seen != flood.sent:  # until a write hangs
            seen = flood.sent
            await asyncio.sleep(0.2)
        streams.close()
        await until(lambda: len(streams) == 0, within_s=40)


@pytest.mark.net
async def test_what_was_refused_is_counted() -> None:
    streams = EventStreams(Flood(1))
    async with served(streams) as subscribe:
        with pytest.raises(grpc.aio.AioRpcError):
            await subscribe(common_pb2.SubscribeKvEventsRequest(start_sequence_number=7)).read()
        assert streams.counts == {"refused": 1}
