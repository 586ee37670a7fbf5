"""A gRPC server whose start or stop is cancelled, at whichever turn of the loop, is none afterwards. Real sockets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import count

import grpc
import grpc.aio
import pytest

from kvherd.services.grpc_lifetime import start_or_leave_none, stop_within
from kvherd.testing.interrupted import interrupted
from kvherd.testing.patience import until
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
    await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})  # gRPC's own may need a turn more


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


class Silent(grpc.GenericRpcHandler):  # type: ignore[misc] # grpc has no types
    """Takes every call and answers none; `ended` is set when the last one has ended here."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.ended = asyncio.Event()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(self._serve)

    async def _serve(self, _request: bytes, _context: object) -> bytes:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.set()
        return b""


async def stop_with_a_call_under_way(*awaits: int, late: bool) -> bool:
    port, silent = free_ports((0,)), Silent()
    server = server_on(port)
    server.add_generic_rpc_handlers((silent,))
    async with no_task_left(), asyncio.timeout(30):
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary("/any/call")(b"")
            await silent.begun.wait()
            reached = await interrupted(stop_within(server, 0.05), *awaits, late=late)
            assert can_bind(port)
            await silent.ended.wait()
            with suppress(grpc.aio.AioRpcError):
                await call
    return reached


@pytest.mark.parametrize("late", [False, True])
async def test_a_stop_cancelled_at_any_of_its_awaits_ends_its_calls_and_leaves_no_task(late: bool) -> None:
    for number in count():
        if not await stop_with_a_call_under_way(number, late=late):
            break
    assert number > 0


@pytest.mark.parametrize("again", [1, 2, 3])
async def test_a_stop_cancelled_twice_ends_them_too(again: int) -> None:
    await stop_with_a_call_under_way(0, again, late=False)
