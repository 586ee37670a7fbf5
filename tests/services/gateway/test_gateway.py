"""The gateway as one thing, over real sockets."""

import asyncio
import json
import logging
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvherd.core.errors import OptionInvalid, PortInUse
from kvherd.core.fleet.spec import WorkerSpec
from kvherd.core.ids import Epoch, Rank, WorkerId
from kvherd.ports.completions import Tokenizer
from kvherd.ports.kv_feed import FeedItem, Subscribed
from kvherd.ports.worker import WorkerFacts, WorkerKind
from kvherd.services.gateway.gateway import Gateway, GatewayConfig
from kvherd.testing.kv_feeds import OpenFeed
from kvherd.testing.tokenizer import ByteTokenizer
from kvherd.testing.workers import FakeWorker

pytestmark = pytest.mark.net

ANN = WorkerId("grpc://ann:1")


class SilentFeed(OpenFeed):
    """A feed that is accepted and tells nothing."""

    async def subscribe(self, cursors: dict[Rank, int], epoch: Epoch | None) -> AsyncGenerator[FeedItem, None]:
        yield Subscribed(Epoch("e" * 32))
        await asyncio.Event().wait()


def gateway(worker: FakeWorker, *, port: int = 0, grpc_port: int = 0, policy: str = "kv", **more: Any) -> Gateway:
    async def tokenizer(_: str) -> Tokenizer:
        return ByteTokenizer()

    config = GatewayConfig(port=port, grpc_port=grpc_port, workers=(WorkerSpec(worker.id),), policy=policy, **more)
    return Gateway(
        config,
        worker_factory=lambda *_: worker,
        feed_factory=lambda _: SilentFeed(),
        tokenizer_factory=tokenizer,
    )


def fake() -> FakeWorker:
    return FakeWorker(ANN, facts=WorkerFacts(WorkerKind.SGLANG_GRPC, ("m",), block_size=4))


async def ready(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(5.0):
        while (await client.get("/ready")).status_code != 200:  # noqa: ASYNC110 - HTTP has no event to wait for
            await asyncio.sleep(0.01)


async def test_data_and_orders_go_through_one_port() -> None:
    worker = fake()
    async with gateway(worker) as it, httpx.AsyncClient(base_url=f"http://127.0.0.1:{it.port}") as client:
        await ready(client)
        answer = await client.post("/v1/completions", json={"model": "m", "prompt": "hi"})
        flushed = await client.post("/flush_cache")
        unknown = await client.post("/v1/completions", json={"model": "x", "prompt": "hi"})
        broken = await client.post("/v1/completions", content=b'{"model": "m",\n "prompt" "hi"}')
    assert (answer.json(), answer.headers["x-kvherd-worker"]) == ({"ok": True}, ANN)
    assert (flushed.status_code, flushed.json()["workers_flushed"]) == (200, 1)
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert (broken.status_code, "line 2, column 11" in broken.json()["error"]["message"]) == (400, True)
    assert worker.closed


async def test_what_is_refused_unread_is_counted_by_why_and_has_its_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvherd.access")
    clients = []
    async with gateway(fake()) as it, httpx.AsyncClient(base_url=f"http://127.0.0.1:{it.port}") as client:
        for head in (
            b"POST /v1/completions HTTP/1.1\r\n\r\n",
            b"GET / HTTP/1.1\nHost: x\n\n",
            b"GET / HTTP/2.0\r\n\r\n",
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
            writer.write(head)
            clients.append("{}:{}".format(*writer.get_extra_info("sockname")))
            async with asyncio.timeout(10.0):
                assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
            writer.close()
        told = (await client.get("/metrics")).text
    assert 'kvherd_gateway_unread_requests_total{code="frame_invalid"} 2.0' in told
    assert 'kvherd_gateway_unread_requests_total{code="unsupported"} 1.0' in told
    lines = [json.loads(record.message) for record in caplog.records if record.name == "kvherd.access"]
    assert [(line["client"], line["status"]) for line in lines] == [(client, 400) for client in clients]
    assert [line["outcome"] for line in lines] == ["FrameInvalid", "FrameInvalid", "Unsupported"]


async def test_without_a_living_worker_a_client_is_told_when_to_come_again() -> None:
    worker = fake()
    async with gateway(worker) as it, httpx.AsyncClient(base_url=f"http://127.0.0.1:{it.port}") as client:
        await client.delete("/workers/grpc-ann-1")
        answer = await client.post("/v1/completions", json={"model": "m", "prompt": "hi"})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")


@pytest.mark.parametrize("which", ["port", "grpc_port"])
async def test_a_port_in_use_is_named_and_leaves_nothing_behind(which: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse) as caught:
            await gateway(fake(), **{which: port}).__aenter__()
    assert (caught.value.port, caught.value.option) == (port, "--port" if which == "port" else "--grpc-port")
    assert len(asyncio.all_tasks()) == 1


async def test_a_policy_that_is_none_is_refused_before_anything_starts() -> None:
    with pytest.raises(OptionInvalid, match="'magic' is none of"):
        gateway(fake(), policy="magic")


async def test_an_operator_on_this_machine_needs_no_key_and_a_proxy_on_it_does() -> None:
    async with gateway(fake()) as it, httpx.AsyncClient(base_url=f"http://127.0.0.1:{it.port}") as client:
        assert (await client.get("/workers")).status_code == 200
        for proxied in ({"x-forwarded-for": "127.0.0.1"}, {"forwarded": "for=127.0.0.1"}, {"origin": "http://a.test"}):
            assert (await client.get("/workers", headers=proxied)).status_code == 403
        assert (await client.get("/workers")).status_code == 200


STATUS = (
    "/workers",
    "/workers/grpc-ann-1",
    "/audit",
    "/engine_metrics",
    "/v1/models",
    "/get_loads",
    "/server_info",
    "/get_server_info",
    "/get_model_info",
    "/ready",
    "/metrics",
)


@asynccontextmanager
async def asked(**config: Any) -> AsyncIterator[Callable[..., Awaitable[int]]]:
    """Asks a gateway under a name; the status."""
    async with (
        gateway(fake(), **config) as it,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{it.port}", timeout=20.0) as client,
    ):
        await ready(client)

        async def ask(method: str, path: str, host: str, **more: Any) -> int:
            answer = await client.request(method, path, headers={"host": host, **more.pop("headers", {})}, **more)
            if answer.status_code == 421:
                assert answer.json()["error"]["code"] == "host_unknown"
                assert f"is not known as {host.partition(':')[0]!r}" in answer.json()["error"]["message"]
            return answer.status_code

        yield ask


async def test_a_web_page_whose_name_leads_to_this_machine_reads_nothing_and_orders_nothing() -> None:
    async with asked() as ask:
        for path in STATUS:
            for host in ("localhost:8080", "127.0.0.1", "[::1]:8080"):
                assert await ask("GET", path, host) == 200
            assert await ask("GET", path, "evil.test:8080") == 421
        assert await ask("POST", "/flush_cache", "evil.test:8080") == 421
        assert await ask("DELETE", "/workers/grpc-ann-1", "evil.test") == 421
        assert await ask("GET", "/health", "evil.test") == 200, "that it lives is told to whoever asks"
        assert await ask("POST", "/v1/completions", "evil.test", json={"model": "m", "prompt": "hi"}) == 200


async def test_a_gateway_is_asked_by_the_names_that_it_was_given(tmp_path: Path) -> None:
    file = tmp_path / "herd.toml"
    file.write_text('host_names = ["two.test"]')
    async with asked(host_names=("one.test",), config_file=file) as ask:
        assert [await ask("GET", "/workers", host) for host in ("one.test", "Two.Test:8080", "3.test")] == [
            200,
            200,
            421,
        ]
        file.write_text('host_names = ["3.test"]')
        async with asyncio.timeout(20):
            while await ask("GET", "/workers", "3.test") != 200:  # noqa: ASYNC110 - HTTP has no event to wait for
                await asyncio.sleep(0.05)
        assert [await ask("GET", "/workers", host) for host in ("one.test", "two.test")] == [200, 421]


async def test_who_brings_a_key_may_ask_by_any_name() -> None:
    admin, data = {"authorization": "Bearer the-admin-key"}, {"authorization": "Bearer the-data-key"}
    async with asked(admin_key="the-admin-key", data_key="the-data-key") as ask:
        assert await ask("GET", "/workers", "any.test", headers=admin) == 200
        assert await ask("GET", "/metrics", "any.test", headers=admin) == 200
        assert await ask("GET", "/v1/models", "any.test", headers=data) == 200
        assert await ask("GET", "/workers", "any.test") == 403
        assert await ask("GET", "/v1/models", "any.test") == 401
        assert await ask("GET", "/metrics", "any.test") == 421


async def test_a_gateway_beyond_this_machine_is_asked_by_any_name_but_for_what_is_this_machine_s() -> None:
    async with asked(host="0.0.0.0") as ask:
        assert await ask("GET", "/v1/models", "any.test") == 200
        assert await ask("GET", "/metrics", "any.test") == 200
        assert await ask("GET", "/workers", "any.test") == 421
