"""The gateway as one thing, over real sockets."""

import asyncio
import socket
from collections.abc import AsyncGenerator

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


def gateway(worker: FakeWorker, *, port: int = 0, grpc_port: int = 0, policy: str = "kv") -> Gateway:
    async def tokenizer(_: str) -> Tokenizer:
        return ByteTokenizer()

    config = GatewayConfig(port=port, grpc_port=grpc_port, workers=(WorkerSpec(worker.id),), policy=policy)
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
