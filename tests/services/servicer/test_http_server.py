"""The engine's HTTP server: one that is cancelled as it starts or ends leaves neither a port nor a request."""

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import uvloop
from starlette.types import Receive, Scope, Send

from kvherd.services.servicer.http_server import http_server
from kvherd.services.servicer.sockets import listen
from kvherd.testing.interrupted import interrupted, tasks_left
from kvherd.testing.patience import until
from kvherd.testing.processes import can_bind, free_ports

pytestmark = pytest.mark.net


async def live(*awaits: int, late: bool, asked: bool) -> bool:
    """Serve, with a request that nobody answers, and end, cancelled at these awaits; whether there were so many."""
    port, begun = free_ports((0,)), asyncio.Event()

    async def app(_scope: Scope, _receive: Receive, _send: Send) -> None:
        begun.set()
        await asyncio.Event().wait()

    async def whole_life() -> None:
        async with http_server(app, listen("127.0.0.1", port, option="--port"), drain_s=0.1):
            if asked:
                await asyncio.ensure_future(ask())

    async def ask() -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writers.append(writer)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await begun.wait()

    writers: list[asyncio.StreamWriter] = []
    async with asyncio.timeout(60):
        reached = await interrupted(whole_life(), *awaits, late=late)
        await until(lambda: can_bind(port))
        await until(lambda: tasks_left() == [])
    for writer in writers:
        writer.close()
    return reached


async def live_again_and_again(*, late: bool, asked: bool) -> None:
    for number in count():
        if not asked:  # then each takes the second that a request may
            await live(number, number + 1, late=late, asked=False)
        if not await live(number, late=late, asked=asked):
            break
    assert number > 1


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize(("asked", "late"), [(False, False), (False, True), (True, False)])
def test_one_cancelled_at_any_await_leaves_no_port_and_no_task(
    loop: Callable[[], Any], asked: bool, late: bool
) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(live_again_and_again(late=late, asked=asked))
