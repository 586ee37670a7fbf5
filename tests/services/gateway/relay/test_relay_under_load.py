"""Many slow clients, large bodies, no descriptors left: each is bounded, said, and over when its cause is."""

import asyncio
import contextlib
import json
import resource
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager

import pytest

from kvherd.adapters.http_worker import HttpWorker
from kvherd.core.ids import WorkerId
from kvherd.ports.worker import Call, Responder
from kvherd.services.gateway.relay.edge import DataRequest, Message, RelayLimits
from kvherd.services.gateway.relay.server import RelayServer
from kvherd.testing.raw_http import SSE_HEAD, RawClient, RawRequest, RawServer, Script, chunk, json_answer, until

pytestmark = pytest.mark.net

SLOW_CLIENTS = 1000
MB = 1024 * 1024
HEAD = b"POST /v1/x HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n"


def take_all(held: ExitStack) -> None:
    """Open sockets until this process may open no more, by a limit close to what it has open."""
    highest = held.enter_context(socket.socket()).fileno()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 10, hard))
    with contextlib.suppress(OSError):
        while True:
            held.enter_context(socket.socket())


def post(body: bytes = b"hi") -> bytes:
    return HEAD % len(body) + body


async def its_length(request: RawRequest, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(json_answer(b"%d" % len(request.body)))


async def no_app(
    _scope: Message, _receive: Callable[[], Awaitable[Message]], _send: Callable[[Message], Awaitable[None]]
) -> None:
    raise AssertionError("nobody asks for it")


@asynccontextmanager
async def relayed(script: Script = its_length, limits: RelayLimits | None = None) -> AsyncIterator[RelayServer]:
    """A relay before one engine."""
    async with RawServer(script) as engine:
        worker = HttpWorker(WorkerId(engine.url), engine.url)

        async def forward(incoming: DataRequest, responder: Responder) -> None:
            call = Call(incoming.method, incoming.target, incoming.headers, incoming.body, incoming.request)
            await worker.forward(call, responder)

        async with RelayServer(forward, no_app, limits=limits) as relay:
            yield relay
        await worker.close()


async def test_a_thousand_slow_clients_keep_nobody_else_waiting_and_are_all_served(descriptors: int) -> None:
    if descriptors < 5 * SLOW_CLIENTS:
        pytest.skip(f"{descriptors} file descriptors are too few for {SLOW_CLIENTS} clients")
    release = asyncio.Event()
    begun = 0

    async def stream(request: RawRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal begun
        if request.body == b"quick":
            await its_length(request, reader, writer)
            return
        writer.write(SSE_HEAD + chunk(b"data: 1\n\n"))
        begun += 1
        await release.wait()
        writer.write(chunk(b"data: 2\n\n") + chunk(b""))

    async with relayed(stream) as relay, AsyncExitStack() as stack:
        slow = []
        for _ in range(SLOW_CLIENTS):
            client = await stack.enter_async_context(RawClient(relay.port))
            client.send(post(b"slow")[:20])
            slow.append(client)
        async with RawClient(relay.port) as quick:
            assert (await quick.ask(post(b"quick"))).body == b"5"
            for client in slow:
                client.send(post(b"slow")[20:])
            async with asyncio.timeout(60):
                while begun < SLOW_CLIENTS:  # noqa: ASYNC110 - it is another coroutine's count
                    await asyncio.sleep(0.01)
            assert (await quick.ask(post(b"quick"))).body == b"5"
        release.set()
        for client in slow:
            answer = await client.answer()
            assert (answer.body, answer.whole) == (b"data: 1\n\ndata: 2\n\n", True)
        assert relay.connections == SLOW_CLIENTS
    assert relay.connections == 0


@pytest.mark.skipif(not hasattr(socket, "TCP_NOTSENT_LOWAT"), reason="this system cannot be told")
async def test_the_system_keeps_little_of_an_answer_for_a_client_that_takes_nothing() -> None:
    """By itself it keeps 4 MB and more for each."""
    written = 0

    async def say_much(_incoming: DataRequest, responder: Responder) -> None:
        nonlocal written
        responder.start(200, [(b"content-length", b"%d" % (16 * MB))])
        while written < 16 * MB:
            responder.write(b"x" * (MB // 64))
            written += MB // 64
            await responder.drain()
        responder.end()

    async def stands_still() -> None:
        before = -1
        while before < written:
            before = written
            await asyncio.sleep(0.5)

    async with RelayServer(say_much, no_app) as relay, RawClient(relay.port, kernel_bytes=2**13) as client:
        client.send(post())
        await until(lambda: written > 0, "the answer began")
        async with asyncio.timeout(60):
            await stands_still()
        assert written < MB
        assert len((await client.answer()).body) == 16 * MB


async def test_a_body_of_100_mb_is_passed_on_where_it_may_be_and_refused_at_once_where_not() -> None:
    size = 100 * MB
    async with relayed(limits=RelayLimits(body_bytes=size)) as relay, RawClient(relay.port) as client:
        client.send(HEAD % size)
        for _ in range(100):
            client.send(b"x" * MB)
            await client.writer.drain()
        assert (await client.answer()).body == b"%d" % size
        assert (await client.ask(post())).body == b"2"
    async with relayed() as relay, RawClient(relay.port) as client:
        answer = await client.ask(HEAD % size)
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (413, "body_too_large")


async def test_an_answer_of_100_mb_passes_whole_through_a_bounded_buffer() -> None:
    async def say_much(_request: RawRequest, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (100 * MB))
        for _ in range(100):
            writer.write(b"x" * MB)
            await writer.drain()

    async with relayed(say_much) as relay, RawClient(relay.port) as client:
        client.send(post())
        head = await client.reader.readuntil(b"\r\n\r\n")
        assert b"content-length: 104857600" in head.lower()
        left = 100 * MB
        async with asyncio.timeout(60):
            while left:
                left -= len(await client.reader.read(MB))


async def test_without_a_descriptor_left_a_client_is_told_to_return_and_served_when_there_is_one(
    descriptors: int,
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with relayed() as relay, RawClient(relay.port) as client:
        await until(lambda: relay.connections == 1, "the client is connected")
        with ExitStack() as held:
            try:
                take_all(held)
                answer = await client.ask(post())
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (503, "descriptors_exhausted")
        assert int(answer.headers["retry-after"]) > 0
        assert (await client.ask(post())).body == b"2"


async def test_more_clients_than_there_are_descriptors_for_are_told_so_and_others_come_in_when_some_leave() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (264, hard))
    try:
        serving = relayed()
        relay = await serving.__aenter__()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        async with AsyncExitStack() as stack:
            for _ in range(100):
                client = await stack.enter_async_context(RawClient(relay.port))
                assert (await client.ask(post())).body == b"2"
            async with RawClient(relay.port) as late:
                answer = await late.answer()
                assert (answer.status, json.loads(answer.body)["error"]["code"]) == (503, "gateway_full")
            assert (await client.ask(post())).body == b"2"
        await until(lambda: relay.connections == 0, "the clients have left")
        async with RawClient(relay.port) as client:
            assert (await client.ask(post())).body == b"2"
    finally:
        await serving.__aexit__(None, None, None)
