"""The relay as its clients see it, over real sockets."""

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any

import pytest
import uvloop

from kvherd.core.errors import FieldInvalid, NoWorker, OptionInvalid, PortInUse, WorkerFailed
from kvherd.core.ids import WorkerId
from kvherd.ports.worker import Responder
from kvherd.services.gateway.relay.edge import DataRequest, Message, RelayLimits
from kvherd.services.gateway.relay.server import RelayServer
from kvherd.testing.raw_http import RawAnswer, RawClient, until

pytestmark = pytest.mark.net

Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


def post(path: str = "/v1/echo", body: bytes = b"hi", extra: bytes = b"", version: bytes = b"1.1") -> bytes:
    return b"POST %b HTTP/%b\r\nHost: h\r\n%bContent-Length: %d\r\n\r\n%b" % (
        path.encode(),
        version,
        extra,
        len(body),
        body,
    )


def get(path: str = "/health", extra: bytes = b"", method: bytes = b"GET") -> bytes:
    return b"%b %b HTTP/1.1\r\nHost: h\r\n%b\r\n" % (method, path.encode(), extra)


async def echo(request: DataRequest, responder: Responder) -> None:
    responder.start(200, [(b"content-type", b"text/plain"), (b"content-length", b"%d" % len(request.body))])
    responder.write(request.body)
    responder.end()


async def echo_in_chunks(request: DataRequest, responder: Responder) -> None:
    responder.start(200, [(b"content-type", b"text/event-stream")])
    for at in range(len(request.body)):
        responder.write(request.body[at : at + 1])
        await responder.drain()
    responder.end()


async def app(scope: Message, receive: Receive, send: Send) -> None:
    request = await receive()
    body = json.dumps([scope["method"], scope["path"], scope["query_string"].decode(), request["body"].decode()])
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": body.encode()})


class Held:
    """A handler that waits for a test's word; it knows how many run and how many were cancelled."""

    def __init__(self, *, begin: bool = False, kind: bytes = b"text/event-stream") -> None:
        self.begin = begin
        self.kind = kind
        self.running = 0
        self.cancelled = 0
        self.go_on = asyncio.Event()

    async def __call__(self, request: DataRequest, responder: Responder) -> None:
        self.running += 1
        try:
            if self.begin:
                responder.start(200, [(b"content-type", self.kind)])
                responder.write(b"data: 1\n\n")
            await self.go_on.wait()
            if self.begin:
                responder.end()
            else:
                await echo(request, responder)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1


def code(answer: RawAnswer) -> str:
    told = json.loads(answer.body)["error"]["code"]
    assert isinstance(told, str)
    return told


async def test_data_and_other_requests_alternate_on_one_connection() -> None:
    async with RelayServer(echo, app) as relay, RawClient(relay.port) as client:
        for _ in range(3):
            assert (await client.ask(post(body=b"abc"))).body == b"abc"
            answer = await client.ask(get("/workers%20x?a=b"))
            assert json.loads(answer.body) == ["GET", "/workers x", "a=b", ""]
        assert json.loads((await client.ask(post("/flush_cache", b"{}"))).body) == ["POST", "/flush_cache", "", "{}"]


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with RelayServer(echo, app) as relay, RawClient(relay.port) as client:
        client.send(b"".join(post(body=b"%03d" % at) + get(f"/{at}") for at in range(300)))
        for at in range(300):
            assert (await client.answer()).body == b"%03d" % at
            assert json.loads((await client.answer()).body)[1] == f"/{at}"


async def test_a_request_cut_at_any_byte_is_answered_alike() -> None:
    whole = post(body=b"abc", extra=b"X-Request-Id: r\r\n")
    async with RelayServer(echo, app) as relay:
        async with RawClient(relay.port) as client:
            expected = await client.ask(whole)
        for cut in range(1, len(whole), 7):
            async with RawClient(relay.port) as client:
                client.send(whole[:cut])
                await asyncio.sleep(0)
                assert await client.ask(whole[cut:] + b"") == expected


async def test_chunks_come_in_and_go_out() -> None:
    async with RelayServer(echo_in_chunks, app) as relay, RawClient(relay.port) as client:
        head = b"POST /v1/x HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
        answer = await client.ask(head + b"2\r\nab\r\n3\r\ncde\r\n0\r\n\r\n")
        assert answer.headers["transfer-encoding"] == "chunked"
        assert answer.pieces == (b"a", b"b", b"c", b"d", b"e")
        assert answer.whole


async def test_an_old_client_gets_no_chunks() -> None:
    async with RelayServer(echo_in_chunks, app) as relay:
        async with RawClient(relay.port) as client:
            answer = await client.ask(post(body=b"abc", version=b"1.0"))
            assert (answer.body, answer.headers["connection"]) == (b"abc", "close")
        async with RawClient(relay.port) as client:
            answer = await client.ask(post(body=b"abc", version=b"1.0", extra=b"Connection: keep-alive\r\n"))
            assert "transfer-encoding" not in answer.headers
    async with RelayServer(echo, app) as relay, RawClient(relay.port) as client:
        for _ in range(2):
            answer = await client.ask(post(body=b"abc", version=b"1.0", extra=b"Connection: keep-alive\r\n"))
            assert answer.headers["connection"] == "keep-alive"


async def test_head_has_no_body_and_keeps_the_connection_in_step() -> None:
    async with RelayServer(echo, app) as relay, RawClient(relay.port) as client:
        client.send(get(method=b"HEAD") + get("/next") + get(method=b"OPTIONS"))
        assert (await client.answer(to_head=True)).status == 200
        assert json.loads((await client.answer()).body)[1] == "/next"
        assert json.loads((await client.answer()).body)[0] == "OPTIONS"


async def test_connection_close_is_kept_to() -> None:
    async with RelayServer(echo, app) as relay, RawClient(relay.port) as client:
        answer = await client.ask(post(extra=b"Connection: close\r\n"))
        assert (answer.body, answer.headers["connection"]) == (b"hi", "close")
        assert await client.ended() == b""


async def test_a_client_that_asks_first_is_told_to_go_on_in_its_turn() -> None:
    held = Held()
    head = b"POST /v1/x HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n"
    async with RelayServer(held, app) as relay, RawClient(relay.port) as client:
        client.send(post(body=b"first") + head)
        await until(lambda: held.running == 1, "the first request runs")
        held.go_on.set()
        assert (await client.answer()).body == b"first"
        assert (await client.answer()).status == 100
        assert (await client.ask(b"abc")).body == b"abc"


@pytest.mark.parametrize(
    ("sent", "status", "told"),
    [
        (b"nonsense\r\n\r\n", 400, "frame_invalid"),
        (
            b"POST /v1/x HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
            400,
            "frame_invalid",
        ),
        (b"POST /v1/x HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400, "frame_invalid"),
        (b"GET / HTTP/1.1\r\nHost: h\r\nX: a\r\n b\r\n\r\n", 400, "frame_invalid"),
        (b"GET / HTTP/1.1\nHost: h\n\n", 400, "frame_invalid"),
        (b"POST /v1/x HTTP/1.1\r\nHost: h\r\nContent-Length: 2000\r\n\r\n", 413, "body_too_large"),
        (b"GET / HTTP/1.1\r\nHost: h\r\nX: " + b"x" * 1000 + b"\r\n\r\n", 431, "headers_too_large"),
        (b"GET / HTTP/1.1\r\nHost: h\r\nExpect: a miracle\r\n\r\n", 400, "unsupported"),
    ],
)
async def test_what_cannot_be_read_is_refused_and_the_connection_ends(sent: bytes, status: int, told: str) -> None:
    limits = RelayLimits(body_bytes=1000, head_bytes=500)
    async with RelayServer(echo, app, limits=limits) as relay, RawClient(relay.port) as client:
        client.send(post(body=b"before") + sent + post(body=b"after"))
        assert (await client.answer()).body == b"before"
        answer = await client.answer()
        assert (answer.status, code(answer), answer.headers["connection"]) == (status, told, "close")
        assert await client.ended() == b""


async def test_a_body_over_the_limit_is_refused_while_it_is_being_sent() -> None:
    """The client sends on for a while; it must still be able to read why it was refused."""
    limits = RelayLimits(body_bytes=1000)
    async with RelayServer(echo, app, limits=limits) as relay, RawClient(relay.port) as client:
        client.send(b"POST /v1/x HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(50):
            client.send(b"1000\r\n" + b"x" * 4096 + b"\r\n")
        assert (await client.answer()).status == 413


async def test_errors_before_the_answer_are_openai_errors_and_the_connection_goes_on() -> None:
    async def refuse(request: DataRequest, _responder: Responder) -> None:
        if request.body == b"field":
            raise FieldInvalid("temperature", "must be at least 0")
        if request.body == b"defect":
            raise ValueError("secret")
        raise NoWorker("m", (), retry_after_s=7)

    async with RelayServer(refuse, app) as relay, RawClient(relay.port) as client:
        answer = await client.ask(post(body=b"field"))
        assert (answer.status, code(answer)) == (400, "invalid_value")
        answer = await client.ask(post(body=b"none"))
        assert (answer.status, answer.headers["retry-after"]) == (503, "7")
        answer = await client.ask(post(body=b"defect", extra=b"X-Request-Id: mine\r\n"))
        assert (answer.status, code(answer), answer.headers["x-request-id"]) == (500, "internal", "mine")
        assert b"secret" not in answer.body


@pytest.mark.parametrize("finished_frame", [b"data: 1\n\n", b'data: {"half'])
async def test_a_stream_that_fails_ends_with_an_error_event(finished_frame: bytes) -> None:
    async def break_down(_request: DataRequest, responder: Responder) -> None:
        responder.start(200, [(b"content-type", b"text/event-stream; charset=utf-8")])
        responder.write(finished_frame)
        responder.fail("the engine is gone")
        raise WorkerFailed(WorkerId("w"), "the engine is gone")

    async with RelayServer(break_down, app) as relay, RawClient(relay.port) as client:
        for _ in range(2):
            answer = await client.ask(post())
            assert answer.whole
            *_, last, empty = answer.body.split(b"\n\n")
            assert empty == b""
            assert json.loads(last.removeprefix(b"data: "))["error"]["message"] == "the engine is gone"


async def test_another_answer_that_fails_is_cut_off() -> None:
    async def break_down(request: DataRequest, responder: Responder) -> None:
        length = [(b"content-length", b"100")] if request.body == b"length" else []
        responder.start(200, [(b"content-type", b"application/json"), *length])
        responder.write(b'{"half')
        if request.body == b"defect":
            raise ValueError
        responder.fail("the engine is gone")

    async with RelayServer(break_down, app) as relay:
        for body in (b"length", b"chunked", b"defect"):
            async with RawClient(relay.port) as client:
                answer = await client.ask(post(body=body))
                assert (answer.body, answer.whole) == (b'{"half', False)
        async with RawClient(relay.port) as client:
            assert not (await client.ask(post(version=b"1.0"))).whole


async def test_a_handler_that_forgets_its_end_is_cut_off() -> None:
    async def forget(request: DataRequest, responder: Responder) -> None:
        if request.body != b"nothing":
            responder.start(200, [])

    async with RelayServer(forget, app) as relay:
        async with RawClient(relay.port) as client:
            assert (await client.ask(post(body=b"nothing"))).status == 500
        async with RawClient(relay.port) as client:
            assert not (await client.ask(post())).whole


async def test_more_or_less_than_was_declared_never_reaches_the_next_answer() -> None:
    async def lie(request: DataRequest, responder: Responder) -> None:
        responder.start(200, [(b"content-length", b"3")])
        responder.write(request.body)
        responder.end()

    async with RelayServer(lie, app) as relay:
        async with RawClient(relay.port) as client:
            assert (await client.ask(post(body=b"abcdef"))).body == b"abc"
            assert await client.ended() == b""
        async with RawClient(relay.port) as client:
            assert not (await client.ask(post(body=b"a"))).whole


async def test_a_header_cannot_forge_another() -> None:
    async def forge(_request: DataRequest, responder: Responder) -> None:
        responder.start(200, [(b"x-a", b"1\r\nx-b: 2")])

    async with RelayServer(forge, app) as relay, RawClient(relay.port) as client:
        for _ in range(2):
            answer = await client.ask(post())
            assert (answer.status, code(answer)) == (500, "internal")


async def test_headers_of_the_connection_are_the_relays_own() -> None:
    async def answer_with_them(_request: DataRequest, responder: Responder) -> None:
        responder.start(200, [(b"Connection", b"close"), (b"Keep-Alive", b"1"), (b"Transfer-Encoding", b"chunked")])
        responder.end()

    async with RelayServer(answer_with_them, app) as relay, RawClient(relay.port) as client:
        answer = await client.ask(post())
        assert answer.headers.keys() == {"transfer-encoding", "x-request-id"}
        assert (await client.ask(post())).status == 200


@pytest.mark.parametrize("begin", [False, True])
async def test_a_client_that_leaves_cancels_its_request(begin: bool) -> None:
    held = Held(begin=begin)
    async with RelayServer(held, app) as relay:
        async with RawClient(relay.port) as client:
            client.send(post())
            await until(lambda: held.running == 1, "the handler runs")
        await until(lambda: held.cancelled == 1, "the handler was cancelled")
        await until(lambda: relay.connections == 0, "the connection is gone")


async def test_an_application_learns_that_its_client_left() -> None:
    heard: list[str] = []

    async def wait_for_news(_scope: Message, receive: Receive, send: Send) -> None:
        heard.append((await receive())["type"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        heard.append((await receive())["type"])
        await send({"type": "http.response.body", "body": b"b", "more_body": True})
        await send({"type": "http.response.body"})
        heard.append("ended")

    async with RelayServer(echo, wait_for_news) as relay:
        async with RawClient(relay.port) as client:
            client.send(get())
            await client.reader.readuntil(b"a")
        await until(lambda: heard == ["http.request", "http.disconnect", "ended"], "it was told and ended")


async def test_a_client_that_does_not_read_stops_the_writer() -> None:
    """Memory for a slow client is the write buffer's bound and one piece, however much there is to send."""
    written = 0
    done = asyncio.Event()

    async def flood(_request: DataRequest, responder: Responder) -> None:
        nonlocal written
        responder.start(200, [])
        for _ in range(2000):
            responder.write(b"x" * 16384)
            written += 16384
            await responder.drain()
        responder.end()
        done.set()

    async with RelayServer(flood, app) as relay, RawClient(relay.port, read_limit_bytes=1024) as client:
        client.send(post())
        seen = -1
        while seen != written:  # until it stands still
            seen = written
            await asyncio.sleep(0.1)
        assert written < 12_000_000, "what the kernel's buffers hold, and little more"
        assert not done.is_set()
        total = 0
        async with asyncio.timeout(20):
            while not done.is_set() or total < 2000 * 16384:
                total += len(await client.reader.read(2**20))
        assert written == 2000 * 16384


async def test_a_client_that_never_reads_is_dropped() -> None:
    held = asyncio.Event()

    async def flood(_request: DataRequest, responder: Responder) -> None:
        responder.start(200, [])
        try:
            while True:
                responder.write(b"x" * 65536)
                await responder.drain()
                await asyncio.sleep(0)
        finally:
            held.set()

    limits = RelayLimits(stalled_write_s=0.3, tick_s=0.02)
    async with RelayServer(flood, app, limits=limits) as relay, RawClient(relay.port, read_limit_bytes=1024) as client:
        client.send(post())
        async with asyncio.timeout(10):
            await held.wait()
        await until(lambda: relay.connections == 0, "the connection is gone")


async def test_a_client_that_only_sends_is_not_read_for_ever() -> None:
    held = Held()
    async with RelayServer(held, app) as relay, RawClient(relay.port) as client:
        client.send(post(body=b"first"))
        await until(lambda: held.running == 1, "the first request runs")
        block = post(body=b"x" * 60_000)
        for _ in range(400):
            client.send(block)
        await asyncio.sleep(0.2)
        assert client.writer.transport.get_write_buffer_size() > 10_000_000, "most of it is still the client's"
        held.go_on.set()
        assert (await client.answer()).body == b"first"
        for _ in range(400):
            assert len((await client.answer()).body) == 60_000


@pytest.mark.parametrize(
    ("sent", "part"),
    [(b"POST /v1/x HT", "headers"), (b"POST /v1/x HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\nab", "body")],
)
async def test_a_client_too_slow_to_ask_is_told_so(sent: bytes, part: str) -> None:
    limits = RelayLimits(head_s=0.1, body_idle_s=0.1, idle_s=5, tick_s=0.02)
    async with RelayServer(echo, app, limits=limits) as relay, RawClient(relay.port) as client:
        client.send(sent)
        answer = await client.answer()
        assert (answer.status, code(answer)) == (408, "request_timed_out")
        assert part in json.loads(answer.body)["error"]["message"]


async def test_a_head_that_drips_is_not_waited_for() -> None:
    limits = RelayLimits(head_s=0.2, idle_s=5, tick_s=0.02)
    async with RelayServer(echo, app, limits=limits) as relay, RawClient(relay.port) as client:
        for letter in b"GET / HTTP/1.1\r\nHost: h\r\nX: " + b"x" * 1000:
            client.send(bytes([letter]))
            if client.reader.at_eof() or client.reader._buffer:  # type: ignore[attr-defined]
                break
            await asyncio.sleep(0.01)
        assert (await client.answer()).status == 408


async def test_an_idle_connection_is_closed_in_silence() -> None:
    limits = RelayLimits(idle_s=0.1, tick_s=0.02)
    async with RelayServer(echo, app, limits=limits) as relay, RawClient(relay.port) as client:
        assert (await client.ask(post())).status == 200
        assert await client.ended() == b""


async def test_a_long_answer_is_not_idle() -> None:
    held = Held()
    limits = RelayLimits(idle_s=0.05, head_s=0.05, tick_s=0.01)
    async with RelayServer(held, app, limits=limits) as relay, RawClient(relay.port) as client:
        client.send(post())
        await until(lambda: held.running == 1, "the handler runs")
        await asyncio.sleep(0.3)
        held.go_on.set()
        assert (await client.answer()).status == 200


async def test_connections_past_the_limit_are_told_to_come_later() -> None:
    limits = RelayLimits(connections=1)
    async with RelayServer(echo, app, limits=limits) as relay, RawClient(relay.port) as first:
        assert (await first.ask(post())).status == 200
        async with RawClient(relay.port) as second:
            answer = await second.answer()
            assert (answer.status, code(answer), answer.headers["retry-after"]) == (503, "gateway_full", "1")
        assert (await first.ask(post())).status == 200


async def test_a_port_in_use_is_named_with_its_option() -> None:
    async with RelayServer(echo, app) as relay:
        with pytest.raises(PortInUse) as caught:
            await RelayServer(echo, app, port=relay.port).__aenter__()
        assert str(caught.value) == f"port {relay.port} is in use; choose another with --port"
    async with RelayServer(echo, app, port=relay.port) as again:
        assert again.port == relay.port


async def test_a_name_with_two_addresses_is_served_at_both(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(_host: str, port: int, **_: object) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in ("127.0.0.2", "127.0.0.1")]

    with monkeypatch.context() as named:
        named.setattr(socket, "getaddrinfo", found)
        relay = await RelayServer(echo, app, host="gateway").__aenter__()
    try:
        for address in ("127.0.0.1", "127.0.0.2"):
            _, writer = await asyncio.open_connection(address, relay.port)
            writer.close()
            await writer.wait_closed()
    finally:
        await relay.__aexit__(None, None, None)


async def test_a_host_that_is_not_ours_is_refused() -> None:
    with pytest.raises(OptionInvalid, match="--host"):
        await RelayServer(echo, app, host="192.0.2.1").__aenter__()


async def test_leaving_lets_answers_finish_and_takes_no_more() -> None:
    held = Held(begin=True)
    relay = RelayServer(held, app)
    async with asyncio.TaskGroup() as group:
        await relay.__aenter__()
        async with RawClient(relay.port) as idle, RawClient(relay.port) as client:
            client.send(post())
            await until(lambda: held.running == 1, "the handler runs")
            leaving = group.create_task(relay.__aexit__(None, None, None))
            assert await idle.ended() == b""
            with pytest.raises(OSError):  # noqa: PT011 - which one is the system's matter
                await asyncio.open_connection("127.0.0.1", relay.port)
            held.go_on.set()
            assert (await client.answer()).whole
            assert await client.ended() == b""
            await leaving


@pytest.mark.parametrize("hurried", [False, True])
async def test_leaving_cuts_what_does_not_finish_with_a_word(*, hurried: bool) -> None:
    """`hurried`: it is not the bound that ends the patience, but whoever stops the gateway for the second time."""
    begun, waiting = Held(begin=True), Held()

    async def either(request: DataRequest, responder: Responder) -> None:
        await (begun if request.body == b"begun" else waiting)(request, responder)

    relay = RelayServer(either, app, limits=RelayLimits(drain_s=600.0 if hurried else 0.1))
    async with asyncio.TaskGroup() as group:
        await relay.__aenter__()
        async with RawClient(relay.port) as first, RawClient(relay.port) as second:
            first.send(post(body=b"begun"))
            second.send(post())
            await until(lambda: begun.running + waiting.running == 2, "both run")
            leaving = group.create_task(relay.__aexit__(None, None, None))
            if hurried:
                await asyncio.sleep(0.05)
                leaving.cancel()
            answer = await first.answer()
            assert answer.whole
            assert b'"code":"gateway_stopping"' in answer.body
            answer = await second.answer()
            assert (answer.status, code(answer)) == (503, "gateway_stopping")
            await asyncio.wait([leaving])
            assert leaving.cancelled() is hurried
    assert (begun.cancelled, waiting.cancelled) == (1, 1)


def test_the_relay_runs_on_uvloop_too() -> None:
    async def main() -> None:
        held = Held()

        async def handler(request: DataRequest, responder: Responder) -> None:
            await (held if request.body == b"held" else echo_in_chunks)(request, responder)

        async with RelayServer(handler, app, limits=RelayLimits(drain_s=0.1)) as relay:
            async with RawClient(relay.port) as client:
                client.send(post(body=b"abc") + get("/x"))
                assert (await client.answer()).pieces == (b"a", b"b", b"c")
                assert json.loads((await client.answer()).body)[1] == "/x"
                client.send(post(body=b"held"))
                await until(lambda: held.running == 1, "the handler runs")
            await until(lambda: held.cancelled == 1, "the handler was cancelled")
            async with RawClient(relay.port) as client:
                assert (await client.ask(b"nonsense\r\n\r\n")).status == 400
                assert await client.ended() == b""

    uvloop.run(main())


def test_clients_who_come_at_once_are_let_in_within_a_few_turns_of_a_busy_loop() -> None:
    """One a turn would have the last of hundreds wait for hundreds of turns, each with the work of all before it."""

    async def main() -> int:
        turns = 0
        async with RelayServer(echo, app) as relay:
            with ExitStack() as stack:
                for _ in range(64):
                    stack.enter_context(socket.create_connection(("127.0.0.1", relay.port)))
                while relay.connections < 64:
                    turns += 1
                    assert turns < 1000
                    await asyncio.sleep(0.001)
            await until(lambda: relay.connections == 0, "they have left")
        return turns

    assert uvloop.run(main()) <= 20
