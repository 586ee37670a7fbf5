"""A gateway that speaks TLS to its clients and to its workers, over real sockets."""

import asyncio
import re
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import grpc
import grpc.aio
import httpx
import pytest

from kvherd.adapters.grpc_worker import GrpcWorker
from kvherd.adapters.http_worker import HttpWorker
from kvherd.adapters.model_files import locate
from kvherd.adapters.tls import ClientTls, FileServerTls, TlsFiles, TlsOptions
from kvherd.adapters.tokenizer import load_tokenizer
from kvherd.core.fleet.spec import GRPC, WorkerSpec
from kvherd.core.ids import Epoch, Rank, WorkerId
from kvherd.ports.completions import Tokenizer
from kvherd.ports.kv_feed import FeedItem, Subscribed
from kvherd.ports.worker import Worker
from kvherd.services.gateway.gateway import Gateway, GatewayConfig
from kvherd.testing.certificates import DAY, Authority, IssuedFiles
from kvherd.testing.kv_feeds import OpenFeed
from kvherd.testing.patience import until
from kvherd.testing.sglang_engine import EngineScript, ScriptedSglang, serving
from kvherd.testing.tokenizer import ByteTokenizer
from kvherd.testing.workers import FakeWorker
from kvherd.wire.proto import kvherd_gateway_v1_pb2 as pb
from kvherd.wire.proto import kvherd_gateway_v1_pb2_grpc as pb_grpc

pytestmark = pytest.mark.net

PATIENCE_S = 20.0
OPTIONS = TlsOptions("--cert", "--key", "--ca")
LOOK_S = 0.02


class NoFeed(OpenFeed):
    async def subscribe(self, cursors: dict[Rank, int], epoch: Epoch | None) -> AsyncGenerator[FeedItem, None]:
        yield Subscribed(None)


@dataclass(frozen=True)
class Running:
    gateway: Gateway

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.gateway.port}"

    async def get(self, path: str, trusted: IssuedFiles, shown: IssuedFiles | None = None) -> httpx.Response:
        """On a connection of its own, so that every call has a handshake."""
        context = ssl.create_default_context(cafile=str(trusted.authority))
        if shown is not None:
            context.load_cert_chain(shown.certificate, shown.key)
        async with httpx.AsyncClient(verify=context, timeout=PATIENCE_S) as client:
            return await client.get(f"{self.url}{path}")


@asynccontextmanager
async def running(
    *workers: WorkerSpec, tls: FileServerTls | None = None, worker_tls: ClientTls | None = None
) -> AsyncIterator[Running]:
    async def tokenizer(_: str) -> Tokenizer:
        return ByteTokenizer()

    def worker(url: str, _: str | None) -> Worker:
        name = WorkerId(url)
        if url.startswith("http://fake"):
            return FakeWorker(name)
        return GrpcWorker(name, tls=worker_tls) if url.startswith(GRPC) else HttpWorker(name, url, tls=worker_tls)

    it = Gateway(
        GatewayConfig(port=0, grpc_port=0, workers=workers, policy="least_load", certificates_period_s=LOOK_S),
        worker_factory=worker,
        feed_factory=lambda _: NoFeed(),
        tokenizer_factory=tokenizer,
        tls=tls,
        worker_tls=worker_tls,
    )
    async with it:
        yield Running(it)


def own(files: IssuedFiles, *, clients: IssuedFiles | None = None) -> FileServerTls:
    return FileServerTls(TlsFiles(files.certificate, files.key, clients.authority if clients else None), OPTIONS)


def under(root: Path, name: str) -> Path:
    made = root / name
    made.mkdir(exist_ok=True)
    return made


async def test_clients_speak_tls_and_a_stranger_s_authority_is_not_trusted(tmp_path: Path) -> None:
    ours = Authority().issue(under(tmp_path, "a"), "gateway")
    others = Authority().issue(under(tmp_path, "b"), "gateway")
    async with running(WorkerSpec("http://fake:1"), tls=own(ours)) as it:
        assert (await it.get("/health", ours)).status_code == 200
        metrics = (await it.get("/metrics", ours)).text
        assert "kvherd_gateway_certificate_expires_seconds 1." in metrics
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await it.get("/health", others)
        async with httpx.AsyncClient() as client:
            with pytest.raises(httpx.HTTPError):
                await client.get(it.url.replace("https", "http") + "/health")


async def test_only_clients_with_a_certificate_of_the_right_authority_may_come(tmp_path: Path) -> None:
    authority = Authority()
    ours, client = authority.issue(tmp_path, "gateway"), authority.issue(tmp_path, "client")
    stranger = Authority().issue(under(tmp_path, "b"), "client")
    async with running(WorkerSpec("http://fake:1"), tls=own(ours, clients=ours)) as it:
        assert (await it.get("/health", ours, client)).status_code == 200
        for shown in (None, stranger):
            with pytest.raises(httpx.HTTPError):
                await it.get("/health", ours, shown)
        credentials = grpc.ssl_channel_credentials(
            ours.authority.read_bytes(), client.key.read_bytes(), client.certificate.read_bytes()
        )
        async with grpc.aio.secure_channel(f"127.0.0.1:{it.gateway.grpc_port}", credentials) as channel:
            answer = await pb_grpc.GatewayStub(channel).ListWorkers(pb.ListWorkersRequest())  # type: ignore[no-untyped-call]
            assert [one.url for one in answer.workers] == ["http://fake:1"]
        assert counted(await it.get("/metrics", ours, client)) == 1
        stranger_s = grpc.ssl_channel_credentials(ours.authority.read_bytes())
        async with grpc.aio.secure_channel(f"127.0.0.1:{it.gateway.grpc_port}", stranger_s) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await pb_grpc.GatewayStub(channel).ListWorkers(pb.ListWorkersRequest())  # type: ignore[no-untyped-call]
        assert counted(await it.get("/metrics", ours, client)) > 1, "one that is turned away was begun, too"


def counted(page: httpx.Response) -> float:
    """TLS handshakes over gRPC."""
    name = "kvherd_gateway_grpc_handshakes_total "
    return float(next(line for line in page.text.splitlines() if line.startswith(name)).removeprefix(name))


async def test_a_renewed_certificate_is_given_to_who_comes_next_while_old_connections_live_on(tmp_path: Path) -> None:
    ours = Authority().issue(tmp_path, "gateway")
    old = under(tmp_path, "old") / "ca.pem"
    old.write_bytes(ours.authority.read_bytes())
    async with running(WorkerSpec("http://fake:1"), tls=own(ours)) as it:
        context = ssl.create_default_context(cafile=str(old))
        async with httpx.AsyncClient(verify=context, timeout=PATIENCE_S) as client:
            assert (await client.get(f"{it.url}/health")).status_code == 200
            Authority().issue(tmp_path, "gateway", ends=20 * DAY)
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    try:
                        answer = await it.get("/health", ours)
                    except httpx.ConnectError:
                        await asyncio.sleep(LOOK_S)
                        continue
                    break
            assert answer.status_code == 200, answer.text
            assert (await client.get(f"{it.url}/health")).status_code == 200
        with pytest.raises(httpx.ConnectError):
            await it.get("/health", IssuedFiles(old, old, old))


async def ask_models(it: Gateway) -> httpx.Response:
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        return await client.get(f"http://127.0.0.1:{it.port}/workers")


async def state_of_only_worker(it: Gateway, *, until: str) -> dict[str, str]:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            (told,) = (await ask_models(it)).json()["workers"]
            if until in f"{told['state']} {told['reason']}":
                return dict(told)
            await asyncio.sleep(LOOK_S)


def to_workers(trusted: IssuedFiles, shown: IssuedFiles | None = None, name: str | None = None) -> ClientTls:
    certificate, key = (shown.certificate, shown.key) if shown else (None, None)
    return ClientTls(TlsFiles(certificate, key, trusted.authority, name), OPTIONS)


@pytest.mark.parametrize("name", [None, "localhost"])
async def test_a_worker_over_https_is_served_from(tmp_path: Path, name: str | None) -> None:
    """The worker is another gateway: it is an OpenAI-compatible server that speaks TLS."""
    authority = Authority()
    theirs = authority.issue(tmp_path, "worker", addresses=("127.0.0.1",) if name is None else ())
    mine = authority.issue(tmp_path, "gateway")
    async with running(WorkerSpec("http://fake:1"), tls=own(theirs, clients=theirs)) as behind:
        spec = WorkerSpec(f"https://127.0.0.1:{behind.gateway.port}")
        async with running(spec, worker_tls=to_workers(theirs, mine, name)) as it:
            await state_of_only_worker(it.gateway, until="up")
            async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
                url = f"http://127.0.0.1:{it.gateway.port}/v1/completions"
                answer = await client.post(url, json={"model": "m", "prompt": "hi"})
    assert (answer.status_code, answer.json()) == (200, {"ok": True})


async def test_a_worker_whose_certificate_is_not_trusted_says_so(tmp_path: Path) -> None:
    theirs = Authority().issue(under(tmp_path, "a"), "worker")
    others = Authority("another").issue(under(tmp_path, "b"), "worker")
    async with running(WorkerSpec("http://fake:1"), tls=own(theirs)) as behind:
        spec = WorkerSpec(f"https://127.0.0.1:{behind.gateway.port}")
        async with running(spec, worker_tls=to_workers(others)) as it:
            told = await state_of_only_worker(it.gateway, until="certificate")
    assert told["reason"] == "cannot be reached: its certificate is not trusted: unable to get local issuer certificate"


@asynccontextmanager
async def expired_server(files: IssuedFiles) -> AsyncIterator[int]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]


@pytest.mark.parametrize("scheme", ["https", "grpcs"])
async def test_an_expired_certificate_of_a_worker_is_named_as_the_reason(tmp_path: Path, scheme: str) -> None:
    old = Authority().issue(tmp_path, "old", starts=-9 * DAY, ends=-DAY)
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(expired_server(old))
        spec = WorkerSpec(f"{scheme}://127.0.0.1:{port}")
        it = await stack.enter_async_context(running(spec, worker_tls=to_workers(old)))
        told = await state_of_only_worker(it.gateway, until="certificate")
    assert told["reason"] == "cannot be reached: its certificate is not trusted: certificate has expired"


@pytest.mark.parametrize("scheme", ["https", "grpcs"])
async def test_a_certificate_of_ours_that_expired_is_named_where_workers_refuse_it(
    tmp_path: Path, scheme: str, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority()
    theirs, soon = authority.issue(tmp_path, "worker"), authority.issue(tmp_path, "soon", ends=timedelta(seconds=2))
    async with AsyncExitStack() as stack:
        engine = https_worker(theirs, clients=theirs) if scheme == "https" else grpcs_worker(theirs, asks=True)
        port = await stack.enter_async_context(engine)
        tls = to_workers(theirs, soon)
        await until(lambda: time.time() > (tls.expires_at_s or 0.0), within_s=PATIENCE_S)
        spec = WorkerSpec(f"{scheme}://127.0.0.1:{port}")
        it = await stack.enter_async_context(running(spec, worker_tls=tls))
        told = await state_of_only_worker(it.gateway, until="expired")
        assert told["reason"].endswith("; the certificate that it is shown has expired")
        await until(lambda: "the certificate that workers are shown has expired" in caplog.text, within_s=PATIENCE_S)
        authority.issue(tmp_path, "soon")
        await state_of_only_worker(it.gateway, until="up")


@pytest.mark.parametrize("scheme", ["https", "grpcs"])
async def test_whom_to_trust_may_change_while_a_gateway_runs(tmp_path: Path, scheme: str) -> None:
    theirs = Authority().issue(under(tmp_path, "a"), "worker")
    trusted = Authority("another").issue(under(tmp_path, "b"), "other")
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(https_worker(theirs) if scheme == "https" else grpcs_worker(theirs))
        spec = WorkerSpec(f"{scheme}://127.0.0.1:{port}")
        it = await stack.enter_async_context(running(spec, worker_tls=to_workers(trusted)))
        await state_of_only_worker(it.gateway, until="certificate")
        trusted.authority.write_bytes(theirs.authority.read_bytes())
        await state_of_only_worker(it.gateway, until="up")
        async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
            url, model = f"http://127.0.0.1:{it.gateway.port}/v1/completions", "m" if scheme == "https" else "herd"
            answer = await client.post(url, json={"model": model, "prompt": "hi", "max_tokens": 4})
        assert answer.status_code == 200, answer.text
        (told,) = (await ask_models(it.gateway)).json()["workers"]
        assert abs(told["certificate_expires_s"] - time.time() - DAY.total_seconds()) < 3600
        text = (await get_metrics(it.gateway)).text
        assert re.search(r'kvherd_worker_certificate_expires_seconds\{worker="\w+://127.0.0.1:\d+"\} 1\.', text)


async def get_metrics(it: Gateway) -> httpx.Response:
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        return await client.get(f"http://127.0.0.1:{it.port}/metrics")


@asynccontextmanager
async def https_worker(files: IssuedFiles, clients: IssuedFiles | None = None) -> AsyncIterator[int]:
    async with running(WorkerSpec("http://fake:1"), tls=own(files, clients=clients)) as behind:
        yield behind.gateway.port


@asynccontextmanager
async def grpcs_worker(files: IssuedFiles, *, asks: bool = False) -> AsyncIterator[int]:
    script = EngineScript(tokenizer_zip=load_tokenizer(locate("tiny")).artifact_zip())
    pairs, authority = [(files.key.read_bytes(), files.certificate.read_bytes())], files.authority.read_bytes()
    credentials = grpc.ssl_server_credentials(pairs, authority if asks else None, asks)
    async with serving(ScriptedSglang(script), credentials=credentials) as target:
        yield int(target.rpartition(":")[2])
