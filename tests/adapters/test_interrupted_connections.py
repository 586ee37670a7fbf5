"""Connections to workers whose use is cancelled at any await, or that are closed at any moment: none is left, and no
place is lost. Real sockets.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import count

import pytest

from kvherd.adapters.grpc_wires import GrpcWires
from kvherd.adapters.http_pool import HttpPool
from kvherd.testing.interrupted import interrupted
from kvherd.testing.patience import until

pytestmark = pytest.mark.net

LATE = pytest.mark.parametrize("late", [False, True], ids=["waiting", "about to go on"])
REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


@dataclass
class Server:
    """It answers each piece with `says`, and counts who is connected."""

    says: bytes
    port: int = 0
    connected: int = 0
    came: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connected += 1
        self.came += 1
        try:
            with suppress(ConnectionError):
                while await reader.read(65_536):
                    writer.write(self.says)
        finally:
            self.connected -= 1
            writer.close()


@asynccontextmanager
async def server(says: bytes = ANSWER) -> AsyncIterator[Server]:
    it = Server(says)
    listening = await asyncio.start_server(it.serve, "127.0.0.1", 0)
    it.port = listening.sockets[0].getsockname()[1]
    async with listening, asyncio.timeout(30):
        yield it
        await until(lambda: it.connected == 0)


class Nobody:
    """A sink and a receiver of no interest."""

    def head(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None: ...

    def body(self, data: bytes) -> None: ...

    def events(self, chunk: bytes) -> None: ...

    def when_settled(self, then: object) -> None: ...

    def message(self, data: bytes) -> None: ...

    def ended(self, status: str, words: str) -> None: ...


@LATE
async def test_an_exchange_cancelled_at_any_await_leaves_its_place_to_the_next(late: bool) -> None:
    for number in count():
        async with server() as it:
            pool = HttpPool("127.0.0.1", it.port, max_connections=1)
            reached = await interrupted(pool.exchange(REQUEST, b"", Nobody()), number, late=late)
            await pool.exchange(REQUEST, b"", Nobody())
            await pool.close()
            assert pool.open_connections == 0
        if not reached:
            break
    assert number > 1


@LATE
async def test_one_that_waits_for_a_place_is_forgotten_when_it_is_cancelled(late: bool) -> None:
    async with server(b"") as it:
        pool = HttpPool("127.0.0.1", it.port, max_connections=1)
        first = asyncio.ensure_future(pool.exchange(REQUEST, b"", Nobody()))
        await until(lambda: it.connected == 1)
        if late:
            asyncio.get_running_loop().call_later(0.05, first.cancel)
            assert await interrupted(pool.exchange(REQUEST, b"", Nobody()), 0, late=True)
        else:
            for _ in range(100):
                assert await interrupted(pool.exchange(REQUEST, b"", Nobody()), 0)
            assert len(pool._waiting) == 0
        last = asyncio.ensure_future(pool.exchange(REQUEST, b"", Nobody()))
        first.cancel()
        await until(lambda: it.came == 2)
        last.cancel()
        await asyncio.wait([first, last])
        await pool.close()


@pytest.mark.parametrize("turns", range(12))
async def test_a_pool_closed_at_any_moment_by_any_number_leaves_no_connection(turns: int) -> None:
    async with server(b"") as it:
        pool = HttpPool("127.0.0.1", it.port)
        asking = asyncio.ensure_future(pool.exchange(REQUEST, b"", Nobody()))
        for _ in range(turns):
            await asyncio.sleep(0)
        await asyncio.gather(pool.close(), pool.close())
        await asyncio.wait([asking])
        assert asking.exception() is not None
        assert pool.open_connections == 0


@LATE
async def test_a_call_cancelled_at_any_await_leaves_no_connection_behind(late: bool) -> None:
    for number in count():
        async with server(b"") as it:
            wires = GrpcWires("127.0.0.1", it.port)
            reached = await interrupted(wires.call("/a/b", b"", Nobody()), number, late=late)
            wires.close()
        if not reached:
            break
    assert number > 0


@pytest.mark.parametrize("turns", range(12))
async def test_wires_closed_while_one_is_made_leave_none(turns: int) -> None:
    async with server(b"") as it:
        wires = GrpcWires("127.0.0.1", it.port)
        calling = asyncio.ensure_future(wires.call("/a/b", b"", Nobody()))
        for _ in range(turns):
            await asyncio.sleep(0)
        wires.close()
        await asyncio.wait([calling])
        with suppress(OSError):
            await calling
