"""Engines that each want a key of their own, before a gateway that tells it to nobody else; over real sockets."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvherd.cli.gateway_parts import worker_at
from kvherd.core.errors import OptionInvalid
from kvherd.core.fleet.spec import ConfigInvalid, WorkerSpec
from kvherd.core.ids import Epoch, Rank
from kvherd.ports.completions import Tokenizer
from kvherd.ports.kv_feed import FeedItem, Subscribed
from kvherd.services.gateway.fleet.fleet_edges import FleetConfig
from kvherd.services.gateway.gateway import Gateway, GatewayConfig
from kvherd.services.gateway.settings import ProbeBounds
from kvherd.testing.kv_feeds import OpenFeed
from kvherd.testing.stock_vllm import StockVllm
from kvherd.testing.tokenizer import ByteTokenizer

pytestmark = pytest.mark.net

PATIENCE_S = 20.0
COMMON, ANNS, BOBS, NEW = "zebrakey-common", "zebrakey-ann", "zebrakey-bob", "zebrakey-new"


@dataclass
class Running:
    client: httpx.AsyncClient

    async def states(self) -> dict[str, str]:
        return {one["url"]: one["state"] for one in (await self.client.get("/workers")).json()["workers"]}

    async def until(self, **states: str) -> None:
        await settled(lambda: self._are(states))

    async def _are(self, states: dict[str, str]) -> bool:
        return await self.states() == states

    async def serves(self) -> bool:
        return (await self.client.post("/v1/completions", json={"prompt": "hi"})).status_code == 200

    async def refuses_its_file(self) -> bool:
        return "cannot read" in (await self.client.get("/server_info")).json()["config"]["problem"]

    async def ask(self) -> str:
        answer = await self.client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2})
        assert answer.status_code == 200, answer.text
        return answer.headers["x-kvherd-worker"]


async def settled(looks: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await looks():  # noqa: ASYNC110 - HTTP has no event to wait for
            await asyncio.sleep(0.02)


class NoFeed(OpenFeed):
    async def subscribe(self, cursors: dict[Rank, int], epoch: Epoch | None) -> AsyncGenerator[FeedItem, None]:
        yield Subscribed(None)


@asynccontextmanager
async def gateway(path: Path | None = None, *workers: WorkerSpec, **environment: str) -> AsyncIterator[Running]:
    async def tokenizer(_: str) -> Tokenizer:
        return ByteTokenizer()

    config = GatewayConfig(
        port=0,
        grpc_port=0,
        workers=workers,
        policy="round_robin",
        config_file=path,
        environment=environment,
        fleet=FleetConfig(probe=ProbeBounds(period_s=0.1), max_retry_s=0.3),
    )
    factory = partial(worker_at, engine_api_key=COMMON)
    made = Gateway(config, worker_factory=factory, feed_factory=lambda _: NoFeed(), tokenizer_factory=tokenizer)
    async with made as it, httpx.AsyncClient(base_url=f"http://127.0.0.1:{it.port}", timeout=PATIENCE_S) as client:
        yield Running(client)


async def test_each_engine_gets_its_own_key_and_the_rest_the_one_for_all(tmp_path: Path) -> None:
    path, secret = tmp_path / "herd.toml", tmp_path / "ann"
    secret.write_text(ANNS + "\n")
    async with StockVllm(api_key=ANNS) as ann, StockVllm(api_key=BOBS) as bob, StockVllm(api_key=COMMON) as cat:
        entries = [(ann.url, f'engine_key_file = "{secret}"'), (bob.url, 'engine_key_env = "BOB"'), (cat.url, "")]
        path.write_text("".join(f'[[workers]]\nurl = "{url}"\n{more}\n' for url, more in entries))
        async with gateway(path, BOB=BOBS) as it:
            await it.until(**dict.fromkeys((ann.url, bob.url, cat.url), "up"))
            assert {await it.ask() for _ in range(6)} == {ann.url, bob.url, cat.url}


async def test_a_key_that_is_renewed_is_taken_over_in_place(tmp_path: Path) -> None:
    path, secret = tmp_path / "herd.toml", tmp_path / "ann"
    secret.write_text(ANNS)
    async with StockVllm(api_key=ANNS) as ann:
        path.write_text(f'[[workers]]\nurl = "{ann.url}"\nengine_key_file = "{secret}"\n')
        async with gateway(path) as it:
            await it.until(**{ann.url: "up"})
            ann.api_key = NEW
            secret.write_text(NEW)
            await settled(it.serves)
            secret.unlink()
            await settled(it.refuses_its_file)
            assert await it.ask() == ann.url, "the last good one holds"


async def test_a_key_given_at_run_time_is_shown_to_nobody(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    async with StockVllm(api_key=ANNS) as ann, gateway() as it:
        answers = [await it.client.post("/workers", json={"url": ann.url, "engine_key": ANNS})]
        assert answers[0].status_code == 201
        await it.until(**{ann.url: "up"})
        ann.api_key = NEW
        answers.append(await it.client.patch(f"/workers/{answers[0].json()['id']}", json={"engine_key": NEW}))
        assert answers[1].status_code == 200
        await settled(it.serves)
        wrong: list[dict[str, Any]] = [{"engine_key": f"{NEW} two"}, {"engine_key": [NEW]}, {"key": NEW}]
        for body in wrong:
            answers.append(await it.client.patch(f"/workers/{answers[0].json()['id']}", json=body))
            assert answers[-1].status_code == 400
        answers.append(await it.client.post("/workers", json={"url": "grpc://a:1", "engine_key": NEW}))
        assert "is for engines on HTTP; grpc://a:1 is on gRPC" in answers[-1].json()["error"]["message"]
        answers += [
            await it.client.get(path) for path in ("/workers", f"/workers/{answers[0].json()['id']}", "/metrics")
        ]
        answers += [await it.client.get(path) for path in ("/server_info", "/audit")]
        assert not any("zebrakey" in answer.text for answer in answers)
    assert "zebrakey" not in caplog.text


async def test_a_key_that_is_nowhere_is_named_at_the_start_and_not_shown(tmp_path: Path) -> None:
    nobody = WorkerSpec("http://127.0.0.1:9", engine_key_env="ANN")
    with pytest.raises(OptionInvalid, match=r"worker http://127\.0\.0\.1:9: its engine's key: the environment's ANN"):
        async with gateway(None, nobody):
            pass
    with pytest.raises(OptionInvalid) as refused:
        async with gateway(None, nobody, ANN=f"{ANNS} two"):
            pass
    assert "zebrakey" not in str(refused.value)
    path = tmp_path / "herd.toml"
    path.write_text(f'[[workers]]\nurl = "http://a:1"\nengine_key_file = "{tmp_path / "none"}"\n')
    with pytest.raises(ConfigInvalid, match=r"its engine's key: cannot read .*none: No such file"):
        async with gateway(path):
            pass


def test_a_key_stands_in_no_picture_of_a_worker() -> None:
    assert "zebrakey" not in repr(WorkerSpec("http://a:1", engine_key=ANNS))


async def test_a_key_from_the_command_line_s_places_is_used(tmp_path: Path) -> None:
    async with (
        StockVllm(api_key=ANNS) as ann,
        gateway(None, WorkerSpec(ann.url, engine_key_env="ANN"), ANN=ANNS) as it,
    ):
        await it.until(**{ann.url: "up"})
        assert await it.ask() == ann.url
