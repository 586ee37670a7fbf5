"""From quarantine to credit: a stock-like vLLM whose events begin in the middle of its life, over real sockets."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest

from kvherd.adapters.grpc_kv_feed import GrpcKvFeed
from kvherd.adapters.http_worker import HttpWorker
from kvherd.adapters.zmq_kv_feed import ZmqFrameFeed
from kvherd.core.fleet.spec import WorkerSpec
from kvherd.core.ids import Rank, WorkerId
from kvherd.ports.completions import Tokenizer
from kvherd.ports.kv_feed import EventSource, KvFeed
from kvherd.services.bridge.bridge import Bridge, BridgeConfig
from kvherd.services.bridge.flushes import Flushes
from kvherd.services.bridge.http_front import HttpFront
from kvherd.services.gateway.gateway import Gateway, GatewayConfig
from kvherd.services.gateway.settings import HealMode
from kvherd.services.gateway.turns.chat import PathConfig
from kvherd.services.kv_relay.direct import DirectKvFeed
from kvherd.services.kv_relay.event_streams import EventStreams
from kvherd.services.kv_relay.relay import KvRelay, RelayOptions
from kvherd.testing.processes import free_ports
from kvherd.testing.stock_vllm import StockVllm
from kvherd.testing.tokenizer import ByteTokenizer

pytestmark = pytest.mark.net

FAST = RelayOptions(probe_s=0.5, replay_silence_s=0.3)
"""While it is asked whether that was all, what a worker says waits: not between any two requests here."""
CONVERSATIONS = [f"Conversation {name}: " + f"what would {name} say? " * 8 for name in ("ann", "bob", "cat")]


@asynccontextmanager
async def bridge_of(engine: StockVllm) -> AsyncIterator[str]:
    """A bridge that starts now; its URL."""
    port = free_ports((0,))
    worker = HttpWorker(WorkerId(engine.url), engine.url)
    frames = {Rank(0): ZmqFrameFeed(engine.publisher.events_endpoint, engine.publisher.replay_endpoint)}
    try:
        async with KvRelay(frames, options=FAST) as relay:
            flushes = Flushes(worker, obeyed=relay.flushed, unknown=relay.doubted)
            front = HttpFront(worker, EventStreams(relay, server="the bridge"), flushes)
            async with flushes, Bridge(BridgeConfig(port=port, retry_s=0.01), front, identify=worker.detect):
                yield f"grpc://127.0.0.1:{port}"
    finally:
        await worker.close()


def feed_of(source: EventSource) -> KvFeed:
    if not source.direct:
        return GrpcKvFeed(source.events.removeprefix("grpc://"))
    return DirectKvFeed(lambda: {Rank(0): ZmqFrameFeed(source.events, source.replay)}, options=FAST)


@asynccontextmanager
async def gateway_over(spec: WorkerSpec, path: PathConfig) -> AsyncIterator[httpx.AsyncClient]:
    async def tokenizer(_: str) -> Tokenizer:
        return ByteTokenizer()

    it = Gateway(
        GatewayConfig(port=0, grpc_port=0, workers=(spec,), path=path),
        worker_factory=lambda url, _: HttpWorker(WorkerId(url), url),
        feed_factory=feed_of,
        tokenizer_factory=tokenizer,
    )
    async with it, httpx.AsyncClient(base_url=f"http://127.0.0.1:{it.port}", timeout=10.0) as client:
        await sees(client, lambda one: one["kv"]["state"] == "live" and one["state"] == "up")
        yield client


async def worker_of(client: httpx.AsyncClient) -> dict[str, Any]:
    (worker,) = (await client.get("/workers")).json()["workers"]
    return dict(worker)


async def sees(client: httpx.AsyncClient, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Wait until the gateway's view of its worker is such."""
    worker: dict[str, Any] = {}
    try:
        async with asyncio.timeout(8.0):
            while True:
                listed = (await client.get("/workers")).json()["workers"]
                if listed and condition(worker := listed[0]):
                    return worker
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"it never came to be: {worker}") from None


async def chat(client: httpx.AsyncClient, said: str, **more: object) -> tuple[int, int]:
    """The predicted and the reported cached tokens."""
    body = {"model": "smollm2", "messages": [{"role": "user", "content": said}], **more}
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    reported = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return int(answer.headers["x-kvherd-predicted-cached-tokens"]), reported


@asynccontextmanager
async def late(how: str, engine: StockVllm, path: PathConfig | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """A gateway that follows the engine from now on, when the engine's replay no longer reaches back."""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(engine)
        engine.publisher.kept = 2
        async with httpx.AsyncClient(base_url=engine.url) as before:
            for said in (*CONVERSATIONS, "what the replay reaches back to", "and nothing before"):
                body = {"model": "smollm2", "messages": [{"role": "user", "content": said}]}
                await before.post("/v1/chat/completions", json=body)
        if how == "bridge":
            spec = WorkerSpec(engine.url, await stack.enter_async_context(bridge_of(engine)))
        else:
            sockets = engine.publisher.events_endpoint, engine.publisher.replay_endpoint
            spec = WorkerSpec(engine.url, *sockets, tokenizer="bytes")
        yield await stack.enter_async_context(gateway_over(spec, path or PathConfig()))


async def agreed(client: httpx.AsyncClient, said: str) -> int:
    """Ask until what is predicted is reported: what the last answer published may still be on its way."""
    async with asyncio.timeout(5.0):
        while True:
            predicted, reported = await chat(client, said)
            if predicted == reported:
                return reported


@pytest.mark.parametrize("how", ["bridge", "direct"])
async def test_traffic_brings_back_the_credit_of_what_was_stored_before_anyone_listened(how: str) -> None:
    async with late(how, StockVllm(step_s=0.002)) as client:
        await sees(client, lambda one: one["kv"]["complete"] is False)
        for said in CONVERSATIONS:
            predicted, reported = await chat(client, said)
            assert predicted < reported, "it is cached there, and nobody had told"
            assert await agreed(client, said) == reported
        healed = (await worker_of(client))["kv"]["healings"]
        assert healed >= len(CONVERSATIONS)
        assert [await agreed(client, said) for said in CONVERSATIONS] == [192, 192, 192]
        worker = await worker_of(client)
        assert worker["kv"]["healings"] == healed, "what is wholly known is not asked for again"
        assert worker["truth"]["wrong"] == 0
        assert worker["truth"]["decided"] >= len(CONVERSATIONS)
        assert (await client.get("/audit")).json()["fine"] is True


async def test_in_an_epoch_that_began_late_nothing_is_predicted_that_was_evicted() -> None:
    """Chains are told again while others push them out. What an engine says in the middle of an answer is there before
    its end; what it says last may not be when the next request comes, and then nothing is decided.
    """
    async with late("direct", StockVllm(blocks=30, step_s=0.01)) as client:
        for number in range(40):
            said = CONVERSATIONS[number % 3] + "and so on " * (number % 5)
            await chat(client, said)
        truth = (await worker_of(client))["truth"]
        assert (truth["wrong"], truth["rebuilds"]) == (0, 0)
        assert truth["decided"] >= 20


async def test_a_flush_ends_what_is_not_known_and_predictions_are_exact_from_then_on() -> None:
    async with late("bridge", StockVllm(step_s=0.002), PathConfig(heal=HealMode.FLUSH)) as client:
        worker = await sees(client, lambda one: one["kv"]["healings"] == 1)
        assert await chat(client, CONVERSATIONS[0]) == (0, 0)
        worker = await sees(client, lambda one: one["kv"]["complete"] and one["kv"]["blocks"] > 0)
        assert await agreed(client, CONVERSATIONS[0]) == 192
        worker = await worker_of(client)
        assert (worker["kv"]["healings"], worker["truth"]["wrong"]) == (1, 0)


async def test_streams_that_are_asked_for_their_usage_look_as_if_they_were_not() -> None:
    async with late("direct", StockVllm(step_s=0.002), PathConfig(usage_sample=1.0)) as client:
        body = {"model": "smollm2", "messages": [{"role": "user", "content": CONVERSATIONS[0]}], "stream": True}
        seen = []
        for _ in range(4):
            answer = await client.post("/v1/chat/completions", json=body)
            seen.append(re.sub(r"chatcmpl-\w+", "chatcmpl", answer.text))
        assert seen == [seen[0]] * 4
        assert "usage" not in seen[0]
        truth = (await worker_of(client))["truth"]
        assert (truth["unavailable"], truth["wrong"]) == (1, 0), "only the first was left as it was"
        assert "kvherd_gateway_usage_samples_total{" in (await client.get("/metrics")).text


async def test_an_engine_that_does_not_report_is_found_out_and_the_flag_is_named() -> None:
    async with late("direct", StockVllm(details=False)) as client:
        body = {"model": "smollm2", "prompt": CONVERSATIONS[0]}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        (worker,) = (await client.get("/audit")).json()["workers"]
        assert (worker["unavailable"], worker["fine"]) == (1, False)
        assert "--enable-prompt-tokens-details" in worker["advice"]
