"""Requests and answers as nobody should write them: each is served right or refused in JSON, and what follows on the
connection is never confused with it.
"""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from kvherd.adapters.http_worker import HttpWorker
from kvherd.core.ids import WorkerId
from kvherd.ports.worker import Call, Flight, Landed, Responder
from kvherd.services.gateway.relay.edge import DataRequest, Message, RelayLimits
from kvherd.services.gateway.relay.incoming import Incoming, Refusal
from kvherd.services.gateway.relay.requests import RequestParser
from kvherd.services.gateway.relay.server import RelayServer
from kvherd.testing.raw_http import SSE_HEAD, RawClient, RawRequest, RawServer, Script, chunk, json_answer, until

LIMITS = RelayLimits(body_bytes=1000, head_bytes=2000, headers=20)
H = b"POST /v1/x HTTP/1.1\r\nHost: h\r\n"
CHUNKED = H + b"Transfer-Encoding: chunked\r\n\r\n"
NEXT = b"POST /v1/next HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\nnext"


def told(headers: bytes = b"", body: bytes = b"hi", length: bytes = b"2") -> bytes:
    return H + headers + b"Content-Length: " + length + b"\r\n\r\n" + body


SERVED = {
    "plain": told(),
    "empty lines first": b"\r\n\r\n" + told(),
    "zeros before the length": told(length=b"0002"),
    "spaces around the length": told(length=b" \t2 "),
    "absolute form": told().replace(b"/v1/x", b"http://elsewhere/v1/x"),
    "a name without letters in lower case": told(b"hOsT2: a\r\n"),
    "no host named": told().replace(b"Host: h", b"Host:"),
    "a host of IPv6": told().replace(b"Host: h", b"Host: [::1]:80"),
    "bytes over 127 in a value": told(b"X-A: \xff\xfe\r\n"),
    "a coding in capitals": CHUNKED.replace(b"chunked", b"Chunked") + b"2\r\nhi\r\n0\r\n\r\n",
    "two chunks": CHUNKED + b"1\r\nh\r\n1\r\ni\r\n0\r\n\r\n",
    "zeros before a chunk's size": CHUNKED + b"0002\r\nhi\r\n000\r\n\r\n",
    "chunk extensions": CHUNKED + b'2;a=b;c="d"\r\nhi\r\n0;e\r\n\r\n',
    "a trailer": CHUNKED + b"2\r\nhi\r\n0\r\nX-Sum: 1\r\n\r\n",
    "a trailer that names another host": CHUNKED + b"2\r\nhi\r\n0\r\nHost: other\r\n\r\n",
    "a wish to speak h2c": told(b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n"),
    "a nominated length": told(b"Connection: content-length\r\n"),
    "a coding with an underscore": told(b"Transfer_Encoding: chunked\r\n"),
    "a length with an underscore": told(b"Content_Length: 40\r\n"),
    "many small headers": told(b"A: b\r\n" * 15),
    "a tab before the coding": CHUNKED.replace(b" chunked", b"\tchunked") + b"2\r\nhi\r\n0\r\n\r\n",
    "a tab after the length": told(length=b"2\t"),
    "a tab in a value": told(b"X-A: a\tb\r\n"),
    "a nominated coding": CHUNKED.replace(b"\r\n\r\n", b"\r\nConnection: transfer-encoding\r\n\r\n")
    + b"2\r\nhi\r\n0\r\n\r\n",
    "forty zeros before a chunk's size": CHUNKED + b"0" * 40 + b"2\r\nhi\r\n0\r\n\r\n",
    "a trailer that wishes to upgrade": CHUNKED + b"2\r\nhi\r\n0\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n",
    "absolute form with a user": told().replace(b"/v1/x", b"http://a:b@h/v1/x"),
    "absolute form without a host": told().replace(b"/v1/x", b"http:///v1/x"),
    "absolute form over TLS": told().replace(b"/v1/x", b"https://h:443/v1/x"),
    "another protocol in a value": told(b"X-A: POST /v1/x RTSP/1.0\r\n"),
    "an upgrade nobody is told of": told(b"Upgrade: h2c\r\n"),
    "a wish to speak WebSocket": told(b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: AA==\r\n"),
    "a wish to speak h2c, in chunks": CHUNKED.replace(b"\r\n\r\n", b"\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n")
    + b"2\r\nhi\r\n0\r\n\r\n",
    "an expectation in capitals": told(b"EXPECT: 100-Continue\r\n"),
    "an expectation twice": told(b"Expect: 100-continue\r\nExpect: 100-continue\r\n"),
    "an expectation in HTTP/1.0": told(b"Expect: 100-continue\r\n").replace(b"HTTP/1.1", b"HTTP/1.0"),
    "to be closed and kept": told(b"Connection: close, keep-alive\r\n"),
    "closed by its trailer": CHUNKED + b"2\r\nhi\r\n0\r\nConnection: close\r\n\r\n",
    "a name as long as a head": told(b"X" * 1500 + b": a\r\n"),
}
LAST_OF_ITS_CONNECTION = {
    "a wish to speak h2c",
    "a wish to speak WebSocket",
    "a wish to speak h2c, in chunks",
    "an expectation in HTTP/1.0",
    "to be closed and kept",
    "closed by its trailer",
}

REFUSED = {
    "CL.TE": (H + b"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nG", 400),
    "TE.CL": (H + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n1\r\na\r\n0\r\n\r\n", 400),
    "TE.TE": (H + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n", 400),
    "CL.CL": (H + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nhi", 400),
    "CL.CL alike": (H + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\nhi", 400),
    "a list of lengths": (told(length=b"2, 2"), 400),
    "a negative length": (told(length=b"-2"), 400),
    "a signed length": (told(length=b"+2"), 400),
    "a hexadecimal length": (told(length=b"0x2"), 400),
    "an empty length": (told(length=b""), 400),
    "a length past 64 bits": (told(length=b"18446744073709551618"), 400),
    "a coding after chunked": (CHUNKED.replace(b"chunked", b"chunked, gzip") + b"0\r\n\r\n", 400),
    "a coding before chunked": (CHUNKED.replace(b"chunked", b"gzip, chunked") + b"0\r\n\r\n", 400),
    "an unknown coding": (CHUNKED.replace(b"chunked", b"xchunked") + b"0\r\n\r\n", 400),
    "a quoted coding": (CHUNKED.replace(b"chunked", b'"chunked"') + b"0\r\n\r\n", 400),
    "a coding behind a vertical tab": (CHUNKED.replace(b" chunked", b" \x0bchunked") + b"0\r\n\r\n", 400),
    "no coding named": (CHUNKED.replace(b"chunked", b"") + b"0\r\n\r\n", 400),
    "a space before the colon": (H + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n", 400),
    "a folded value": (told(b"X-A: a\r\n b\r\n"), 400),
    "a folded coding": (H + b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n", 400),
    "a folded first line": (H[:-9] + b" \r\nHost: h\r\n\r\n", 400),
    "bare line feeds": (told().replace(b"\r\n", b"\n"), 400),
    "one bare line feed": (H + b"X-A: a\nContent-Length: 2\r\n\r\nhi", 400),
    "a bare return": (told(b"X-A: a\rb\r\n"), 400),
    "a null in a value": (told(b"X-A: a\x00b\r\n"), 400),
    "a null in a name": (told(b"X\x00A: a\r\n"), 400),
    "a control in a value": (told(b"X-A: \x01\r\n"), 400),
    "a header without a name": (told(b": a\r\n"), 400),
    "a header without a colon": (told(b"abc\r\n"), 400),
    "no host": (b"POST /v1/x HTTP/1.1\r\nContent-Length: 2\r\n\r\nhi", 400),
    "two hosts": (told(b"Host: h\r\n"), 400),
    "a host with a space": (told().replace(b"Host: h", b"Host: a b"), 400),
    "a host with a path": (told().replace(b"Host: h", b"Host: a/b"), 400),
    "a target with a space": (told().replace(b"/v1/x", b"/v1/x y"), 400),
    "a target with a fragment": (told().replace(b"/v1/x", b"/v1/x#y"), 400),
    "a target over 127": (told().replace(b"/v1/x", b"/v1/\xc3\xa9"), 400),
    "no version": (b"GET /v1/x\r\n\r\n", 400),
    "another protocol": (told().replace(b"HTTP/1.1", b"RTSP/1.0"), 400),
    "another protocol, of our version": (told().replace(b"HTTP/1.1", b"RTSP/1.1"), 400),
    "another protocol, where HTTP is told of": (
        told(b"X: /v1/x HTTP/1.1\r\n").replace(b"HTTP/1.1", b"RTSP/1.0", 1),
        400,
    ),
    "a stream's source": (b"SOURCE /v1/x ICE/1.0\r\nHost: h\r\n\r\n", 400),
    "two spaces after the method": (told().replace(b"POST ", b"POST  "), 400),
    "two spaces after the target": (told().replace(b" HTTP", b"  HTTP"), 400),
    "another version": (told().replace(b"HTTP/1.1", b"HTTP/1.2"), 400),
    "version two": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "an unknown method": (told().replace(b"POST", b"BREW"), 400),
    "a method in small letters": (told().replace(b"POST", b"post"), 400),
    "CONNECT": (b"CONNECT h:1 HTTP/1.1\r\nHost: h\r\n\r\n", 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", 400),
    "a chunk's size with 0x": (CHUNKED + b"0x2\r\nhi\r\n0\r\n\r\n", 400),
    "a negative chunk": (CHUNKED + b"-2\r\nhi\r\n0\r\n\r\n", 400),
    "an empty chunk's size": (CHUNKED + b"\r\nhi\r\n0\r\n\r\n", 400),
    "a space in a chunk's size": (CHUNKED + b"2 \r\nhi\r\n0\r\n\r\n", 400),
    "a chunk's size past 64 bits": (CHUNKED + b"ffffffffffffffff2\r\nhi\r\n", 400),
    "a bare line feed after a size": (CHUNKED + b"2\nhi\r\n0\r\n\r\n", 400),
    "a bare line feed after a chunk": (CHUNKED + b"2\r\nhi\n0\r\n\r\n", 400),
    "a bare line feed after an extension": (CHUNKED + b"2;a\nhi\r\n0\r\n\r\n", 400),
    "a chunk longer than its size": (CHUNKED + b"2\r\nhixx\r\n0\r\n\r\n", 400),
    "a length in a trailer": (CHUNKED + b"2\r\nhi\r\n0\r\nContent-Length: 5\r\n\r\n", 400),
    "an unknown expectation": (told(b"Expect: a miracle\r\n"), 400),
    "chunks in HTTP/1.0": (CHUNKED.replace(b"1.1", b"1.0") + b"0\r\n\r\n", 400),
    "two lengths with spaces between": (told(length=b"2 2"), 400),
    "a length in digits of another script": (told(length="２".encode()), 400),
    "a length behind a vertical tab": (told(length=b"\x0b2"), 400),
    "a length with a null": (told(length=b"2\x00"), 400),
    "a fraction of a length": (told(length=b"2.0"), 400),
    "a quoted length": (told(length=b'"2"'), 400),
    "a length and a parameter": (told(length=b"2;a=b"), 400),
    "two lengths in other letters": (H + b"Content-Length: 2\r\ncOnTeNt-LeNgTh: 2\r\n\r\nhi", 400),
    "chunked twice": (H + b"Transfer-Encoding: chunked\r\n" * 2 + b"\r\n2\r\nhi\r\n0\r\n\r\n", 400),
    "chunked twice in a list": (CHUNKED.replace(b"chunked", b"chunked, chunked") + b"2\r\nhi\r\n0\r\n\r\n", 400),
    "a list with nothing before chunked": (CHUNKED.replace(b"chunked", b", chunked") + b"2\r\nhi\r\n0\r\n\r\n", 400),
    "a list with nothing after chunked": (CHUNKED.replace(b"chunked", b"chunked,") + b"2\r\nhi\r\n0\r\n\r\n", 400),
    "a coding with a parameter": (CHUNKED.replace(b"chunked", b"chunked;q=1") + b"2\r\nhi\r\n0\r\n\r\n", 400),
    "a coding cut in two": (CHUNKED.replace(b"chunked", b"chu nked") + b"2\r\nhi\r\n0\r\n\r\n", 400),
    "a coding behind a null": (CHUNKED.replace(b" chunked", b"\x00chunked") + b"2\r\nhi\r\n0\r\n\r\n", 400),
    "a coding that changes nothing": (H + b"Transfer-Encoding: identity\r\nContent-Length: 2\r\n\r\nhi", 400),
    "a tab before the colon": (H + b"Transfer-Encoding\t: chunked\r\n\r\n0\r\n\r\n", 400),
    "a space before the first header": (told().replace(b"\r\nHost", b"\r\n Host"), 400),
    "a DEL in a value": (told(b"X-A: \x7f\r\n"), 400),
    "an escape in a value": (told(b"X-A: \x1b[0m\r\n"), 400),
    "a name over 127": (told(b"X-\xe9: a\r\n"), 400),
    "a name with a space": (told(b"X A: a\r\n"), 400),
    "a name of HTTP/2": (told(b":path: /flush_cache\r\n"), 400),
    "a host over 127": (told().replace(b"Host: h", b"Host: \xe9"), 400),
    "a host with a user": (told().replace(b"Host: h", b"Host: a@b"), 400),
    "two hosts in HTTP/1.0": (told(b"Host: h\r\n").replace(b"1.1", b"1.0"), 400),
    "a target without a slash": (told().replace(b"/v1/x", b"v1/x"), 400),
    "a target that is a query": (told().replace(b"/v1/x", b"?x"), 400),
    "a target that is a host": (told().replace(b"/v1/x", b"h:80"), 400),
    "a null in the target": (told().replace(b"/v1/x", b"/v1/x\x00"), 400),
    "a tab in the target": (told().replace(b"/v1/x", b"/v1/x\ty"), 400),
    "a space after the version": (told().replace(b"HTTP/1.1", b"HTTP/1.1 "), 400),
    "a version in small letters": (told().replace(b"HTTP/1.1", b"http/1.1"), 400),
    "a version of two digits": (told().replace(b"HTTP/1.1", b"HTTP/1.10"), 400),
    "a tab after the method": (told().replace(b"POST ", b"POST\t"), 400),
    "CONNECT to a path, with a body": (told().replace(b"POST", b"CONNECT"), 400),
    "CONNECT to a whole URL": (b"CONNECT http://h/v1/x HTTP/1.1\r\nHost: h\r\n\r\n", 400),
    "a signed chunk": (CHUNKED + b"+2\r\nhi\r\n0\r\n\r\n", 400),
    "a tab after a chunk's size": (CHUNKED + b"2\t\r\nhi\r\n0\r\n\r\n", 400),
    "a space before a chunk's size": (CHUNKED + b" 2\r\nhi\r\n0\r\n\r\n", 400),
    "a null after a chunk's size": (CHUNKED + b"2\x00\r\nhi\r\n0\r\n\r\n", 400),
    "a space before an extension": (CHUNKED + b"2 ;a\r\nhi\r\n0\r\n\r\n", 400),
    "a null in an extension": (CHUNKED + b"2;a\x00\r\nhi\r\n0\r\n\r\n", 400),
    "a line end quoted in an extension": (CHUNKED + b'2;a="\r\n0\r\n\r\n"\r\nhi\r\n0\r\n\r\n', 400),
    "a bare return in an extension": (CHUNKED + b"2;a\rb\r\nhi\r\n0\r\n\r\n", 400),
    "a bare return after a size": (CHUNKED + b"2\rhi\r\n0\r\n\r\n", 400),
    "two returns after a size": (CHUNKED + b"2\r\r\nhi\r\n0\r\n\r\n", 400),
    "no line end after a chunk": (CHUNKED + b"2\r\nhi0\r\n\r\n", 400),
    "a bare line feed at the end": (CHUNKED + b"2\r\nhi\r\n0\r\n\n", 400),
    "a folded trailer": (CHUNKED + b"2\r\nhi\r\n0\r\nX-A: a\r\n b\r\n\r\n", 400),
    "a bare line feed in a trailer": (CHUNKED + b"2\r\nhi\r\n0\r\nX-A: a\n\r\n", 400),
    "a coding in a trailer": (CHUNKED + b"2\r\nhi\r\n0\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
    "a null in a trailer": (CHUNKED + b"2\r\nhi\r\n0\r\nX-A: \x00\r\n\r\n", 400),
    "expectations in a list": (told(b"Expect: 100-continue, a miracle\r\n"), 400),
    "a body over the limit": (told(length=b"1001"), 413),
    "a body over the limit, asked for first": (told(b"Expect: 100-continue\r\n", length=b"1001"), 413),
    "a body over the limit, with a wish to upgrade": (
        told(b"Connection: Upgrade\r\nUpgrade: h2c\r\n", length=b"1001"),
        413,
    ),
    "a body of 2^63 bytes": (told(length=b"9223372036854775808"), 413),
    "a chunk of 2^63 bytes": (CHUNKED + b"8000000000000000\r\n" + b"x" * 1001, 413),
    "chunks over the limit": (CHUNKED + (b"100\r\n" + b"x" * 256 + b"\r\n") * 4, 413),
    "a head over the limit": (told(b"X-A: " + b"a" * 2000 + b"\r\n"), 431),
    "a target over the limit": (told().replace(b"/v1/x", b"/v1/" + b"x" * 2000), 431),
    "headers over the limit": (told(b"A: b\r\n" * 21), 431),
}
BADLY_ASKED = [pytest.param(*case, id=name) for name, case in REFUSED.items()]
ODDLY_ASKED = [pytest.param(name, sent, id=name) for name, sent in SERVED.items()]

Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


async def app(scope: Message, receive: Receive, send: Send) -> None:
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": f"{scope['method']} {scope['path']}".encode()})


async def what_it_saw(request: RawRequest, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(json_answer(json.dumps([request.target, request.body.decode("latin-1")]).encode()))


@dataclass
class Stage:
    relay: RelayServer
    engine: RawServer

    def client(self) -> RawClient:
        return RawClient(self.relay.port)

    @property
    def seen(self) -> list[tuple[str, bytes]]:
        return [(request.target, request.body) for request in self.engine.requests]


@asynccontextmanager
async def stage(
    script: Script = what_it_saw, limits: RelayLimits = LIMITS, *, launched: bool = False
) -> AsyncIterator[Stage]:
    """A relay before one engine, and an application beside it. `launched`: so is the first request, since the worker
    was asked for its health and kept the connection.
    """
    async with RawServer(script) as engine:
        worker = HttpWorker(WorkerId(engine.url), engine.url)

        def called(incoming: DataRequest) -> Call:
            return Call(incoming.method, incoming.target, incoming.headers, incoming.body, incoming.request)

        async def forward(incoming: DataRequest, responder: Responder) -> None:
            await worker.forward(called(incoming), responder)

        def launch(incoming: DataRequest, responder: Responder, landed: Landed) -> Flight | None:
            return worker.launch(called(incoming), responder, landed)

        async with RelayServer(forward, app, launch=launch, limits=limits) as relay:
            if launched:
                await worker.probe()
                engine.requests.clear()
            yield Stage(relay, engine)
        await worker.close()


MADE = frozenset({b"x-request-id", b"traceparent"})


def _meant(name: bytes, value: bytes) -> tuple[bytes, bytes]:
    """Zeros before a length mean nothing."""
    return name, b"%d" % int(value) if name == b"content-length" else value


def read(*pieces: bytes) -> list[object]:
    """What a parser makes of a request that comes in these pieces, and how it left the connection."""
    parser = RequestParser(LIMITS, "127.0.0.1:1")
    for piece in pieces:
        parser.feed(piece)
    seen: list[object] = []
    for item in parser.ready:
        match item:
            case Incoming(request=one):
                named = sorted(_meant(*header) for header in one.headers if header[0] not in MADE)
                seen.append((one.method, one.target, one.body, named, item.keep_alive, item.http10))
            case Refusal(error=error):
                seen.append(type(error))
    return [*seen, parser.ended]


@pytest.mark.parametrize("sent", [*SERVED.values(), *(sent for sent, _ in REFUSED.values())])
def test_a_request_cut_anywhere_is_read_as_the_whole_is(sent: bytes) -> None:
    whole = read(sent + NEXT)
    assert read(*(bytes([byte]) for byte in sent + NEXT)) == whole
    for at in range(1, len(sent)):
        assert read(sent[:at], sent[at:] + NEXT) == whole


@pytest.mark.net
@pytest.mark.parametrize(("name", "sent"), ODDLY_ASKED)
async def test_what_is_odd_but_clear_is_served_and_so_is_the_next(name: str, sent: bytes) -> None:
    async with stage() as at, at.client() as client:
        client.send(sent + NEXT)
        assert json.loads((await client.answer()).body) == ["/v1/x", "hi"]
        if name in LAST_OF_ITS_CONNECTION:
            assert await client.ended() == b""
            assert at.seen == [("/v1/x", b"hi")]
        else:
            assert json.loads((await client.answer()).body) == ["/v1/next", "next"]
            assert at.seen == [("/v1/x", b"hi"), ("/v1/next", b"next")]


@pytest.mark.net
@pytest.mark.parametrize(("sent", "status"), BADLY_ASKED)
async def test_what_is_not_clear_is_refused_and_nothing_after_it_is_read(sent: bytes, status: int) -> None:
    async with stage() as at, at.client() as client:
        client.send(NEXT + sent + NEXT)
        assert json.loads((await client.answer()).body) == ["/v1/next", "next"]
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (status, "close")
        error = json.loads(answer.body)["error"]
        assert error["message"]
        assert error["type"] == "invalid_request_error"
        assert await client.ended() == b""
        assert at.seen == [("/v1/next", b"next")]


@pytest.mark.net
async def test_other_methods_and_targets_are_the_applications() -> None:
    async with stage() as at, at.client() as client:
        for line, told_app in {
            b"OPTIONS *": "OPTIONS *",
            b"OPTIONS /v1/x": "OPTIONS /v1/x",
            b"GET /v1/x": "GET /v1/x",
            b"PURGE /v1/x": "PURGE /v1/x",
            b"POST http://h": "POST /",
            b"POST /v1/../flush_cache": "POST /v1/../flush_cache",
            b"POST /v1/%2e%2e/flush_cache": "POST /v1/../flush_cache",
            b"POST //v1/x": "POST //v1/x",
        }.items():
            answer = await client.ask(line + b" HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\nbody")
            assert answer.body.decode() == told_app
        client.send(b"HEAD /v1/x HTTP/1.1\r\nHost: h\r\n\r\n" + NEXT)
        assert (await client.answer(to_head=True)).status == 200
        assert json.loads((await client.answer()).body) == ["/v1/next", "next"]
        assert at.seen == [("/v1/next", b"next")]


@pytest.mark.net
async def test_headers_of_one_hop_stay_on_it_both_ways() -> None:
    async def answer(request: RawRequest, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        extra = (
            b"Connection: X-Mine, keep-alive\r\nX-Mine: 1\r\nKeep-Alive: timeout=5\r\nTE: gzip\r\nTrailer: X-T\r\n"
            b"Upgrade: h2c\r\nProxy-Connection: close\r\nX-Kept: 1\r\n"
        )
        writer.write(json_answer(b"{}", extra=extra))

    async with stage(answer) as at, at.client() as client:
        headers = (
            b"Connection: X-Own, keep-alive\r\nX-Own: 1\r\nKeep-Alive: 5\r\nTE: trailers\r\nTrailer: X-T\r\n"
            b"Proxy-Connection: keep-alive\r\nX-Kept: 1\r\n"
        )
        for sent in (told(headers), told(), told(), told(headers)):
            answered = await client.ask(sent)
            assert answered.headers.keys() == {"content-type", "content-length", "x-kept", "x-request-id"}
        assert {name for name, _ in at.engine.requests[0].headers} == {
            *("host", "x-kept", "content-length", "x-request-id", "traceparent", "forwarded", "x-forwarded-for")
        }


@pytest.mark.net
@pytest.mark.parametrize(
    "extra", [b"", b"X-Request-Id: its own\r\n", b"Connection: close\r\n", b"X-A: 1\r\nX-A: 2\r\n"]
)
async def test_an_answer_whose_head_comes_again_is_written_as_the_first_was(extra: bytes) -> None:
    async def answer(request: RawRequest, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(json_answer(request.body, extra=extra))

    async with stage(answer) as at, at.client() as client:
        heads = set()
        for body in (b"one", b"two", b"three", b"four", b"", b"six"):
            client.send(told(b"X-Request-Id: r\r\n", body, b"%d" % len(body)))
            head = await client.reader.readuntil(b"\r\n\r\n")
            assert await client.reader.readexactly(len(body)) == body
            heads.add(frozenset(line for line in head.lower().split(b"\r\n") if not line.startswith(b"content-length")))
        assert len(heads) == 1


@pytest.mark.net
async def test_a_worker_learns_who_asked_behind_what_the_client_says_of_itself() -> None:
    async with stage() as at, at.client() as client:
        await client.ask(told(b"X-Forwarded-For: 9.9.9.9\r\nForwarded: for=9.9.9.9\r\n"))
        named = [(name, value) for name, value in at.engine.requests[0].headers if "forwarded" in name]
        assert sorted(named) == [
            ("forwarded", "for=127.0.0.1"),
            ("forwarded", "for=9.9.9.9"),
            ("x-forwarded-for", "127.0.0.1"),
            ("x-forwarded-for", "9.9.9.9"),
        ]


@pytest.mark.net
@pytest.mark.parametrize("name", [b'a"b', b"a b", b"a\\b", b"\xff", b"a" * 129, b""])
async def test_a_request_id_that_could_harm_a_log_is_replaced(name: bytes) -> None:
    async with stage() as at, at.client() as client:
        answer = await client.ask(told(b"X-Request-Id: " + name + b"\r\n"))
        given = at.engine.requests[0].header("x-request-id")
        assert given == answer.headers["x-request-id"] != name.decode("latin-1")
        assert (await client.ask(told(b"X-Request-Id: My-1_a:b/c=\r\n"))).headers["x-request-id"] == "My-1_a:b/c="


@pytest.mark.net
async def test_a_client_of_http_1_0_is_served_and_let_go() -> None:
    async with stage() as at, at.client() as client:
        client.send(b"POST /v1/x HTTP/1.0\r\nContent-Length: 2\r\n\r\nhi" + NEXT)
        answer = await client.answer()
        assert (json.loads(answer.body), answer.headers["connection"]) == (["/v1/x", "hi"], "close")
        assert await client.ended() == b""
        assert at.seen == [("/v1/x", b"hi")]


# --- clients that send their end before they have their answer ---------------------------------------------------


@pytest.mark.net
async def test_a_client_that_sends_its_end_gets_all_its_answers() -> None:
    release = asyncio.Event()

    async def wait(request: RawRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await release.wait()
        await what_it_saw(request, reader, writer)

    async with stage(wait) as at, at.client() as client:
        client.send(told() + NEXT + b"POST /v1/half HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\nhalf")
        client.writer.write_eof()
        assert (await client.answer()).status == 100  # sounded: is it still there?
        release.set()
        for said in (["/v1/x", "hi"], ["/v1/next", "next"]):
            answer = await client.answer()
            while answer.status == 100:
                answer = await client.answer()
            assert json.loads(answer.body) == said
        assert await client.ended() == b""
        assert at.seen == [("/v1/x", b"hi"), ("/v1/next", b"next")]


@pytest.mark.net
async def test_a_client_that_sends_its_end_gets_its_stream_to_the_end() -> None:
    release = asyncio.Event()

    async def stream(_: RawRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD + chunk(b"data: 1\n\n"))
        await release.wait()
        writer.write(chunk(b"data: 2\n\n") + chunk(b""))

    async with stage(stream) as at, at.client() as client:
        client.send(told())
        await client.reader.readuntil(b"data: 1\n\n\r\n")
        client.writer.write_eof()
        assert await client.reader.readexactly(1) == b"0"  # sounded, within the framing
        release.set()
        assert await client.ended() == b"9\r\ndata: 2\n\n\r\n0\r\n\r\n"
        await until(lambda: at.relay.connections == 0, "the connection is gone")


@pytest.mark.net
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("launched", [False, True])
async def test_a_client_that_finished_sending_and_then_left_ends_the_request_on_the_engine(
    begun: bool, launched: bool
) -> None:
    async def hold(request: RawRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if request.target == "/health":
            await what_it_saw(request, reader, writer)
            return
        if begun:
            writer.write(SSE_HEAD + chunk(b"data: 1\n\n"))
        await reader.readexactly(1)

    async with stage(hold, launched=launched) as at:
        async with at.client() as client:
            client.send(told())
            if begun:
                await client.reader.readuntil(b"data: 1\n\n\r\n")
            await until(lambda: len(at.seen) == 1, "the engine has the request")
            client.writer.write_eof()
            await client.reader.readexactly(1)
        await until(lambda: at.engine.left == 1, "the engine was told")
        await until(lambda: at.relay.connections == 0, "the connection is gone")


@pytest.mark.net
@pytest.mark.parametrize("sent", [b"", told()[:30], told(body=b"h")])
async def test_a_client_that_sends_its_end_before_its_request_is_let_go(sent: bytes) -> None:
    async with stage() as at, at.client() as client:
        client.send(NEXT + sent)
        assert (await client.answer()).status == 200
        client.writer.write_eof()
        assert await client.ended() == b""
        assert at.seen == [("/v1/next", b"next")]


# --- engines that answer as nobody should ------------------------------------------------------------------------

OK = b"HTTP/1.1 200 OK\r\n"
PASSED = {
    "interim answers first": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n"
    + json_answer(b"hi"),
    "no body": b"HTTP/1.1 204 No Content\r\n\r\n",
    "chunks with extensions and a trailer": OK
    + b"Transfer-Encoding: chunked\r\n\r\n2;a=b\r\nhi\r\n0\r\nX-T: 1\r\n\r\n",
    "HTTP/1.0": b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nhi",
    "an unknown status": b"HTTP/1.1 299 Whatever\r\nContent-Length: 2\r\n\r\nhi",
    "a status without a word": b"HTTP/1.1 200\r\nContent-Length: 2\r\n\r\nhi",
    "a null in the status's word": b"HTTP/1.1 200 O\x00K\r\nContent-Length: 2\r\n\r\nhi",
    "fifty interim answers": b"HTTP/1.1 102 Processing\r\n\r\n" * 50 + json_answer(b"hi"),
    "an interim answer with a length": b"HTTP/1.1 103 Early Hints\r\nContent-Length: 9\r\n\r\n" + json_answer(b"hi"),
    "a body where none may be": b"HTTP/1.1 204 No Content\r\nContent-Length: 2\r\n\r\nhi",
    "chunks where none may be": b"HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
    "a length and more bytes": OK + b"Content-Length: 2\r\n\r\nhimore",
    "a wish to upgrade": OK + b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 2\r\n\r\nhi",
    "a nominated length": OK + b"Connection: content-length\r\nContent-Length: 2\r\n\r\nhi",
    "three thousand headers": OK + b"A: b\r\n" * 3000 + b"Content-Length: 2\r\n\r\nhi",
}
BROKEN = {
    "nonsense": b"nonsense\r\n\r\n",
    "TE and CL": OK + b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
    "two lengths": OK + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nhi!",
    "a negative length": OK + b"Content-Length: -2\r\n\r\nhi",
    "a folded value": OK + b"X-A: a\r\n b\r\nContent-Length: 2\r\n\r\nhi",
    "bare line feeds": OK.replace(b"\r", b"") + b"Content-Length: 2\n\nhi",
    "a null": OK + b"X-A: \x00\r\nContent-Length: 2\r\n\r\nhi",
    "an unknown coding": OK + b"Transfer-Encoding: gzip\r\n\r\nhi",
    "a switch of protocols": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\nhi",
    "a head without end": OK + b"X-A: " + b"a" * 100_000,
    "the same length twice": OK + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\nhi",
    "a list of lengths": OK + b"Content-Length: 2, 2\r\n\r\nhi",
    "a signed length": OK + b"Content-Length: +2\r\n\r\nhi",
    "an empty length": OK + b"Content-Length:\r\n\r\nhi",
    "a length past 64 bits": OK + b"Content-Length: 18446744073709551618\r\n\r\nhi",
    "CL and TE": OK + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
    "chunked twice": OK + b"Transfer-Encoding: chunked\r\n" * 2 + b"\r\n2\r\nhi\r\n0\r\n\r\n",
    "a coding before chunked": OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
    "a folded coding": OK + b"Transfer-Encoding:\r\n chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
    "a space before the colon": OK + b"Content-Length : 2\r\n\r\nhi",
    "a bare return in a value": OK + b"X-A: a\rSet-Cookie: b\r\nContent-Length: 2\r\n\r\nhi",
    "a bare return in the status's word": b"HTTP/1.1 200 O\rX-A: b\r\nContent-Length: 2\r\n\r\nhi",
    "a name over 127": OK + b"X-\xe9: a\r\nContent-Length: 2\r\n\r\nhi",
    "a status below all": b"HTTP/1.1 099 Early\r\n\r\n" + json_answer(b"hi"),
    "a status above all": b"HTTP/1.1 600 Late\r\nContent-Length: 2\r\n\r\nhi",
    "a status of four digits": b"HTTP/1.1 2000 OK\r\nContent-Length: 2\r\n\r\nhi",
    "a word without a head": b"<html>",
    "a version of another world": b"HTTP/3.0 200 OK\r\nContent-Length: 2\r\n\r\nhi",
}
CUT = {
    "a chunk that is none": OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\nxyz\r\n",
    "a chunk's size with a bare line feed": OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n2\nho\r\n0\r\n\r\n",
    "an end before the length is full": OK + b"Content-Length: 20\r\n\r\nhi",
    "an end within a chunk": OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhi",
    "an end between chunks": OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n",
    "an end before the last line": OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n",
    "a chunk longer than its size": OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhi0\r\n\r\n",
    "a length in a trailer": OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\nContent-Length: 5\r\n\r\n",
    "a bare line feed in a trailer": OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\nX-A: a\n\r\n",
}


def once(said: bytes, *, then_end: bool = False) -> Script:
    """An engine that says this to the first request, and to others what it saw."""

    async def script(request: RawRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if request.target != "/v1/x":
            await what_it_saw(request, reader, writer)
            return
        writer.write(said)
        if then_end:
            await writer.drain()
            writer.close()

    return script


@pytest.mark.net
@pytest.mark.parametrize("said", [pytest.param(said, id=name) for name, said in PASSED.items()])
@pytest.mark.parametrize("launched", [False, True])
async def test_an_odd_but_clear_answer_is_passed_on_and_the_next_is_right(said: bytes, launched: bool) -> None:
    async with stage(once(said), launched=launched) as at, at.client() as client:
        answer = await client.ask(told())
        assert answer.whole
        assert answer.status in {200, 204, 299}
        assert answer.body in {b"hi", b""}
        assert json.loads((await client.ask(NEXT)).body) == ["/v1/next", "next"]


@pytest.mark.net
@pytest.mark.parametrize("said", [pytest.param(said, id=name) for name, said in BROKEN.items()])
@pytest.mark.parametrize("launched", [False, True])
async def test_an_answer_that_cannot_be_read_is_a_bad_gateway_and_the_next_is_right(
    said: bytes, launched: bool
) -> None:
    async with stage(once(said), launched=launched) as at, at.client() as client:
        answer = await client.ask(told())
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (502, "worker_failed")
        assert json.loads((await client.ask(NEXT)).body) == ["/v1/next", "next"]


@pytest.mark.net
@pytest.mark.parametrize("said", [pytest.param(said, id=name) for name, said in CUT.items()])
@pytest.mark.parametrize("launched", [False, True])
async def test_an_answer_that_breaks_off_is_not_taken_for_a_whole_one(said: bytes, launched: bool) -> None:
    async with stage(once(said, then_end=True), launched=launched) as at:
        async with at.client() as client:
            assert not (await client.ask(told())).whole
        async with at.client() as client:
            assert json.loads((await client.ask(NEXT)).body) == ["/v1/next", "next"]


@pytest.mark.net
@pytest.mark.parametrize("launched", [False, True])
async def test_more_than_an_answer_never_reaches_the_next_request(launched: bool) -> None:
    said = json_answer(b"hi") + json_answer(b"smuggled")
    async with stage(once(said), launched=launched) as at, at.client() as client:
        assert (await client.ask(told())).body == b"hi"
        assert json.loads((await client.ask(NEXT)).body) == ["/v1/next", "next"]


@pytest.mark.net
async def test_an_answer_that_nobody_asked_for_ends_its_connection_and_reaches_nobody() -> None:
    """1. A request is answered, and its connection kept. 2. The engine says more. 3. Another request comes."""
    release, said_more = asyncio.Event(), asyncio.Event()

    async def twice(request: RawRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await what_it_saw(request, reader, writer)
        if request.target == "/v1/x":
            await writer.drain()
            await release.wait()
            writer.write(json_answer(b"smuggled"))
            await reader.read()
            said_more.set()

    async with stage(twice) as at, at.client() as client:
        assert json.loads((await client.ask(told())).body) == ["/v1/x", "hi"]
        release.set()
        async with asyncio.timeout(10):
            await said_more.wait()
        assert json.loads((await client.ask(NEXT)).body) == ["/v1/next", "next"]
        assert at.engine.connections == 2


@pytest.mark.net
async def test_what_an_engine_says_in_the_gateway_s_name_is_left_out() -> None:
    forged = b"x-kvherd-worker: elsewhere\r\nX-Kvherd-Explain: 1\r\nX-Mine: 1\r\n"
    async with stage(once(json_answer(b"hi", extra=forged))) as at, at.client() as client:
        answer = await client.ask(told())
        assert answer.headers["x-mine"] == "1"
        assert not any(name.startswith("x-kvherd") for name in answer.headers)


@pytest.mark.net
async def test_answers_with_one_head_over_one_connection_are_each_the_right_one() -> None:
    said = [
        json_answer(b"hi"),
        json_answer(b""),
        json_answer(b"x" * 3000),
        json_answer(b"hi", extra=b"X-A: 1\r\n"),
        json_answer(b"hi", status="404 Not Found"),
        b"HTTP/1.1 103 Early Hints\r\n\r\n" + json_answer(b"hello"),
        SSE_HEAD + chunk(b"data: 1\n\n") + chunk(b""),
        json_answer(b"2\r\n\r\nhi"),
        b"HTTP/1.1 204 No Content\r\n\r\n",
    ]
    answers = [answer for answer in said for _ in range(3)]

    async def one_by_one(_: RawRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answers[len(at.engine.requests) - 1])

    async with stage(one_by_one) as at, at.client() as client:
        for answer in answers:
            got = await client.ask(told())
            assert got.status == int(answer.rpartition(b"HTTP/1.1 ")[2][:3])
            assert got.whole
            assert got.headers.get("x-a") == ("1" if b"X-A" in answer else None)
            assert got.body == (b"data: 1\n\n" if b"chunked" in answer else answer.rpartition(b"\r\n\r\n")[2]) or (
                got.body == b"2\r\n\r\nhi"
            )
            assert len(got.headers) == len({*got.headers})
        assert at.engine.connections == 1


# --- what nobody thought of ---------------------------------------------------------------------------------------

PIECES = (
    *(b"\r", b"\n", b"\r\n", b"\x00", b" ", b"\t", b":", b";", b",", b"0", b"2", b"\xff", b"0\r\n\r\n", b"CONNECT "),
    *(b"Content-Length: 2\r\n", b"Transfer-Encoding: chunked\r\n", b"Connection: Upgrade\r\nUpgrade: h2c\r\n"),
    *(b"Expect: 100-continue\r\n", b"Connection: close\r\n", b"Host: h\r\n", b"HTTP/1.0", b"X-Request-Id: a\r\n"),
)


def spoilt(sent: bytes, dice: random.Random) -> bytes:
    """One to three small changes somewhere in it."""
    for _ in range(dice.randrange(1, 4)):
        at = dice.randrange(len(sent) + 1)
        match dice.randrange(3):
            case 0:
                sent = sent[:at] + dice.choice(PIECES) + sent[at:]
            case 1:
                sent = sent[:at] + sent[at + dice.randrange(1, 4) :]
            case _:
                sent = sent[:at] + bytes([dice.randrange(256)]) + sent[at + 1 :]
    return sent


@pytest.mark.parametrize("seed", range(8))
def test_a_spoilt_request_is_read_alike_however_it_is_cut(seed: int) -> None:
    dice = random.Random(seed)
    whole = [*SERVED.values(), *(sent for sent, _ in REFUSED.values() if len(sent) < 1000)]
    for _ in range(100):
        sent = spoilt(dice.choice(whole), dice) + NEXT
        at = dice.randrange(1, len(sent))
        assert read(sent) == read(sent[:at], sent[at:]) == read(*(bytes([byte]) for byte in sent)), sent


@pytest.mark.parametrize("seed", range(4))
def test_a_spoilt_request_is_read_alike_whatever_was_read_before(seed: int) -> None:
    """A head that came before is remembered: one that only looks like it must not be taken for it."""
    dice = random.Random(seed)
    for _ in range(100):
        usual = dice.choice((told(), told(b"X-A: a\r\n"), H + b"Content-Length: 12\r\nX-B: 1\r\n\r\nhello, hello"))
        sent = spoilt(usual, dice)
        assert read(usual, usual, usual, sent, NEXT)[3:] == read(sent, NEXT), sent
