"""Late binding of a whole gateway, as its options and its file have it, over real sockets."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import httpx
import pytest

from kvherd.core.fleet.spec import WorkerSpec
from kvherd.core.ids import Epoch, Rank, WorkerId
from kvherd.core.routing.late import LateBounds
from kvherd.ports.completions import Tokenizer
from kvherd.ports.kv_feed import FeedItem, Subscribed
from kvherd.ports.worker import Call, Responder, WorkerFacts, WorkerKind
from kvherd.services.gateway.gateway import Gateway, GatewayConfig
from kvherd.testing.kv_feeds import OpenFeed
from kvherd.testing.tokenizer import ByteTokenizer
from kvherd.testing.workers import FakeWorker

pytestmark = pytest.mark.net

PATIENCE_S = 60.0
ANN = WorkerId("http://ann:1")


class NoFeed(OpenFeed):
    async def subscribe(self, cursors: dict[Rank, int], epoch: Epoch | None) -> AsyncGenerator[FeedItem, None]:
        yield Subscribed(None)


class Held(FakeWorker):
    """Begins no answer before it is let go."""

    def __init__(self) -> None:
        super().__init__(ANN, facts=WorkerFacts(WorkerKind.OPENAI_HTTP, ("m",)))
        self.go_on = asyncio.Event()
        self.asked = asyncio.Event()

    async def forward(self, call: Call, responder: Responder) -> None:
        self.asked.set()
        await self.go_on.wait()
        await super().forward(call, responder)


async def test_options_hold_a_request_and_the_file_lets_the_next_go(tmp_path: Path) -> None:
    async def tokenizer(_: str) -> Tokenizer:
        return ByteTokenizer()

    worker, file = Held(), tmp_path / "herd.toml"
    file.write_text("")
    config = GatewayConfig(
        port=0,
        grpc_port=0,
        workers=(WorkerSpec(ANN),),
        policy="prefix_tree",
        config_file=file,
        late=LateBounds(longest_s=600.0),
    )
    made = Gateway(
        config, worker_factory=lambda *_: worker, feed_factory=lambda _: NoFeed(), tokenizer_factory=tokenizer
    )
    async with made as it, httpx.AsyncClient(base_url=f"http://127.0.0.1:{it.port}", timeout=PATIENCE_S) as client:

        async def until(path: str, words: str) -> None:
            async with asyncio.timeout(PATIENCE_S):
                while words not in (await client.get(path)).text:  # noqa: ASYNC110 - HTTP has no event to wait for
                    await asyncio.sleep(0.01)

        async def ask(prompt: str) -> int:
            answer = await client.post("/v1/completions", json={"model": "m", "prompt": prompt, "stream": True})
            return answer.status_code

        await until("/workers", '"state":"up"')
        async with asyncio.TaskGroup() as group:
            group.create_task(ask("x" * 4_000))
            await until("/metrics", "kvherd_gateway_running_requests 1.0")
            await asyncio.sleep(0.2)
            worker.go_on.set()
        await until("/workers", '"prefill_rate_learned":true')
        worker.go_on.clear()
        worker.asked.clear()
        async with asyncio.TaskGroup() as group:
            answers = [group.create_task(ask("y" * 2_000_000))]  # minutes, at the rate that was seen
            async with asyncio.timeout(PATIENCE_S):
                await worker.asked.wait()  # so long a prompt is read in a thread, and others pass it meanwhile
            answers.append(group.create_task(ask("z")))
            await until("/metrics", "kvherd_gateway_held_requests 1.0")
            file.write_text("[late_binding]\nbacklog_s = 0\n")
            await until("/server_info", '"reads":2')
            answers.append(group.create_task(ask("w")))
            await until("/metrics", "kvherd_gateway_running_requests 2.0")
            assert "kvherd_gateway_held_requests 1.0" in (await client.get("/metrics")).text
            worker.go_on.set()
        assert [one.result() for one in answers] == [200] * 3
