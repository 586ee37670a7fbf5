"""Generations of gRPC workers over TLS: our own HTTP/2, before real gRPC servers with certificates."""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import grpc
import pytest
import uvloop

from kvherd.adapters.grpc_wires import GrpcWires
from kvherd.adapters.tls import ClientTls, TlsFiles, TlsOptions
from kvherd.testing.certificates import DAY, Authority, IssuedFiles
from kvherd.testing.grpc_engine import FakeGrpcEngine
from kvherd.testing.patience import until

pytestmark = pytest.mark.net

OPTIONS = TlsOptions("--worker-cert", "--worker-key", "--worker-ca")
PATIENCE_S = 20.0
PATH = "/any.Service/"


class Heard:
    """Keeps what came."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.end: tuple[str, str] | None = None

    def message(self, data: bytes) -> None:
        self.messages.append(data)

    def ended(self, status: str, words: str) -> None:
        self.end = status, words

    async def over(self) -> tuple[str, str]:
        await until(lambda: self.end is not None, within_s=PATIENCE_S)
        assert self.end is not None
        return self.end


def under(root: Path, name: str) -> Path:
    made = root / name
    made.mkdir(exist_ok=True)
    return made


def trusting(trusted: IssuedFiles, shown: IssuedFiles | None = None, name: str | None = None) -> ClientTls:
    certificate, key = (shown.certificate, shown.key) if shown else (None, None)
    return ClientTls(TlsFiles(certificate, key, trusted.authority, name), OPTIONS)


@asynccontextmanager
async def engine(files: IssuedFiles, *, asks: bool = False) -> AsyncIterator[FakeGrpcEngine]:
    """`asks` clients for a certificate of the same authority."""
    pairs = [(files.key.read_bytes(), files.certificate.read_bytes())]
    authority = files.authority.read_bytes() if asks else None
    async with FakeGrpcEngine(credentials=grpc.ssl_server_credentials(pairs, authority, asks)) as it:
        yield it


async def echoed(wires: GrpcWires, data: bytes = b"asked") -> tuple[str, str]:
    heard = Heard()
    await wires.call(PATH + "Echo", data, heard)
    status = await heard.over()
    assert status[0] != "OK" or heard.messages == [data]
    return status


@pytest.mark.parametrize("size", [0, 5, 16_380, 3_000_000])
async def test_a_request_and_its_answer_of_any_size_arrive_whole(tmp_path: Path, size: int) -> None:
    files = Authority().issue(tmp_path, "engine")
    async with engine(files) as it:
        tls = trusting(files)
        wires = GrpcWires("127.0.0.1", it.port, tls=tls)
        assert await echoed(wires, bytes(index % 251 for index in range(size))) == ("OK", "")
        left_s = (tls.peer_expires_at_s(f"grpcs://127.0.0.1:{it.port}") or 0.0) - DAY.total_seconds()
        assert abs(left_s - time.time()) < 3600
        wires.close()


async def test_a_client_shows_its_certificate_and_a_stranger_is_told_why_it_has_none(tmp_path: Path) -> None:
    authority = Authority()
    files, mine = authority.issue(tmp_path, "engine"), authority.issue(tmp_path, "gateway")
    stranger = Authority("another").issue(under(tmp_path, "b"), "stranger")
    async with engine(files, asks=True) as it:
        good = GrpcWires("127.0.0.1", it.port, tls=trusting(files, mine))
        assert await echoed(good) == ("OK", "")
        good.close()
        for shown in (None, stranger):
            wires = GrpcWires("127.0.0.1", it.port, tls=trusting(files, shown))
            status, words = await echoed(wires)
            assert status == "UNAVAILABLE", words  # the server of grpc just closes
            wires.close()


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("stranger", "its certificate is not trusted: unable to get local issuer certificate"),
        ("expired", "its certificate is not trusted: certificate has expired"),
        ("elsewhere", "its certificate is not trusted: IP address mismatch, certificate is not valid for '127.0.0.1'"),
    ],
)
async def test_an_engine_that_cannot_be_trusted_is_not_spoken_to(tmp_path: Path, broken: str, words: str) -> None:
    authority = Authority()
    trusted = authority.issue(tmp_path, "trusted")
    shown = {
        "stranger": lambda: Authority("another").issue(under(tmp_path, "b"), "engine"),
        "expired": lambda: authority.issue(tmp_path, "engine", starts=-9 * DAY, ends=-DAY),
        "elsewhere": lambda: authority.issue(tmp_path, "engine", names=("herd",), addresses=("127.0.0.9",)),
    }[broken]()
    async with engine(shown) as it:
        wires = GrpcWires("127.0.0.1", it.port, tls=trusting(trusted))
        with pytest.raises(OSError, match=words):
            await echoed(wires)
        named = GrpcWires("127.0.0.1", it.port, tls=trusting(trusted, name="herd"))
        if broken == "elsewhere":
            assert await echoed(named) == ("OK", "")
        named.close()
        assert it.seen == [] or broken == "elsewhere"


async def test_a_server_that_does_not_agree_on_h2_is_not_sent_a_byte(tmp_path: Path) -> None:
    files = Authority().issue(tmp_path, "engine")
    came: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.append(await reader.read(100))
        writer.close()

    for alpn in ([], ["http/1.1"]):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files.certificate, files.key)
        if alpn:
            context.set_alpn_protocols(alpn)
        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
        async with server:
            wires = GrpcWires("127.0.0.1", server.sockets[0].getsockname()[1], tls=trusting(files))
            with pytest.raises(OSError, match=r"it does not speak HTTP/2 over TLS \(no h2 in ALPN\), which gRPC needs"):
                await echoed(wires)
    async with engine(files) as it:
        plain = GrpcWires("127.0.0.1", it.port)
        assert (await echoed(plain))[0] == "UNAVAILABLE"
        plain.close()


async def test_once_certificates_are_renewed_calls_take_a_new_connection_and_old_ones_end_where_they_are(
    tmp_path: Path,
) -> None:
    authority = Authority()
    files, mine = authority.issue(tmp_path, "engine"), authority.issue(tmp_path, "gateway")
    async with engine(files, asks=True) as it:
        tls = trusting(files, mine)
        wires = GrpcWires("127.0.0.1", it.port, tls=tls)
        held = Heard()
        stream = await wires.call(PATH + "Hold", b"", held)
        assert await echoed(wires) == ("OK", "")
        assert len(wires._wires) == 1
        assert not tls.refresh()
        authority.issue(tmp_path, "gateway", ends=20 * DAY)
        assert tls.refresh()
        assert await echoed(wires) == ("OK", "")
        old, new = wires._wires
        assert (old.usable, new.usable) == (False, True)
        assert held.end is None
        stream.cancel()
        await until(lambda: old.over)
        assert await echoed(wires) == ("OK", "")
        assert not new.over
        wires.close()


async def test_a_certificate_that_expires_here_costs_new_connections_only(tmp_path: Path) -> None:
    authority = Authority()
    files, mine = authority.issue(tmp_path, "engine"), authority.issue(tmp_path, "gateway", ends=timedelta(seconds=3))
    async with engine(files, asks=True) as it:
        tls = trusting(files, mine)
        wires = GrpcWires("127.0.0.1", it.port, tls=tls)
        assert await echoed(wires) == ("OK", "")

        async def refused() -> bool:
            fresh = GrpcWires("127.0.0.1", it.port, tls=tls)
            try:
                return (await echoed(fresh))[0] == "UNAVAILABLE"
            finally:
                fresh.close()

        async with asyncio.timeout(PATIENCE_S):
            while not await refused():  # noqa: ASYNC110 - what ends it is the clock of X.509
                await asyncio.sleep(0.1)
        assert await echoed(wires) == ("OK", "")
        wires.close()


def test_the_same_holds_on_the_loop_that_gateways_run_on(tmp_path: Path) -> None:
    async def story() -> None:
        await test_a_request_and_its_answer_of_any_size_arrive_whole(under(tmp_path, "1"), 3_000_000)
        await test_a_server_that_does_not_agree_on_h2_is_not_sent_a_byte(under(tmp_path, "2"))
        await test_an_engine_that_cannot_be_trusted_is_not_spoken_to(under(tmp_path, "3"), "expired", "has expired")

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(story())
