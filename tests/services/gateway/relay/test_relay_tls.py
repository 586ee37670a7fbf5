"""The relay's clients over TLS, and those who fail before they have a connection."""

import asyncio
import contextlib
import json
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import uvloop

from kvherd.adapters.tls import FileServerTls, TlsFiles, TlsOptions
from kvherd.ports.worker import Responder
from kvherd.services.gateway.relay.edge import DataRequest, Message, RelayLimits
from kvherd.services.gateway.relay.handshake import REASONS, why_refused
from kvherd.services.gateway.relay.server import RelayServer
from kvherd.testing.certificates import DAY, Authority, IssuedFiles
from kvherd.testing.patience import until

pytestmark = pytest.mark.net

OPTIONS = TlsOptions("--cert", "--key", "--ca")
PATIENCE_S = 20.0
ASK = b"POST /v1/any HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi"
LOOK = b"GET /any HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"


async def tell_headers(request: DataRequest, responder: Responder) -> None:
    """Answer with what a worker is told of who asked."""
    responder.start(200, [])
    responder.write(b", ".join(value for name, value in request.headers if name == b"forwarded") + request.body)
    responder.end()


async def tell_scheme(
    scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": json.dumps(scope["scheme"]).encode()})


def under(root: Path, name: str) -> Path:
    made = root / name
    made.mkdir(exist_ok=True)
    return made


@asynccontextmanager
async def relay(
    files: IssuedFiles, *, clients: IssuedFiles | None = None, limits: RelayLimits | None = None
) -> AsyncIterator[tuple[RelayServer, list[str]]]:
    tls = FileServerTls(TlsFiles(files.certificate, files.key, clients.authority if clients else None), OPTIONS)
    told: list[str] = []
    server = RelayServer(tell_headers, tell_scheme, limits=limits, tls=tls.context, tls_refused=told.append)
    async with server:
        yield server, told


def context_of(trusted: IssuedFiles, shown: IssuedFiles | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(trusted.authority))
    if shown is not None:
        context.load_cert_chain(shown.certificate, shown.key)
    return context


async def ask(server: RelayServer, context: ssl.SSLContext, *pieces: bytes) -> bytes:
    async with asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=context)
        try:
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0)
            return await reader.read(-1)
        finally:
            writer.transport.abort()


async def test_workers_and_routes_learn_that_a_client_came_over_tls(tmp_path: Path) -> None:
    files = Authority().issue(tmp_path, "gateway")
    async with relay(files) as (server, told):
        assert b"for=127.0.0.1;proto=httpshi" in await ask(server, context_of(files), ASK)
        assert b'"https"' in await ask(server, context_of(files), LOOK)
        assert told == []
    async with RelayServer(tell_headers, tell_scheme) as plain:
        reader, writer = await asyncio.open_connection("127.0.0.1", plain.port)
        writer.write(ASK)
        answer = await reader.read(-1)
        assert b"for=127.0.0.1hi" in answer
        writer.transport.abort()


async def test_what_comes_with_the_handshake_s_last_bytes_is_not_lost(tmp_path: Path) -> None:
    """A TLS 1.3 client may send its request in the very packet that ends its handshake."""
    files = Authority().issue(tmp_path, "gateway")
    async with relay(files) as (server, _):
        async with asyncio.timeout(PATIENCE_S):
            for cut in (0, 1, 40):
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
                into, out = ssl.MemoryBIO(), ssl.MemoryBIO()
                session = context_of(files).wrap_bio(into, out, server_hostname="127.0.0.1")
                while True:
                    try:
                        session.do_handshake()
                        break
                    except ssl.SSLWantReadError:
                        writer.write(out.read())
                        into.write(await reader.read(65536))
                session.write(ASK)
                packet = out.read()
                writer.write(packet[:cut])
                await asyncio.sleep(0)
                writer.write(packet[cut:])
                got = b""
                while b"proto=https" not in got:
                    try:
                        got += session.read(65536)
                    except ssl.SSLWantReadError:
                        into.write(await reader.read(65536))
                writer.transport.abort()


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_hello_that_is_there_before_anybody_looks_is_not_lost(
    tmp_path: Path, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """The clients connect and greet while the loop does nothing else, as on a machine that has much to do."""
    files = Authority().issue(tmp_path, "gateway")

    async def many() -> None:
        async with relay(files) as (server, told), asyncio.timeout(PATIENCE_S):
            for _ in range(4):
                greeted = [greeting(server.port, context_of(files)) for _ in range(4)]
                for session in greeted:
                    assert b"proto=https" in await asyncio.to_thread(session)
            assert told == []

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(many())


def greeting(port: int, context: ssl.SSLContext) -> Callable[[], bytes]:
    """Connect and say hello, blocking; what is returned goes on from there, asks, and returns the answer."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
    into, out = ssl.MemoryBIO(), ssl.MemoryBIO()
    session = context.wrap_bio(into, out, server_hostname="127.0.0.1")
    with contextlib.suppress(ssl.SSLWantReadError):
        session.do_handshake()
    connection.sendall(out.read())

    def exchange() -> bytes:
        with connection:
            asked, got = False, b""
            while b"proto=https" not in got:
                try:
                    if not asked:
                        session.do_handshake()
                        session.write(ASK)
                        asked = True
                        connection.sendall(out.read())
                    got += session.read(65536)
                except ssl.SSLWantReadError:
                    data = connection.recv(65536)
                    assert data, "it was closed"
                    into.write(data)
            return got

    return exchange


async def test_a_server_that_stops_lets_half_greeted_clients_go(tmp_path: Path) -> None:
    files = Authority().issue(tmp_path, "gateway")
    into, out = ssl.MemoryBIO(), ssl.MemoryBIO()
    session = context_of(files).wrap_bio(into, out, server_hostname="127.0.0.1")
    with contextlib.suppress(ssl.SSLWantReadError):
        session.do_handshake()
    async with asyncio.timeout(PATIENCE_S):
        async with relay(files) as (server, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(out.read())
            assert await reader.readexactly(1)  # its part of the handshake has begun
        await reader.read(-1)
        writer.transport.abort()


async def test_who_fails_at_the_handshake_is_counted_by_why_and_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority()
    files, good = authority.issue(tmp_path, "gateway"), authority.issue(tmp_path, "good")
    expired = authority.issue(tmp_path, "expired", starts=-9 * DAY, ends=-DAY)
    stranger = Authority("another").issue(under(tmp_path, "b"), "stranger")
    caplog.set_level(logging.WARNING, logger="kvherd")
    async with relay(files, clients=files) as (server, told):
        assert b"proto=https" in await ask(server, context_of(files, good), ASK)
        cases = [(expired, "certificate_expired"), (stranger, "certificate_untrusted"), (None, "certificate_missing")]
        for shown, reason in cases * 2:
            before = len(told)
            with contextlib.suppress(OSError):  # clients of TLS 1.3 see it close, or learn why
                assert await ask(server, context_of(files, shown), ASK) == b""
            await until(lambda before=before: len(told) > before)  # type: ignore[misc]
            assert told[-1] == reason
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(ASK)
        await reader.read(-1)
        await until(lambda: told[-1] == "no_tls")
        writer.transport.abort()
        with pytest.raises(ssl.SSLCertVerificationError):
            await ask(server, context_of(stranger), ASK)
        await until(lambda: told[-1] in ("refused_by_client", "left"))
        assert b"proto=https" in await ask(server, context_of(files, good), ASK)
    lines = [line for line in caplog.messages if "turned away" in line]
    assert sum("127.0.0.1 was turned away at its TLS handshake: its certificate has expired" in it for it in lines) == 1
    assert sum("it showed no certificate, and must" in line for line in lines) == 1
    assert set(told) <= set(REASONS)


async def test_a_client_that_never_completes_its_handshake_is_let_go(tmp_path: Path) -> None:
    files = Authority().issue(tmp_path, "gateway")
    async with relay(files, limits=RelayLimits(head_s=0.2)) as (server, told), asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"\x16\x03\x01")  # the beginning of a hello
        assert await reader.read(-1) == b""
        await until(lambda: told == ["too_slow"])
        writer.transport.abort()


async def test_handshakes_under_way_are_bounded(tmp_path: Path) -> None:
    files = Authority().issue(tmp_path, "gateway")
    async with relay(files, limits=RelayLimits(connections=2)) as (server, _), asyncio.timeout(PATIENCE_S):
        held = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(2)]
        await until(lambda: len(server._handshakes[0]._under_way) == 2)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        assert await reader.read(-1) == b""
        for _, each in [*held, (reader, writer)]:
            each.transport.abort()


async def test_leaving_ends_handshakes_that_are_under_way(tmp_path: Path) -> None:
    files = Authority().issue(tmp_path, "gateway")
    async with asyncio.timeout(PATIENCE_S):
        async with relay(files) as (server, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            await until(lambda: len(server._handshakes[0]._under_way) == 1)
        assert await reader.read(-1) == b""
        writer.transport.abort()


async def test_a_certificate_that_expires_while_it_is_shown_is_refused_by_clients_and_counted(tmp_path: Path) -> None:
    files = Authority().issue(tmp_path, "gateway", ends=timedelta(seconds=2))
    async with relay(files) as (server, told):
        context = context_of(files)

        async def refused() -> bool:
            try:
                await ask(server, context, ASK)
            except ssl.SSLCertVerificationError as error:
                return "expired" in str(error)
            return False

        async with asyncio.timeout(PATIENCE_S):
            while not await refused():  # noqa: ASYNC110 - what ends it is the clock of X.509
                await asyncio.sleep(0.05)
        await until(lambda: bool(told) and set(told) <= {"refused_by_client", "left"})


@pytest.mark.parametrize("reason", ["UNKNOWN_CA", "TLSV1_ALERT_UNKNOWN_CA", "SSLV3_ALERT_CERTIFICATE_EXPIRED", "X"])
def test_every_refusal_has_a_reason_that_is_a_label(reason: str) -> None:
    error = ssl.SSLError(1, f"[SSL: {reason}] words")
    error.reason = reason
    assert why_refused(error)[0] in REASONS


def test_the_same_holds_on_the_loop_that_gateways_run_on(tmp_path: Path) -> None:
    async def story() -> None:
        await test_what_comes_with_the_handshake_s_last_bytes_is_not_lost(tmp_path)
        await test_a_client_that_never_completes_its_handshake_is_let_go(tmp_path)
        await test_leaving_ends_handshakes_that_are_under_way(tmp_path)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(story())
