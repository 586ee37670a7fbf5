"""A gateway that is cancelled at any of the awaits of its start and its end leaves nothing. Real sockets."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from itertools import count
from typing import Any

import grpc.aio
import pytest
import uvloop

from kvherd.core.fleet.spec import WorkerSpec
from kvherd.core.ids import Epoch, Rank, WorkerId
from kvherd.ports.completions import Tokenizer
from kvherd.ports.kv_feed import FeedItem, Subscribed
from kvherd.ports.worker import Worker, WorkerFacts, WorkerKind
from kvherd.services.gateway.gateway import Gateway, GatewayConfig
from kvherd.testing.interrupted import interrupted, tasks_left
from kvherd.testing.kv_feeds import OpenFeed
from kvherd.testing.patience import until
from kvherd.testing.processes import can_bind, free_ports
from kvherd.testing.tokenizer import ByteTokenizer
from kvherd.testing.workers import FakeWorker
from kvherd.wire.proto import kvherd_gateway_v1_pb2 as pb
from kvherd.wire.proto import kvherd_gateway_v1_pb2_grpc as pb_grpc

pytestmark = pytest.mark.net

ANN, BOB = WorkerId("grpc://ann:1"), WorkerId("grpc://bob:1")
LAST = 8
"""Awaits of the end and of the last of the start."""

Loop = Callable[[], asyncio.AbstractEventLoop]


class SilentFeed(OpenFeed):
    async def subscribe(self, cursors: dict[Rank, int], epoch: Epoch | None) -> AsyncGenerator[FeedItem, None]:
        yield Subscribed(Epoch("e" * 32))
        await asyncio.Event().wait()


async def tokenizer(_: str) -> Tokenizer:
    return ByteTokenizer()


async def ask_over_grpc(port: int) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = pb_grpc.GatewayStub(channel)  # type: ignore[no-untyped-call]
        await stub.ListWorkers(pb.ListWorkersRequest(), timeout=30)


async def live(*awaits: int, late: bool, asked: bool) -> bool:
    """Start and end a gateway, cancelled at these awaits; whether there were so many."""
    port, made = free_ports((0, 1)), []

    def worker_at(url: str, _key: str | None) -> Worker:
        made.append(FakeWorker(WorkerId(url), facts=WorkerFacts(WorkerKind.SGLANG_GRPC, ("m",), block_size=4)))
        return made[-1]

    config = GatewayConfig(port=port, grpc_port=port + 1, workers=(WorkerSpec(ANN), WorkerSpec(BOB)))
    gateway = Gateway(
        config, worker_factory=worker_at, feed_factory=lambda _: SilentFeed(), tokenizer_factory=tokenizer
    )

    async def whole_life() -> None:
        async with gateway:
            if asked:
                await asyncio.ensure_future(ask_over_grpc(gateway.grpc_port))

    async with asyncio.timeout(60):
        reached = await interrupted(whole_life(), *awaits, late=late)
        await until(lambda: can_bind(port) and can_bind(port + 1))
        await until(lambda: tasks_left() == [])
    assert [worker.id for worker in made if not worker.closed] == []
    return reached


async def number_of_awaits(*, late: bool, asked: bool) -> int:
    """Of a whole life; it was cancelled at each."""
    for number in count():
        if not await live(number, late=late, asked=asked):
            return number
    raise AssertionError


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("asked", [False, True], ids=["unasked", "asked over gRPC"])
@pytest.mark.parametrize("late", [False, True], ids=["waiting", "about to go on"])
def test_a_gateway_cancelled_at_any_await_leaves_no_port_no_task_and_no_connection(
    loop: Loop, asked: bool, late: bool
) -> None:
    def run(work: Any) -> Any:
        with asyncio.Runner(loop_factory=loop) as runner:
            return runner.run(work)

    awaits = run(number_of_awaits(late=late, asked=asked))
    assert awaits > 4
    for first in range(max(0, awaits - LAST), awaits):
        for second in range(first + 1, first + 4):
            run(live(first, second, late=late, asked=asked))
