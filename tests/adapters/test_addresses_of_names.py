"""Names that lead to link-local addresses are not connected to, whatever they led to before."""

import asyncio
import socket
from typing import Any

import pytest

from kvherd.adapters.addresses import addresses_of
from kvherd.adapters.grpc_kv_feed import GrpcKvFeed
from kvherd.adapters.grpc_wires import GrpcWires
from kvherd.adapters.grpc_worker import GrpcWorker
from kvherd.adapters.http_worker import HttpWorker
from kvherd.core.errors import WorkerUnreachable
from kvherd.core.ids import WorkerId
from kvherd.core.kv.stream import StreamBroken

pytestmark = pytest.mark.net


class Names:
    """A resolver that says what a test says, and notes what was connected to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: str) -> None:
        self.answers = list(answers)
        self.connected: list[str] = []
        loop = asyncio.get_running_loop()
        plain = loop.create_connection

        async def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in answer.split()]

        async def create_connection(make: Any, host: str, port: int, **words: Any) -> Any:
            self.connected.append(host)
            return await plain(make, host, port, **words)

        monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
        monkeypatch.setattr(loop, "create_connection", create_connection)


async def test_a_name_with_a_link_local_address_among_others_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    Names(monkeypatch, "10.0.0.1 169.254.169.254")
    with pytest.raises(OSError, match=r"it is at 169\.254\.169\.254, and link-local addresses are refused"):
        await addresses_of(asyncio.get_running_loop(), "engine.test", 80)
    with pytest.raises(OSError, match="link-local"):
        await addresses_of(asyncio.get_running_loop(), "fe80::1", 80)


async def test_no_kind_of_worker_and_no_feed_is_connected_to_there(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(monkeypatch, "169.254.169.254")
    http = HttpWorker(WorkerId("http://engine.test:80"), "http://engine.test:80")
    grpc = GrpcWorker(WorkerId("grpc://engine.test:80"))
    with pytest.raises(WorkerUnreachable, match="link-local addresses are refused"):
        await http.detect()
    with pytest.raises(WorkerUnreachable, match="link-local addresses are refused"):
        await grpc.detect()
    with pytest.raises(OSError, match="link-local addresses are refused"):
        await GrpcWires("engine.test", 80).warm()
    with pytest.raises(StreamBroken, match="link-local addresses are refused"):
        await anext(GrpcKvFeed("engine.test:80").subscribe({}, None))
    assert names.connected == []
    await http.close()
    await grpc.close()


async def test_a_name_that_is_bound_anew_between_two_connections_is_looked_at_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1. It leads to the engine, and is connected to. 2. Then it leads elsewhere: what was looked at is what is
    connected to, so that no second answer can come between.
    """

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    names = Names(monkeypatch, "127.0.0.1", "169.254.169.254")
    worker = HttpWorker(WorkerId(f"http://engine.test:{port}"), f"http://engine.test:{port}")
    async with server:
        await worker.probe()
        assert names.connected == ["127.0.0.1"]
        with pytest.raises(WorkerUnreachable, match="link-local addresses are refused"):
            await worker.probe()
        assert names.connected == ["127.0.0.1"]
    await worker.close()


async def test_the_next_address_is_tried_where_one_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    names = Names(monkeypatch, "127.0.0.9 127.0.0.1")
    async with server:
        wires = GrpcWires("engine.test", server.sockets[0].getsockname()[1])
        await wires.warm()
        wires.close()
    assert names.connected == ["127.0.0.9", "127.0.0.1"]


async def test_an_address_that_is_silent_leaves_time_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    Names(monkeypatch, "127.0.0.9 127.0.0.1")
    loop = asyncio.get_running_loop()
    known = loop.create_connection

    async def create_connection(make: Any, host: str, port: int, **words: Any) -> Any:
        if host == "127.0.0.9":
            await asyncio.Event().wait()
        return await known(make, host, port, **words)

    monkeypatch.setattr(loop, "create_connection", create_connection)
    async with server:
        wires = GrpcWires("engine.test", server.sockets[0].getsockname()[1])
        await wires.warm()
        wires.close()
