"""A start of a gRPC server that is cancelled, at whichever turn of the loop, leaves no server. Real sockets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from kvherd.services.grpc_start import start_or_leave_none
from kvherd.testing.processes import can_bind, free_ports

pytestmark = pytest.mark.net

TURNS = range(8)
"""More than a start takes: the last finds it done."""


def server_on(port: int) -> grpc.aio.Server:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    assert server.add_insecure_port(f"127.0.0.1:{port}") == port
    return server


@asynccontextmanager
async def no_task_left() -> AsyncIterator[None]:
    yield
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_start_that_nobody_cancels_serves() -> None:
    port = free_ports((0,))
    server = server_on(port)
    await start_or_leave_none(server)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(10):
        await channel.channel_ready()
    await server.stop(0)
    assert can_bind(port)


@pytest.mark.parametrize("after", TURNS)
async def test_a_start_cancelled_after_any_number_of_turns_leaves_its_port_and_no_task(after: int) -> None:
    port = free_ports((0,))
    server = server_on(port)
    async with no_task_left(), asyncio.timeout(10):
        start = asyncio.ensure_future(start_or_leave_none(server))
        await turns(after + 1)  # in the first it begins
        start.cancel()
        await asyncio.wait([start])
        if not start.cancelled():
            await server.stop(0)
        assert can_bind(port)


@pytest.mark.parametrize("between", TURNS)
async def test_a_start_cancelled_again_while_it_gives_up_leaves_no_more(between: int) -> None:
    port = free_ports((0,))
    server = server_on(port)
    async with no_task_left(), asyncio.timeout(10):
        start = asyncio.ensure_future(start_or_leave_none(server))
        await turns(1)
        start.cancel()
        await turns(between)
        start.cancel()
        await asyncio.wait([start])
        assert start.cancelled()
        assert can_bind(port)
