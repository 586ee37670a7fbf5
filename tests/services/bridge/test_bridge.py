"""A bridge between a publisher's real sockets, a fake engine over HTTP, and stubs of smg-grpc-proto alone."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto.generated import (
    common_pb2,
    sglang_scheduler_pb2,
    sglang_scheduler_pb2_grpc,
    vllm_engine_pb2,
    vllm_engine_pb2_grpc,
)

from kvherd.adapters.grpc_dialects import DIALECTS, find_dialect
from kvherd.adapters.grpc_kv_feed import GrpcKvFeed
from kvherd.adapters.http_worker import HttpWorker
from kvherd.adapters.zmq_kv_feed import ZmqFrameFeed
from kvherd.core.errors import PortInUse, StartFailed
from kvherd.core.ids import EngineHash, Rank, WorkerId
from kvherd.core.kv.events import BlocksStored, CacheCleared
from kvherd.ports.kv_feed import Subscribed
from kvherd.ports.worker import RankOutcome
from kvherd.services.bridge.bridge import Bridge, BridgeConfig
from kvherd.services.bridge.engine_answers import ranks_json
from kvherd.services.bridge.flushes import Flushes
from kvherd.services.bridge.http_front import HttpFront
from kvherd.services.kv_relay.event_streams import EventStreams
from kvherd.services.kv_relay.relay import KvRelay, RelayOptions
from kvherd.testing.patience import until
from kvherd.testing.processes import can_bind, free_ports
from kvherd.testing.publisher import FakePublisher
from kvherd.testing.raw_http import RawRequest, RawServer, json_answer
from kvherd.wire.sglang_pb import IN_DOUBT_KEY

pytestmark = pytest.mark.net
FAST = RelayOptions(probe_s=0.05, replay_silence_s=0.3)
FROM_ZERO = common_pb2.SubscribeKvEventsRequest()
DIALECT_PAIRS = [
    pytest.param(sglang_scheduler_pb2, sglang_scheduler_pb2_grpc.SglangSchedulerStub, id="sglang"),
    pytest.param(vllm_engine_pb2, vllm_engine_pb2_grpc.VllmEngineStub, id="vllm"),
]
NAMES = ("vllm:num_requests_running", "vllm:num_requests_waiting")
METRICS = (
    'vllm:cache_config_info{block_size="32",num_gpu_blocks="10"} 1\n'
    "vllm:num_requests_running 2\nvllm:num_requests_waiting 1\nvllm:kv_cache_usage_perc 0.5\n"
)


def block(number: int) -> BlocksStored:
    return BlocksStored((EngineHash(number),), None, (number, 1), 2)


@dataclass
class FakeVllm:
    """A stock vLLM as far as a bridge asks; `resets` are its next answers to a flush, the last one for ever."""

    healthy: bool = True
    resets: list[tuple[str, str]] = field(default_factory=lambda: [("200 OK", '{"success": true}')])
    asked: int = 0
    silent: bool = False
    metrics: str = METRICS
    profiler: tuple[str, str] = ("404 Not Found", '{"detail": "Not Found"}')
    api_key: str = ""
    goes_on: asyncio.Event = field(default_factory=asyncio.Event)
    """Until it is set it stands still."""

    def __post_init__(self) -> None:
        self.goes_on.set()

    async def answer(self, request: RawRequest, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.silent:
            await asyncio.Event().wait()
        await self.goes_on.wait()
        status, body = self._answer(request.target.partition("?")[0])
        if self.api_key and request.header("authorization") != f"Bearer {self.api_key}":
            status, body = "401 Unauthorized", '{"error": "Unauthorized"}'
        writer.write(json_answer(body.encode(), status))

    def _answer(self, path: str) -> tuple[str, str]:
        match path:
            case "/version":
                return "200 OK", '{"version": "0.32.0"}'
            case "/v1/models":
                return "200 OK", '{"data": [{"id": "smollm2", "max_model_len": 1024}]}'
            case "/metrics":
                return "200 OK", self.metrics
            case "/health":
                return ("200 OK", "") if self.healthy else ("503 Service Unavailable", '{"error": "engine dead"}')
            case "/reset_prefix_cache":
                self.asked += 1
                return self.resets.pop(0) if len(self.resets) > 1 else self.resets[0]
            case "/start_profile" | "/stop_profile":
                return self.profiler
            case _:
                return "404 Not Found", '{"detail": "Not Found"}'


@dataclass
class Stage:
    """A bridge that serves, and what is around it."""

    channel: grpc.aio.Channel
    port: int
    engine: FakeVllm
    http: RawServer
    relay: KvRelay
    streams: EventStreams
    bridge: Bridge

    @property
    def sglang(self) -> sglang_scheduler_pb2_grpc.SglangSchedulerStub:
        return sglang_scheduler_pb2_grpc.SglangSchedulerStub(self.channel)


@asynccontextmanager
async def bridged(
    *publishers: FakePublisher,
    port: int | None = None,
    ranks: int = 1,
    tokenizer_zip: bytes | None = None,
    api_key: str = "",
) -> AsyncIterator[Stage]:
    engine, port = FakeVllm(api_key=api_key), port or free_ports((0,))
    feeds = {one.rank: ZmqFrameFeed(one.events_endpoint, one.replay_endpoint) for one in publishers}
    async with RawServer(engine.answer) as http:
        worker = HttpWorker(WorkerId(http.url), http.url, api_key=api_key or None)
        try:
            async with KvRelay(feeds, options=FAST) as relay:
                streams = EventStreams(relay, server="the bridge")
                config = BridgeConfig(port=port, ranks=ranks, retry_s=0.01)
                flushes = Flushes(worker, obeyed=relay.flushed, unknown=relay.doubted)
                front = HttpFront(worker, streams, flushes, tokenizer_zip=tokenizer_zip)
                async with (
                    flushes,
                    grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
                    Bridge(config, front, identify=worker.detect) as bridge,
                ):
                    yield Stage(channel, port, engine, http, relay, streams, bridge)
        finally:
            await worker.close()


async def read(call: Any, messages: int) -> list[common_pb2.KvEventBatch]:
    async with asyncio.timeout(5):
        return [await call.read() for _ in range(messages)]


def hashes(*messages: common_pb2.KvEventBatch) -> list[int]:
    return [one.block_hash for message in messages for event in message.events for one in event.stored.blocks]


async def known(relay: KvRelay, blocks: int, rank: int = 0) -> None:
    await until(lambda: relay.blocks(Rank(rank)) == blocks)


# --- KV events -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pb", "stub"), DIALECT_PAIRS)
async def test_events_come_over_either_protocol_with_gaps_filled(pb: Any, stub: Callable[..., Any]) -> None:
    async with FakePublisher() as publisher, bridged(publisher) as at:
        await publisher.publish(block(1))
        await known(at.relay, 1)
        call = stub(at.channel).SubscribeKvEvents(FROM_ZERO)
        assert dict(await call.initial_metadata())["kvherd-epoch"] == at.relay.epoch
        await publisher.publish(block(2), lost=True)
        await publisher.publish(block(3))
        messages = await read(call, 3)
        call.cancel()
        assert hashes(*messages) == [1, 2, 3]
        numbers = [message.sequence_number for message in messages]
        assert numbers == list(range(numbers[0], numbers[0] + 3))


async def test_a_restart_of_the_publisher_is_data_loss_and_then_a_fresh_snapshot() -> None:
    publisher = FakePublisher()
    async with publisher, bridged(publisher) as at:
        await publisher.publish(block(1))
        await known(at.relay, 1)
        call = at.sglang.SubscribeKvEvents(FROM_ZERO)
        old = (await read(call, 1))[0]
        await publisher.__aexit__(None, None, None)
        await publisher.__aenter__()
        await publisher.publish(block(7))
        async with asyncio.timeout(5):
            assert await call.code() is grpc.StatusCode.DATA_LOSS
        await known(at.relay, 1)
        stale = at.sglang.SubscribeKvEvents(
            common_pb2.SubscribeKvEventsRequest(start_sequence_number=old.sequence_number)
        )
        assert await stale.code() is grpc.StatusCode.OUT_OF_RANGE
        again = at.sglang.SubscribeKvEvents(FROM_ZERO)
        snapshot = (await read(again, 1))[0]
        again.cancel()
        assert snapshot.HasField("snapshot")
        assert hashes(snapshot) == [7]


async def test_two_ranks_come_on_one_stream_each_in_its_order() -> None:
    async with FakePublisher() as zero, FakePublisher(rank=Rank(1)) as one, bridged(zero, one, ranks=2) as at:
        await zero.publish(block(1))
        await one.publish(block(2))
        await known(at.relay, 1)
        await known(at.relay, 1, rank=1)
        call = at.sglang.SubscribeKvEvents(FROM_ZERO)
        messages = await read(call, 2)
        await one.publish(block(3))
        messages += await read(call, 1)
        call.cancel()
        assert {(message.dp_rank, *hashes(message)) for message in messages} == {(0, 1), (1, 2), (1, 3)}


async def test_a_bridge_that_comes_back_is_another_epoch_for_who_followed_it() -> None:
    async with FakePublisher() as publisher:
        async with bridged(publisher) as at:
            port = at.port
            await publisher.publish(block(1))
            await known(at.relay, 1)
            feed = GrpcKvFeed(f"127.0.0.1:{port}")
            async with aclosing(feed.subscribe({}, None)) as items:
                first = await anext(items)
                assert isinstance(first, Subscribed)
        await publisher.publish(block(2))
        async with bridged(publisher, port=port) as at:
            await known(at.relay, 2)
            async with aclosing(feed.subscribe({}, None)) as items:
                second = await anext(items)
                assert isinstance(second, Subscribed)
                assert second.epoch != first.epoch


async def test_a_bridge_that_stops_ends_its_streams_and_gives_its_port_back() -> None:
    port = free_ports((0,))
    async with FakePublisher() as publisher, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        async with bridged(publisher, port=port) as at:
            call = sglang_scheduler_pb2_grpc.SglangSchedulerStub(channel).SubscribeKvEvents(FROM_ZERO)
            await read(call, 1)
            assert not can_bind(port)
        async with asyncio.timeout(5):
            assert await call.code() is grpc.StatusCode.UNAVAILABLE
        assert await call.details() == "the bridge is stopping"
        await until(lambda: len(at.streams) == 0)
        assert can_bind(port)


async def test_a_port_that_is_taken_is_named_with_its_option() -> None:
    async with FakePublisher() as publisher, bridged(publisher) as at:
        with pytest.raises(PortInUse, match="--listen"):
            async with bridged(publisher, port=at.port):
                pass


async def test_events_may_come_from_a_publisher_that_connects_to_us() -> None:
    port = free_ports((0,))
    endpoint = f"tcp://127.0.0.1:{port}"
    async with (
        FakePublisher(events_endpoint=endpoint, connects=True) as publisher,
        KvRelay({Rank(0): ZmqFrameFeed(endpoint, publisher.replay_endpoint, bind_events=True)}, options=FAST) as relay,
    ):
        await publisher.publish(block(1))
        await known(relay, 1)
        with pytest.raises(StartFailed, match="in use"):
            await ZmqFrameFeed(endpoint, bind_events=True).__aenter__()


# --- what passes through ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pb", "stub"), DIALECT_PAIRS)
async def test_health_model_server_and_load_are_the_engine_s(pb: Any, stub: Callable[..., Any]) -> None:
    async with FakePublisher() as publisher, bridged(publisher) as at:
        client = stub(at.channel)
        assert (await client.HealthCheck(pb.HealthCheckRequest())).healthy
        model = await client.GetModelInfo(pb.GetModelInfoRequest())
        assert (model.served_model_name, model.max_context_length, model.is_generation) == ("smollm2", 1024, True)
        server = await client.GetServerInfo(pb.GetServerInfoRequest())
        assert server.server_type == "http"
        size = server.block_size if pb is vllm_engine_pb2 else server.server_args["page_size"]
        assert size == 32
        loads = await client.GetLoads(pb.GetLoadsRequest())
        one = loads.loads[0]
        assert (one.num_running_reqs, one.num_waiting_reqs, one.num_total_reqs) == (2, 1, 3)
        assert (one.num_used_tokens, one.max_total_num_tokens, one.token_usage) == (160, 320, 0.5)
        at.engine.healthy = False
        sick = await client.HealthCheck(pb.HealthCheckRequest())
        assert not sick.healthy
        assert "503" in sick.message


async def test_a_load_of_a_rank_that_http_cannot_tell_is_refused() -> None:
    async with FakePublisher() as publisher, bridged(publisher) as at:
        with pytest.raises(grpc.aio.AioRpcError, match="dp_rank") as caught:
            await at.sglang.GetLoads(sglang_scheduler_pb2.GetLoadsRequest(dp_rank=1))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(("pb", "stub"), DIALECT_PAIRS)
async def test_a_load_is_told_by_rank_where_the_engine_tells_its_ranks_apart(pb: Any, stub: Callable[..., Any]) -> None:
    async with FakePublisher() as publisher, bridged(publisher) as at:
        lines = [f'{name}{{engine="{rank}",m="x"}} {2 * rank}' for name in NAMES for rank in (0, 1)]
        config = [f'vllm:cache_config_info{{block_size="32",engine="{rank}",num_gpu_blocks="10"}} 1' for rank in (0, 1)]
        at.engine.metrics = "\n".join([*config, *lines]) + "\n"
        loads = await stub(at.channel).GetLoads(pb.GetLoadsRequest())
        assert [(one.dp_rank, one.num_running_reqs, one.num_waiting_reqs) for one in loads.loads] == [
            (0, 0, 0),
            (1, 2, 2),
        ]
        assert [one.max_total_num_tokens for one in loads.loads] == [320, 320]
        [one] = (await stub(at.channel).GetLoads(pb.GetLoadsRequest(dp_rank=1))).loads
        assert one.dp_rank == 1


async def flush(at: Stage, timeout_s: float = 0.0) -> common_pb2.FlushCacheResponse:
    async with asyncio.timeout(8):
        return await at.sglang.FlushCache(common_pb2.FlushCacheRequest(timeout_s=timeout_s))


async def test_a_flush_succeeds_when_the_engine_says_so_and_only_then() -> None:
    async with FakePublisher() as publisher, bridged(publisher) as at:
        assert (await flush(at)).success
        at.engine.resets = [("200 OK", '{"success": false}')]
        refused = await flush(at)
        assert not refused.success
        assert "busy" in refused.message
        at.engine.resets = [("200 OK", '{"success": false}'), ("200 OK", '{"success": true}')]
        assert (await flush(at, 5.0)).success
        assert at.engine.asked == 4


@pytest.mark.parametrize(
    ("reset", "timeout_s", "code", "words"),
    [
        (("200 OK", '{"success": false}'), 0.1, "DEADLINE_EXCEEDED", "still busy after 0.1 s"),
        (("404 Not Found", "{}"), 0.0, "UNIMPLEMENTED", "VLLM_SERVER_DEV_MODE=1"),
        (("500 Internal Server Error", '{"error": "oops"}'), 0.0, "FAILED_PRECONDITION", "oops"),
        (("200 OK", '{"success": true}'), -1.0, "INVALID_ARGUMENT", "0 to 3600 seconds"),
        (("200 OK", '{"success": true}'), float("inf"), "INVALID_ARGUMENT", "0 to 3600 seconds"),
    ],
)
async def test_a_flush_that_was_not_obeyed_has_its_status(
    reset: tuple[str, str], timeout_s: float, code: str, words: str
) -> None:
    async with FakePublisher() as publisher, bridged(publisher) as at:
        at.engine.resets = [reset]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await flush(at, timeout_s)
        assert caught.value.code() is grpc.StatusCode[code]
        assert words in (caught.value.details() or "")


async def test_a_flush_that_was_obeyed_is_told_to_subscribers_at_once_and_one_that_was_refused_is_not() -> None:
    async with FakePublisher() as publisher, bridged(publisher) as at:
        await publisher.publish(block(1))
        await known(at.relay, 1)
        call = at.sglang.SubscribeKvEvents(FROM_ZERO)
        await read(call, 1)
        at.engine.resets = [("200 OK", '{"success": false}')]
        await flush(at)
        assert at.relay.blocks(Rank(0)) == 1
        at.engine.resets = [("200 OK", '{"success": true}')]
        await flush(at)
        assert at.relay.blocks(Rank(0)) == 0
        [message] = await read(call, 1)
        assert [event.WhichOneof("data") for event in message.events] == ["cleared"]
        call.cancel()


async def test_an_engine_that_is_gone_is_unavailable_while_its_events_are_served() -> None:
    async with FakePublisher() as publisher, bridged(publisher) as at:
        await publisher.publish(block(1))
        await at.http.__aexit__(None, None, None)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await flush(at)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        health = await at.sglang.HealthCheck(sglang_scheduler_pb2.HealthCheckRequest())
        assert not health.healthy
        await known(at.relay, 1)
        call = at.sglang.SubscribeKvEvents(FROM_ZERO)
        assert hashes(*await read(call, 1)) == [1]
        call.cancel()


async def test_an_engine_that_never_answers_costs_its_deadline_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvherd.services.bridge.engine_doors.ANSWER_S", 0.2)
    async with FakePublisher() as publisher, bridged(publisher) as at:
        at.engine.silent = True
        with pytest.raises(grpc.aio.AioRpcError, match=r"gave no answer within 0\.2 s") as caught:
            await flush(at)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert dict(caught.value.trailing_metadata() or ())[IN_DOUBT_KEY] == "1"


async def test_a_flush_that_is_obeyed_after_its_caller_gave_up_is_told_to_subscribers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvherd.services.bridge.engine_doors.ANSWER_S", 0.2)
    async with FakePublisher() as publisher, bridged(publisher) as at:
        await publisher.publish(block(1))
        await known(at.relay, 1)
        assert (await flush(at)).success  # it is known what the engine is
        await publisher.publish(CacheCleared(), block(2))
        await known(at.relay, 1)
        at.engine.goes_on.clear()
        with pytest.raises(grpc.aio.AioRpcError, match="gave no answer"):
            await flush(at)
        assert at.relay.blocks(Rank(0)) == 1
        at.engine.goes_on.set()
        await known(at.relay, 0)


@pytest.mark.parametrize("name", ["StartProfile", "StopProfile"])
async def test_a_vllm_without_a_profiler_is_unimplemented_and_one_with_it_is_asked(name: str) -> None:
    request = getattr(common_pb2, f"{name}Request")()
    async with FakePublisher() as publisher, bridged(publisher) as at:
        with pytest.raises(grpc.aio.AioRpcError, match="--profiler-config") as caught:
            await getattr(at.sglang, name)(request)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        at.engine.profiler = ("200 OK", "")
        assert (await getattr(at.sglang, name)(request)).success
        at.engine.profiler = ("500 Internal Server Error", '{"error": {"message": "no profiler runs"}}')
        with pytest.raises(grpc.aio.AioRpcError, match="no profiler runs") as caught:
            await getattr(at.sglang, name)(request)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_field_of_a_profile_that_vllm_would_ignore_is_refused_by_name() -> None:
    async with FakePublisher() as publisher, bridged(publisher) as at:
        at.engine.profiler = ("200 OK", "")
        with pytest.raises(grpc.aio.AioRpcError, match="with_stack") as caught:
            await at.sglang.StartProfile(common_pb2.StartProfileRequest(with_stack=True))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


# --- what does not -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "service",
    [
        sglang_scheduler_pb2.DESCRIPTOR.services_by_name["SglangScheduler"],
        vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"],
    ],
    ids=["sglang", "vllm"],
)
async def test_every_other_call_is_unimplemented_in_words(service: Any) -> None:
    passed = {
        "SubscribeKvEvents",
        "FlushCache",
        "HealthCheck",
        "GetModelInfo",
        "GetServerInfo",
        "GetLoads",
        "GetTokenizer",
        "StartProfile",
        "StopProfile",
    }
    others = {method.name for method in service.methods} - passed
    assert {"Generate", "Abort"} <= others
    async with FakePublisher() as publisher, bridged(publisher) as at:
        for name in sorted(others):
            call = at.channel.unary_stream(f"/{service.full_name}/{name}")(b"")
            async with asyncio.timeout(5):
                assert await call.code() is grpc.StatusCode.UNIMPLEMENTED
                assert await call.details() == (
                    f"{name} (a bridge passes on KV events, flushes, profiles, health and load) is not supported here"
                )


async def test_the_tokenizer_that_the_operator_named_is_handed_out_and_no_other() -> None:
    data = bytes(range(256)) * 10_000
    async with FakePublisher() as publisher:
        async with bridged(publisher, tokenizer_zip=data) as at:
            call = at.sglang.GetTokenizer(common_pb2.GetTokenizerRequest())
            chunks = [chunk async for chunk in call]
            assert b"".join(chunk.data for chunk in chunks) == data
            assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
        async with bridged(publisher) as at:
            call = at.sglang.GetTokenizer(common_pb2.GetTokenizerRequest())
            assert await call.code() is grpc.StatusCode.UNIMPLEMENTED
            assert "without --tokenizer" in await call.details()


async def test_an_engine_that_wants_a_key_gets_it_with_every_call() -> None:
    async with FakePublisher() as publisher, bridged(publisher, api_key="engine's") as at, asyncio.timeout(10):
        assert (await at.sglang.HealthCheck(sglang_scheduler_pb2.HealthCheckRequest())).healthy
        assert (await at.sglang.GetModelInfo(sglang_scheduler_pb2.GetModelInfoRequest())).model_path == "smollm2"
        assert (await at.sglang.GetLoads(sglang_scheduler_pb2.GetLoadsRequest())).loads[0].num_running_reqs == 2
        assert (await at.sglang.FlushCache(common_pb2.FlushCacheRequest())).success
        at.engine.api_key = "another"
        assert not (await at.sglang.HealthCheck(sglang_scheduler_pb2.HealthCheckRequest())).healthy


async def test_health_and_reflection_name_both_protocols() -> None:
    async with FakePublisher() as publisher, bridged(publisher) as at:
        health = health_pb2_grpc.HealthStub(at.channel)
        for name in ("", "sglang.grpc.scheduler.SglangScheduler", "vllm.grpc.engine.VllmEngine"):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            watched = health.Watch(health_pb2.HealthCheckRequest(service=name))
            assert (await watched.read()).status == health_pb2.HealthCheckResponse.SERVING
            watched.cancel()
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await health.Check(health_pb2.HealthCheckRequest(service="some.other.Service"))
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        assert await find_dialect(at.channel, WorkerId("w")) == DIALECTS[0]


async def test_the_log_tells_what_the_engine_is_and_that_ranks_are_missing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with FakePublisher() as publisher, bridged(publisher, ranks=2) as at, asyncio.timeout(5):
        await at.bridge.announce_engine()
    assert "the engine is vllm-http 0.32.0, blocks of 32 tokens" in caplog.text
    assert "the engine has 1 ranks, and the KV events of 2 are followed" in caplog.text


def test_the_outcomes_of_ranks_are_json() -> None:
    told = ranks_json((RankOutcome(Rank(1), done=False, message="busy"),))
    assert json.loads(told) == [{"rank": 1, "done": False, "message": "busy"}]
