"""Client, relay, HTTP worker and engine, each on its own socket."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvherd.adapters.http_worker import HttpWorker
from kvherd.core.ids import WorkerId
from kvherd.ports.worker import Call, Flight, Landed, Responder
from kvherd.services.gateway.relay.edge import DataRequest
from kvherd.services.gateway.relay.server import RelayServer
from kvherd.testing.raw_http import SSE_HEAD, RawClient, RawRequest, RawServer, Script, chunk, json_answer, until

pytestmark = pytest.mark.net
both_ways = pytest.mark.parametrize("launched", [False, True])
POST = b"POST /v1/x HTTP/1.1\r\nHost: h\r\nX-Request-Id: mine\r\nTE: trailers\r\nContent-Length: 2\r\n\r\n{}"


async def no_app(*_: object) -> None:
    raise AssertionError("only data is asked for here")


@asynccontextmanager
async def relay_to(script: Script, *, launched: bool = False) -> AsyncIterator[tuple[RawServer, RelayServer]]:
    """`launched`: so is the first request, since the worker was asked for its health and kept the connection."""

    async def well(request: RawRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if request.target == "/health":
            writer.write(json_answer(b"{}"))
        else:
            await script(request, reader, writer)

    async with RawServer(well) as engine:
        worker = HttpWorker(WorkerId("ann"), engine.url)

        def called(request: DataRequest) -> Call:
            return Call(request.method, request.target, request.headers, request.body, request.request)

        async def forward(request: DataRequest, responder: Responder) -> None:
            await worker.forward(called(request), responder)

        def launch(request: DataRequest, responder: Responder, landed: Landed) -> Flight | None:
            return worker.launch(called(request), responder, landed)

        try:
            async with RelayServer(forward, no_app, launch=launch) as relay:
                if launched:
                    await worker.probe()
                    engine.requests.clear()
                yield engine, relay
        finally:
            await worker.close()


@both_ways
async def test_each_piece_of_a_stream_passes_as_it_comes(launched: bool) -> None:
    """The engine sends a piece only after the client has read the one before: nothing may be held back."""
    read = asyncio.Semaphore(0)

    async def step_by_step(_request: RawRequest, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD)
        for at in range(20):
            await read.acquire()
            writer.write(chunk(b"data: %d\n\n" % at))
        writer.write(b"0\r\n\r\n")

    async with (
        relay_to(step_by_step, launched=launched) as (_, relay),
        RawClient(relay.port) as client,
        asyncio.timeout(10),
    ):
        client.send(POST)
        await client.reader.readuntil(b"\r\n\r\n")
        for at in range(20):
            read.release()
            assert await client.reader.readuntil(b"\n\n\r\n") == chunk(b"data: %d\n\n" % at)
        assert await client.reader.readexactly(5) == b"0\r\n\r\n"


@both_ways
async def test_identifiers_go_to_the_engine_and_come_back(launched: bool) -> None:
    async def answer(_request: RawRequest, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(json_answer(b"{}"))

    async with relay_to(answer, launched=launched) as (engine, relay), RawClient(relay.port) as client:
        assert (await client.ask(POST)).headers["x-request-id"] == "mine"
        made = (await client.ask(POST.replace(b"X-Request-Id: mine\r\n", b""))).headers["x-request-id"]
        first, second = engine.requests
        assert first.header("x-request-id") == "mine"
        assert second.header("x-request-id") == made
        assert first.header("te") is None
        assert (first.header("traceparent") or "").count("-") == 3


@both_ways
@pytest.mark.parametrize("begins", [False, True])
async def test_a_client_that_leaves_ends_the_request_on_the_engine(begins: bool, launched: bool) -> None:
    async def wait(_request: RawRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if begins:
            writer.write(SSE_HEAD + chunk(b"data: 1\n\n"))
        await reader.readexactly(1)

    async with relay_to(wait, launched=launched) as (engine, relay):
        async with RawClient(relay.port) as client:
            client.send(POST)
            await until(lambda: len(engine.requests) == 1, "the engine has the request")
            if begins:
                await client.reader.readuntil(b"data: 1\n\n")
        await until(lambda: engine.left == 1, "the engine saw it go")


@both_ways
async def test_an_engine_that_dies_in_a_stream_leaves_an_error_event(launched: bool) -> None:
    async def die(_request: RawRequest, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD + chunk(b"data: 1\n\n"))
        await writer.drain()
        writer.transport.abort()

    async with relay_to(die, launched=launched) as (_, relay), RawClient(relay.port) as client:
        answer = await client.ask(POST)
        assert answer.whole
        first, event, rest = answer.body.split(b"\n\n")
        assert first == b"data: 1"
        assert event.startswith(b'data: {"error":{"message":"ann failed: it closed the connection')
        assert rest == b""


async def test_an_engine_that_dies_before_answering_is_a_bad_gateway_and_the_next_request_is_served() -> None:
    async def die_once(request: RawRequest, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if request.connection == 1:
            writer.transport.abort()
        else:
            writer.write(json_answer(b"{}"))

    async with relay_to(die_once) as (_, relay), RawClient(relay.port) as client:
        assert (await client.ask(POST)).status == 502
        assert (await client.ask(POST)).status == 200


@both_ways
async def test_a_slow_client_slows_the_engine_and_costs_bounded_memory(launched: bool) -> None:
    sent = 0

    async def flood(_request: RawRequest, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(SSE_HEAD)
        for _ in range(1000):
            writer.write(chunk(b"x" * 32_768))
            await writer.drain()
            sent += 32_768
        writer.write(b"0\r\n\r\n")

    async with relay_to(flood, launched=launched) as (_, relay), RawClient(relay.port, read_limit_bytes=1024) as client:
        client.send(POST)
        before = -1
        while before != sent:
            before = sent
            await asyncio.sleep(0.1)
        assert sent < 20_000_000, "what the kernel's buffers of two connections hold"
        read = 0
        async with asyncio.timeout(20):
            while read < 32_768_000:
                read += len(await client.reader.read(2**20))


@both_ways
async def test_a_thousand_requests_over_few_connections_never_mix(launched: bool) -> None:
    async def echo(request: RawRequest, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD + chunk(request.body) + b"0\r\n\r\n")

    async with relay_to(echo, launched=launched) as (engine, relay):

        async def ask(name: int) -> None:
            async with RawClient(relay.port) as client:
                for at in range(125):
                    body = b"%d:%d" % (name, at)
                    head = b"POST /v1/x HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % len(body)
                    assert (await client.ask(head + body)).body == body

        async with asyncio.TaskGroup() as group:
            for name in range(8):
                group.create_task(ask(name))
        assert len(engine.requests) == 1000
        assert engine.connections <= 9


async def test_a_kept_connection_that_ends_under_a_request_costs_it_nothing() -> None:
    async def die_on_the_kept(request: RawRequest, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if request.connection == 1:
            writer.transport.abort()
        else:
            writer.write(json_answer(b"{}"))

    async with relay_to(die_on_the_kept, launched=True) as (engine, relay), RawClient(relay.port) as client:
        assert (await client.ask(POST)).status == 200
        assert [request.connection for request in engine.requests] == [1, 2]


async def test_a_conversation_is_not_stored_twice_when_a_kept_connection_ends() -> None:
    async def die(_request: RawRequest, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    async with relay_to(die, launched=True) as (engine, relay), RawClient(relay.port) as client:
        assert (await client.ask(POST.replace(b"/v1/x", b"/v1/responses"))).status == 502
        assert len(engine.requests) == 1


@both_ways
async def test_a_worker_that_refuses_is_a_refusal(launched: bool) -> None:
    async def refuse(_request: RawRequest, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(json_answer(b'{"error": "busy"}', status="503 Service Unavailable"))

    async with relay_to(refuse, launched=launched) as (_, relay), RawClient(relay.port) as client:
        for _ in range(3):
            answer = await client.ask(POST)
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            assert b"busy" in answer.body


async def test_a_client_that_asks_and_asks_and_reads_nothing_is_not_answered_without_end() -> None:
    """Its requests come in one piece; each answer is larger than what may wait for it."""
    served = 0

    async def much(_request: RawRequest, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal served
        served += 1
        writer.write(json_answer(b"x" * 1_000_000))

    async with relay_to(much, launched=True) as (_, relay), RawClient(relay.port, read_limit_bytes=1024) as client:
        client.send(POST * 100)
        before = -1
        while before != served:
            before = served
            await asyncio.sleep(0.2)
        assert served < 50
        async with asyncio.timeout(60):
            for _ in range(100):
                assert len((await client.answer()).body) == 1_000_000
