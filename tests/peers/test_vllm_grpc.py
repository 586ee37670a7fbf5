"""A stock vLLM's own gRPC server: it answers, is followed and flushed, by itself and behind the bridge.

`make test-vllm` installs it and runs these tests.
"""

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import httpx
import pytest
import zmq
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from kvherd.testing.doctors import examined, running
from kvherd.testing.herds import GatewayProcess, Start, begin_gateway
from kvherd.testing.processes import free_ports, wait_until
from kvherd.testing.stock_engines import StockServer, vllm
from kvherd.testing.stock_herds import is_live, kv_of

pytestmark = [pytest.mark.peers, pytest.mark.timeout(600)]
BLOCK = 32


@pytest.fixture(scope="module")
def server() -> Iterator[StockServer]:
    with TemporaryDirectory(prefix="kht-", dir="/tmp") as folder:
        short = Path(folder)
        one = vllm(free_ports((0,)), events=f"ipc://{short}/events", replay=f"ipc://{short}/replay", grpc=True)
        with running(one):
            wait_until(WarmedUp(one), within_s=120, what="it has warmed up")
            generate(one.url, tokens(0))  # warming up ends with a clear, which is told with the next step only
            yield one


class WarmedUp:
    """It answers while it still computes prompts of its own, for two seconds or so: true once it has published nothing
    for one.
    """

    def __init__(self, server: StockServer) -> None:
        self._replay = server.replay or ""
        self._published = -1
        self._since_s = 0.0

    def __call__(self) -> bool:
        published, now_s = published_at(self._replay), time.monotonic()
        if published != self._published:
            self._published, self._since_s = published, now_s
        return published > 0 and now_s - self._since_s >= 1


def published_at(replay: str) -> int:
    """How many batches are there to be replayed."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as asked:
        asked.set(zmq.LINGER, 0)
        asked.connect(replay)
        asked.send_multipart([b"", (0).to_bytes(8, "big")])
        count = 0
        while asked.poll(10_000):
            if not asked.recv_multipart()[-1]:
                return count
            count += 1
    raise AssertionError("it answers no replay")


def generate(url: str, prompt: list[int]) -> int:
    """The cached tokens that a generation of one token reports."""
    sampling = pb.SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    asked = pb.GenerateRequest(
        request_id=f"r-{random.getrandbits(64):x}",
        tokenized=pb.TokenizedInput(input_ids=prompt),
        sampling_params=sampling,
        stream=False,
    )
    with grpc.insecure_channel(url.removeprefix("grpc://")) as channel:
        *_, last = VllmEngineStub(channel).Generate(asked, timeout=120)
    return int(last.complete.cached_tokens)


def tokens(seed: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(1000, 40_000) for _ in range(4 * BLOCK + 1)]


def follow(gateway: GatewayProcess, url: str, seed: int) -> None:
    """What is stored is known, and what is flushed is gone."""
    (worker,) = gateway.workers()
    assert worker["kind"] == "vllm-grpc"
    wait_until(lambda: is_live(gateway), within_s=30, what="its events are followed")
    before = kv_of(gateway)["blocks"]
    assert generate(url, tokens(seed)) == 0
    # It stores blocks that nobody here asked for, too.
    wait_until(lambda: kv_of(gateway)["blocks"] >= before + 4, within_s=30, what="four blocks more are known")
    assert generate(url, tokens(seed)) == 4 * BLOCK
    held = kv_of(gateway)["blocks"]
    (flushed,) = httpx.post(f"{gateway.url}/flush_cache?timeout=10", timeout=30).json()["workers"]
    assert flushed["outcome"] == "done", flushed
    wait_until(lambda: kv_of(gateway)["blocks"] < held, within_s=30, what="it is known that it was cleared")
    assert generate(url, tokens(seed)) == 0


def test_it_is_followed_and_flushed_by_itself(server: StockServer, start: Start) -> None:
    follow(begin_gateway(start, server.url, up=1), server.url, seed=1)


def test_it_is_followed_and_flushed_behind_the_bridge(server: StockServer, start: Start) -> None:
    port = free_ports((0,))
    replay = server.replay or ""
    start(
        "bridge", "--engine", server.url, "--events", server.events, "--replay", replay, "--listen", f"127.0.0.1:{port}"
    )
    bridge = f"grpc://127.0.0.1:{port}"
    follow(begin_gateway(start, bridge, up=1), bridge, seed=2)


def test_a_chat_is_answered_and_streamed_and_what_is_cached_is_predicted(server: StockServer, start: Start) -> None:
    gateway = begin_gateway(start, server.url, up=1)
    wait_until(lambda: is_live(gateway), within_s=30, what="its events are followed")
    body = {"messages": [{"role": "user", "content": f"Count. {list(range(300, 400))}"}], "max_tokens": 8, "seed": 1}
    asked = body | {"temperature": 0, "logprobs": True, "top_logprobs": 2}
    first = httpx.post(f"{gateway.url}/v1/chat/completions", json=asked, timeout=120)
    assert first.status_code == 200, first.text
    (choice,), usage = first.json()["choices"], first.json()["usage"]
    assert 0 < usage["completion_tokens"] <= 8
    told = choice["logprobs"]["content"]
    assert "".join(token["token"] for token in told) == choice["message"]["content"]
    assert all(token["top_logprobs"][0]["token"] == token["token"] for token in told), "it is greedy"
    held = usage["prompt_tokens"] // BLOCK
    wait_until(lambda: kv_of(gateway)["blocks"] >= held, within_s=30, what="its blocks are known")
    streamed = asked | {
        "logprobs": False,
        "top_logprobs": None,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    second = httpx.post(f"{gateway.url}/v1/chat/completions", json=streamed, timeout=120)
    *events, end = [line.removeprefix("data: ") for line in second.text.split("\n\n") if line]
    assert end == "[DONE]"
    chunks = [json.loads(event) for event in events]
    said = "".join(one["delta"].get("content") or "" for chunk in chunks for one in chunk["choices"])
    assert said == choice["message"]["content"]
    cached = chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == (usage["prompt_tokens"] - 1) // BLOCK * BLOCK
    assert int(second.headers["x-kvherd-predicted-cached-tokens"]) == cached


def test_the_doctor_says_what_it_can_see(server: StockServer) -> None:
    told = examined(server.url)
    assert told.checks["KV events"][0] in ("ok", "warning"), told
    assert told.checks["flush"][0] == "ok", told
