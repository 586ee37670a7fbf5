"""A bridge before an engine on gRPC: whatever the call is, both ends see each other and not the bridge."""

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import pytest
from smg_grpc_proto.generated import common_pb2, sglang_scheduler_pb2_grpc, vllm_engine_pb2_grpc

from kvherd.adapters.grpc_channel import connect, open_channel
from kvherd.adapters.grpc_worker import GrpcWorker
from kvherd.adapters.zmq_kv_feed import ZmqFrameFeed
from kvherd.core.errors import WorkerUnreachable
from kvherd.core.ids import EngineHash, Rank, WorkerId
from kvherd.core.kv.events import BlocksStored
from kvherd.ports.kv_stream import Flushed
from kvherd.ports.worker import WorkerFacts
from kvherd.services.bridge.bridge import Bridge, BridgeConfig
from kvherd.services.bridge.proxy import ProxyFront
from kvherd.services.kv_relay.event_streams import EventStreams
from kvherd.services.kv_relay.relay import KvRelay
from kvherd.testing.grpc_engine import FakeGrpcEngine
from kvherd.testing.patience import until
from kvherd.testing.processes import free_ports
from kvherd.testing.publisher import FakePublisher

pytestmark = pytest.mark.net
LIMITS = [("grpc.max_receive_message_length", 80 << 20), ("grpc.max_send_message_length", 80 << 20)]
TRAILERS_ONLY = 0x1 | 0x4


@dataclass
class Stage:
    engine: FakeGrpcEngine
    bridge: Bridge
    channel: grpc.aio.Channel
    port: int

    @property
    def url(self) -> str:
        return f"grpc://127.0.0.1:{self.engine.port}"

    def call(self, name: str, *, timeout: float | None = None, metadata: Any = ()) -> Any:
        return self.channel.stream_stream(f"/any.Service/{name}")(timeout=timeout, metadata=metadata)

    def ask(self, name: str, request: bytes = b"", **more: Any) -> Any:
        return self.channel.unary_stream(f"/any.Service/{name}")(request, **more)


async def nothing_to_say() -> WorkerFacts:
    raise WorkerUnreachable(WorkerId("w"))


@asynccontextmanager
async def proxied(
    *,
    events: EventStreams | None = None,
    flushed: Flushed | None = None,
    drain_s: float = 5.0,
    api_key: str | None = None,
) -> AsyncIterator[Stage]:
    port = free_ports((0,))
    async with FakeGrpcEngine() as engine:
        name = WorkerId(f"grpc://127.0.0.1:{engine.port}")
        async with open_channel(name) as upstream:
            front = ProxyFront(name, upstream, events=events, flushed=flushed, server="the bridge", api_key=api_key)
            config = BridgeConfig(port=port, drain_s=drain_s)
            async with (
                grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=LIMITS) as channel,
                Bridge(config, front, identify=nothing_to_say) as bridge,
            ):
                yield Stage(engine, bridge, channel, port)


async def answers_of(call: Any) -> list[bytes]:
    async with asyncio.timeout(10):
        return [message async for message in call]


# --- what passes ---------------------------------------------------------------------------------------------


async def test_bytes_pass_both_ways_in_order_the_empty_and_the_large_too() -> None:
    async with proxied() as at:
        call = at.call("Echo")
        async with asyncio.timeout(10):
            for message in (b"", b"a", b"", bytes(40 << 20), b"z"):
                await call.write(message)
                assert await call.read() == message
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF
            assert await call.code() is grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("api_key", "told"),
    [("engine's", ["Bearer engine's"]), (None, ["Bearer client's"])],
)
async def test_the_engine_s_key_takes_the_place_of_the_client_s(api_key: str | None, told: list[str]) -> None:
    async with proxied(api_key=api_key) as at:
        metadata = (("authorization", "Bearer client's"), ("k", "a"))
        assert await answers_of(at.ask("Echo", b"x", metadata=metadata)) == [b"x"]
        ((_, seen, _),) = at.engine.seen
    assert [value for key, value in seen if key == "authorization"] == told
    assert ("k", "a") in seen


async def test_what_the_bridge_itself_asks_the_engine_has_the_key_too() -> None:
    async with FakeGrpcEngine() as engine:
        worker = GrpcWorker(WorkerId(f"grpc://127.0.0.1:{engine.port}"), api_key="engine's")
        try:
            await connect(worker._channel, worker.id)
            assert await worker._channel.unary_unary("/any.Service/Echo")(b"x", metadata=(("k", "a"),)) == b"x"
        finally:
            await worker.close()
        ((_, seen, _),) = engine.seen
    assert {("authorization", "Bearer engine's"), ("k", "a")} <= set(seen)


@pytest.mark.parametrize("request_bytes", [b"", b"one", bytes(3 << 20)], ids=["empty", "small", "large"])
async def test_one_request_gets_its_one_answer(request_bytes: bytes) -> None:
    async with proxied() as at:
        unary = at.channel.unary_unary("/any.Service/Echo")
        async with asyncio.timeout(10):
            assert await unary(request_bytes) == request_bytes


async def test_a_call_without_a_request_is_answered() -> None:
    async with proxied() as at:
        call = at.call("Echo")
        await call.done_writing()
        assert await answers_of(call) == []


async def test_a_message_over_64_mib_is_refused_either_way() -> None:
    async with proxied() as at:
        refused = at.ask("Echo", bytes((64 << 20) + 1))
        async with asyncio.timeout(10):
            assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

        async def large(context: Any) -> None:
            await context.write(bytes((64 << 20) + 1))

        at.engine.calls["Large"] = large
        async with asyncio.timeout(10):
            assert await at.ask("Large").code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await answers_of(at.ask("Echo", b"still there")) == [b"still there"]


async def test_metadata_passes_both_ways_and_what_is_the_hop_s_stays_there() -> None:
    async def tell(context: Any) -> None:
        await context.send_initial_metadata((("early", "1"), ("early", "2"), ("raw-bin", b"\x00\xff")))
        await context.write(b"x")
        context.set_trailing_metadata((("late", "3"), ("grpc-status-details-bin", b"\x08\x05")))

    async with proxied() as at:
        at.engine.calls["Tell"] = tell
        call = at.ask("Tell", metadata=(("k", "a"), ("k", "b"), ("k-bin", b"\x00\x01"), ("traceparent", "00-1")))
        assert await answers_of(call) == [b"x"]
        assert list(await call.initial_metadata()) == [("early", "1"), ("early", "2"), ("raw-bin", b"\x00\xff")]
        assert list(await call.trailing_metadata()) == [("late", "3"), ("grpc-status-details-bin", b"\x08\x05")]
        seen = sorted(pair for pair in at.engine.seen[0][1] if pair[0] != "user-agent")
        assert seen == [("k", "a"), ("k", "b"), ("k-bin", b"\x00\x01"), ("traceparent", "00-1")]
        assert len(at.engine.seen[0][1]) == len(seen) + 1, "one user agent: the bridge's own"


@pytest.mark.parametrize("code", [each for each in grpc.StatusCode if each is not grpc.StatusCode.OK])
async def test_a_status_passes_with_its_words_and_trailers(code: grpc.StatusCode) -> None:
    async def refuse(context: Any) -> None:
        await context.write(b"first")
        await context.abort(code, "the engine's own words, Größe 1", (("why", "because"),))

    async with proxied() as at:
        at.engine.calls["Refuse"] = refuse
        call = at.ask("Refuse")
        async with asyncio.timeout(5):
            assert await call.read() == b"first"
            assert await call.code() is code
        assert await call.details() == "the engine's own words, Größe 1"
        assert list(await call.trailing_metadata()) == [("why", "because")]


async def test_a_method_that_the_engine_lacks_is_its_unimplemented() -> None:
    async with proxied() as at:
        for _ in range(50):
            call = at.ask("Nobody", bytes(100_000))
            assert await call.code() is grpc.StatusCode.UNIMPLEMENTED
            assert await call.details() == "Method not found!"


async def test_headers_come_when_the_engine_sends_them_and_not_with_the_first_message() -> None:
    async with proxied() as at, asyncio.timeout(5):
        call = at.ask("Hold")
        assert list(await call.initial_metadata()) == [("held", "yes")]
        call.cancel()


async def test_headers_that_say_nothing_come_early_too() -> None:
    async def hold(context: Any) -> None:
        await context.send_initial_metadata(())
        await asyncio.Event().wait()

    async with proxied() as at, asyncio.timeout(5):
        at.engine.calls["Quiet"] = hold
        assert (await first_frame(at.port, "/any.Service/Quiet"))[1] & TRAILERS_ONLY == 0x4


async def test_a_refusal_without_headers_stays_one() -> None:
    """A stock SMG starts over on OUT_OF_RANGE without headers, and repeats its cursor for ever after them."""

    async def refuse(context: Any) -> None:
        await context.abort(grpc.StatusCode.OUT_OF_RANGE, "too old")

    async with proxied() as at, asyncio.timeout(10):
        at.engine.calls["Refuse"] = refuse
        for _ in range(20):
            frame_type, flags = await first_frame(at.port, "/any.Service/Refuse")
            assert (frame_type, flags & TRAILERS_ONLY) == (0x1, TRAILERS_ONLY)


async def first_frame(port: int, path: str) -> tuple[int, int]:
    """Type and flags of the first HTTP/2 frame that answers a call: what a client library does not show."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    headers = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x"}
    headers |= {"content-type": "application/grpc", "te": "trailers"}
    block = b"".join(
        b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in headers.items()
    )
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(0x4, 0, 0) + frame(0x1, 0x4, 1, block))
    writer.write(frame(0x0, 0x1, 1, bytes(5)))
    try:
        while True:
            size_and_type, flags, stream = struct.unpack(">IBI", await reader.readexactly(9))
            await reader.readexactly(size_and_type >> 8)
            if stream == 1 and size_and_type & 0xFF == 0x1:
                return 0x1, flags
    finally:
        writer.close()
        await writer.wait_closed()


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">IBI", len(payload) << 8 | kind, flags, stream) + payload


# --- how calls end -------------------------------------------------------------------------------------------


async def test_the_engine_is_told_what_is_left_of_the_deadline() -> None:
    async with proxied() as at:
        call = at.ask("Mute", timeout=0.4)
        async with asyncio.timeout(5):
            assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: at.engine.ended == ["Mute"])
        left_s = at.engine.seen[0][2]
        assert left_s is not None
        assert 0.2 < left_s < 0.45, "what is left, but for the rounding of two clocks"
        no_deadline = at.ask("Hold")
        await no_deadline.initial_metadata()
        assert at.engine.seen[1][2] is None
        no_deadline.cancel()


@pytest.mark.parametrize("name", ["Hold", "Mute", "Flood", "Deaf"])
async def test_a_client_that_leaves_ends_the_call_on_the_engine(name: str) -> None:
    async with proxied() as at:
        call = at.call(name)
        await call.write(b"x")
        await until(lambda: [one[0] for one in at.engine.seen] == [name])
        call.cancel()
        await until(lambda: at.engine.ended == [name], within_s=10)


async def test_a_client_whose_connection_breaks_ends_its_calls_on_the_engine() -> None:
    async with proxied() as at:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{at.port}") as channel:
            held = [channel.unary_stream("/any.Service/Hold")(b"") for _ in range(8)]
            for call in held:
                await call.initial_metadata()
        await until(lambda: at.engine.ended == ["Hold"] * 8, within_s=10)


async def test_an_engine_that_goes_away_is_unavailable_by_name_and_so_is_one_that_is_not_there() -> None:
    async with proxied() as at, asyncio.timeout(10):
        held = at.ask("Hold")
        await held.initial_metadata()
        port = at.engine.port
        await at.engine.__aexit__(None, None, None)
        code, details = await held.code(), await held.details()
        assert code is grpc.StatusCode.UNAVAILABLE
        late = at.ask("Echo", b"x")
        assert await late.code() is grpc.StatusCode.UNAVAILABLE
        assert (await late.details()).startswith(f"grpc://127.0.0.1:{port} cannot be reached: ")
        assert details
        await at.engine.__aenter__()
        assert await answer_at_last(at, b"back") == b"back"


async def answer_at_last(at: Stage, request: bytes) -> Any:
    while True:
        with suppress(grpc.aio.AioRpcError):
            return await at.channel.unary_unary("/any.Service/Echo")(request)


async def test_what_a_running_engine_says_when_it_is_unavailable_is_not_changed() -> None:
    async def refuse(context: Any) -> None:
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the scheduler is dead")

    async with proxied() as at:
        at.engine.calls["Refuse"] = refuse
        assert await at.ask("Refuse").details() == "the scheduler is dead"


async def test_a_bridge_that_stops_lets_calls_finish_and_ends_the_rest_in_words() -> None:
    finish = asyncio.Event()

    async def short(context: Any) -> None:
        await context.send_initial_metadata((("held", "yes"),))
        await finish.wait()
        await context.write(b"done")

    async with proxied(drain_s=2) as at:
        at.engine.calls |= {"Short": short, "Watch": at.engine.calls["Hold"]}
        calls = {name: at.ask(name) for name in ("Short", "Hold", "Watch")}
        for call in calls.values():
            await call.initial_metadata()
        async with asyncio.TaskGroup() as group:
            group.create_task(at.bridge.__aexit__(None, None, None))
            assert await calls["Watch"].code() is grpc.StatusCode.UNAVAILABLE
            assert not calls["Hold"].done()
            finish.set()
            assert await answers_of(calls["Short"]) == [b"done"]
            async with asyncio.timeout(10):
                assert await calls["Hold"].code() is grpc.StatusCode.UNAVAILABLE
        assert await calls["Hold"].details() == "the bridge is stopping"
        await until(lambda: sorted(at.engine.ended) == ["Hold", "Watch"])


# --- load ----------------------------------------------------------------------------------------------------


async def test_a_client_that_does_not_read_holds_its_engine_back_and_nobody_else() -> None:
    async with proxied() as at:
        stuck = [at.ask("Flood") for _ in range(4)]
        for call in stuck:
            await call.read()
        await settled(lambda: at.engine.sent)
        assert at.engine.sent * 65_536 < 4 * (16 << 20), "windows are full, and nothing is kept beside them"
        async with asyncio.timeout(20):
            for _ in range(50):
                assert await answers_of(at.ask("Echo", bytes(100_000))) == [bytes(100_000)]
        before = at.engine.sent
        async with asyncio.timeout(20):
            while at.engine.sent < before + 20:
                await stuck[0].read()
        for call in stuck:
            call.cancel()


async def test_an_engine_that_does_not_read_holds_its_client_back() -> None:
    written = 0

    async def write(call: Any) -> None:
        nonlocal written
        while True:
            await call.write(bytes(65_536))
            written += 1

    async with proxied() as at:
        call = at.call("Deaf")
        async with asyncio.TaskGroup() as group:
            writing = group.create_task(write(call))
            await settled(lambda: written)
            assert 0 < written * 65_536 < 16 << 20
            writing.cancel()
        call.cancel()


async def settled(count: Callable[[], int]) -> None:
    """Wait until the count has not changed for half a second."""
    last, since_s = -1, 0.0
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(20):
        while count() != last or loop.time() - since_s < 0.5:
            if count() != last:
                last, since_s = count(), loop.time()
            await asyncio.sleep(0.02)


async def test_many_streams_at_once_do_not_disturb_one_another(caplog: pytest.LogCaptureFixture) -> None:
    """Half of them leave in the middle; the rest get everything, and nothing is logged or left."""

    async def talk(at: Stage, number: int) -> int:
        call = at.call("Echo")
        for turn in range(20):
            message = b"%d.%d" % (number, turn)
            await call.write(message)
            assert await call.read() == message
            if number % 2 and turn == number % 19:
                call.cancel()
                return 0
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.OK
        return 1

    async with proxied() as at:
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            talks = [group.create_task(talk(at, number)) for number in range(200)]
        assert sum(one.result() for one in talks) == 100
    assert "unforeseen" not in caplog.text


# --- what does not pass --------------------------------------------------------------------------------------


async def test_the_relay_s_events_are_told_under_both_names_and_all_else_passes() -> None:
    stubs: list[Callable[[grpc.aio.Channel], Any]] = [
        sglang_scheduler_pb2_grpc.SglangSchedulerStub,
        vllm_engine_pb2_grpc.VllmEngineStub,
    ]
    async with FakePublisher() as publisher:
        feeds = {Rank(0): ZmqFrameFeed(publisher.events_endpoint, publisher.replay_endpoint)}
        async with KvRelay(feeds) as relay, proxied(events=EventStreams(relay, server="the bridge")) as at:
            await publisher.publish(BlocksStored((EngineHash(7),), None, (7, 1), 2))
            await until(lambda: relay.blocks(Rank(0)) == 1)
            for stub in stubs:
                call = stub(at.channel).SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
                async with asyncio.timeout(5):
                    assert dict(await call.initial_metadata())["kvherd-epoch"] == relay.epoch
                    message = await call.read()
                assert [block.block_hash for event in message.events for block in event.stored.blocks] == [7]
                call.cancel()
            assert at.engine.seen == []
            assert await answers_of(at.ask("Echo", b"x")) == [b"x"]


async def test_without_a_relay_the_events_are_the_engine_s() -> None:
    async def answer(context: Any) -> None:
        assert await context.read() == b"\x08\x05"
        await context.write(b"\x08\x06")

    async with proxied() as at:
        at.engine.calls["SubscribeKvEvents"] = answer
        stub = vllm_engine_pb2_grpc.VllmEngineStub(at.channel)
        call = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(start_sequence_number=5))
        async with asyncio.timeout(5):
            assert (await call.read()).sequence_number == 6


@pytest.mark.parametrize("stub", [sglang_scheduler_pb2_grpc.SglangSchedulerStub, vllm_engine_pb2_grpc.VllmEngineStub])
async def test_a_flush_that_passes_is_noted_before_its_answer_if_the_engine_obeyed(stub: Any) -> None:
    answer = common_pb2.FlushCacheResponse(success=False, message="busy")

    async def flush(context: Any) -> None:
        await context.write(answer.SerializeToString())

    noted: list[float] = []
    async with proxied(flushed=noted.append) as at:
        at.engine.calls["FlushCache"] = flush
        ask = stub(at.channel).FlushCache
        assert (await ask(common_pb2.FlushCacheRequest())).message == "busy"
        assert noted == []
        answer.success = True
        before_s = asyncio.get_running_loop().time()
        assert (await ask(common_pb2.FlushCacheRequest())).success
        assert len(noted) == 1
        assert before_s <= noted[0] <= asyncio.get_running_loop().time()
        other = at.channel.unary_unary("/other.Service/FlushCache")
        assert await other(b"") == answer.SerializeToString()
        assert len(noted) == 1
