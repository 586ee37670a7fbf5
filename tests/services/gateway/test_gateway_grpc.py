"""The gateway's gRPC over a real socket."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from kvherd.core.errors import OptionInvalid, PortInUse, WorkerUnreachable
from kvherd.core.fleet.spec import WorkerSpec
from kvherd.core.ids import WorkerId
from kvherd.ports.completions import Tokenizer
from kvherd.ports.worker import WorkerFacts, WorkerKind
from kvherd.services.gateway.doors.console import Console
from kvherd.services.gateway.doors.grpc import GatewayGrpc
from kvherd.services.gateway.fleet.fleet import Fleet
from kvherd.services.gateway.fleet.orders import UNHEEDED
from kvherd.services.gateway.metrics import GatewayMetrics
from kvherd.testing.kv_feeds import NoFollowing
from kvherd.testing.raw_http import until
from kvherd.testing.tokenizer import ByteTokenizer
from kvherd.testing.workers import FakeWorker, refusing_ranks
from kvherd.wire.fleet_json import KvView
from kvherd.wire.proto import kvherd_gateway_v1_pb2 as pb
from kvherd.wire.proto import kvherd_gateway_v1_pb2_grpc as pb_grpc

pytestmark = pytest.mark.net

ANN, BOB = WorkerId("grpc://ann:1"), WorkerId("http://bob:1")


@asynccontextmanager
async def served(*workers: FakeWorker, admin_key: str | None = None) -> AsyncIterator[tuple[GatewayGrpc, Any]]:
    known = {worker.id: worker for worker in workers}

    async def tokenizer(_: str) -> Tokenizer:
        return ByteTokenizer()

    fleet = Fleet(
        worker_factory=lambda url, _: known[WorkerId(url)],
        feed_factory=lambda _: None,  # type: ignore[arg-type,return-value]
        tokenizer_factory=tokenizer,
        following=NoFollowing(),
    )
    console = Console(
        fleet=fleet,
        kv=lambda _: KvView("live", 3),
        heed=UNHEEDED,
        metrics=GatewayMetrics(),
        admin_key=admin_key,
    )
    async with fleet, GatewayGrpc(console, host="127.0.0.1", port=0) as server:
        for worker in workers:
            fleet.add(WorkerSpec(worker.id))
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            yield server, channel


def stub_of(channel: grpc.aio.Channel) -> Any:
    return pb_grpc.GatewayStub(channel)  # type: ignore[no-untyped-call]


async def test_a_flush_carries_the_report() -> None:
    bob = FakeWorker(BOB, fails=WorkerUnreachable(BOB), facts=WorkerFacts(WorkerKind.VLLM_HTTP, ("m",)))
    async with served(FakeWorker(ANN, answer=refusing_ranks("", "busy")), bob) as (_, channel):
        answer = await stub_of(channel).FlushCache(pb.FlushCacheRequest(timeout_s=0.0), timeout=10)
    assert (answer.success, answer.workers_flushed, answer.total_workers) == (False, 0, 2)
    assert (answer.total_http_workers, answer.total_grpc_workers) == (1, 1)
    assert [one.outcome for one in answer.workers] == [pb.OUTCOME_REFUSED, pb.OUTCOME_UNREACHABLE]
    assert [one.outcome for one in answer.workers[0].ranks] == [pb.OUTCOME_DONE, pb.OUTCOME_REFUSED]


@pytest.mark.parametrize("timeout_s", [-1.0, math.nan, math.inf])
async def test_a_time_that_is_none_is_refused(timeout_s: float) -> None:
    async with served() as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub_of(channel).FlushCache(pb.FlushCacheRequest(timeout_s=timeout_s), timeout=10)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "must be a number of seconds" in (caught.value.details() or "")


async def test_workers_are_listed() -> None:
    async with served(FakeWorker(ANN)) as (_, channel):
        answer = await stub_of(channel).ListWorkers(pb.ListWorkersRequest(), timeout=10)
    (one,) = answer.workers
    assert (one.id, one.url, one.kv.state, one.kv.blocks) == ("grpc-ann-1", ANN, "live", 3)


async def test_a_key_is_asked_for_where_one_is_set() -> None:
    async with served(admin_key="secret") as (_, channel):
        stub = stub_of(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ListWorkers(pb.ListWorkersRequest(), timeout=10)
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        metadata = (("authorization", "Bearer secret"),)
        assert await stub.ListWorkers(pb.ListWorkersRequest(), metadata=metadata, timeout=10)


async def test_health_and_reflection_are_on() -> None:
    async with served() as (server, channel):
        check = health_pb2.HealthCheckRequest(service="kvherd.gateway.v1.Gateway")
        answer = await health_pb2_grpc.HealthStub(channel).Check(check, timeout=10)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        names = await _reflected(server.port)
    assert "kvherd.gateway.v1.Gateway" in names


async def _reflected(port: int) -> list[str]:

    def ask() -> list[str]:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            return list(ProtoReflectionDescriptorDatabase(channel).get_services())

    return await asyncio.to_thread(ask)


async def test_two_gateways_never_share_a_port() -> None:
    async with served() as (server, _):
        second = GatewayGrpc(server._console, host="127.0.0.1", port=server.port)
        with pytest.raises(PortInUse, match="--grpc-port"):
            await second.__aenter__()


async def test_who_connects_and_says_nothing_costs_no_server() -> None:
    async with served() as (server, _):
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.close()
        await writer.wait_closed()
        assert server._orders is None


async def test_callers_that_come_together_share_one_server() -> None:
    async with served(FakeWorker(ANN)) as (server, _):

        async def one() -> int:
            options = [("grpc.use_local_subchannel_pool", 1)]
            async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=options) as channel:
                return len((await stub_of(channel).ListWorkers(pb.ListWorkersRequest(), timeout=30)).workers)

        assert await asyncio.gather(*(one() for _ in range(20))) == [1] * 20
        await until(lambda: not server._callers and not server._behind, "nothing is left of those who went")


async def test_who_finds_the_port_behind_the_door_is_nobody() -> None:
    async with served(FakeWorker(ANN)) as (server, channel):
        assert await stub_of(channel).ListWorkers(pb.ListWorkersRequest(), timeout=30)
        assert server._orders is not None
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server._orders.port}") as inner:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub_of(inner).ListWorkers(pb.ListWorkersRequest(), timeout=30)
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_a_call_that_is_under_way_when_the_gateway_stops_is_cut_after_its_grace() -> None:
    async with served(FakeWorker(ANN, takes_s=30.0)) as (server, _):
        door = GatewayGrpc(server._console, host="127.0.0.1", port=0)
        await door.__aenter__()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{door.port}") as channel:
            call = stub_of(channel).FlushCache(pb.FlushCacheRequest(timeout_s=60.0), timeout=90)
            await until(lambda: bool(door._behind), "the call is with the server")
            await door.__aexit__(None, None, None)
            with pytest.raises(grpc.aio.AioRpcError):
                await call


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "0.0.0.0"])
async def test_a_name_with_several_addresses_has_one_port_at_each(host: str) -> None:
    async with served() as (server, _):
        door = GatewayGrpc(server._console, host=host, port=0)
        async with door, grpc.aio.insecure_channel(f"127.0.0.1:{door.port}") as channel:
            assert await stub_of(channel).ListWorkers(pb.ListWorkersRequest(), timeout=30)


async def test_a_host_that_is_another_machine_s_is_refused_by_name() -> None:
    async with served() as (server, _):
        with pytest.raises(OptionInvalid, match=r"--host.*192\.0\.2\.1"):
            await GatewayGrpc(server._console, host="192.0.2.1", port=0).__aenter__()
