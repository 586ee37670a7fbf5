"""`kvherd engine`, `kvherd bridge` before it, `kvherd gateway` before that: as if the bridge were the engine."""

import json
import signal
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import pytest
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated.sglang_scheduler_pb2_grpc import SglangSchedulerStub

from kvherd.testing.herds import (
    BridgeProcess,
    EngineProcess,
    GatewayProcess,
    begin_bridge,
    begin_engine,
    begin_gateway,
    get,
)
from kvherd.testing.processes import KvherdProcess, wait_until

pytestmark = pytest.mark.engine
BLOCK = 16


@dataclass
class Row:
    """A gateway whose only worker is a bridge, whose engine is behind it."""

    stack: ExitStack
    engine: EngineProcess
    bridge: BridgeProcess
    gateway: GatewayProcess
    relays: bool

    def complete(self, prompt: str, **more: Any) -> httpx.Response:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "temperature": 0} | more
        answer = httpx.post(f"{self.gateway.url}/v1/completions", json=body, timeout=20)
        assert answer.status_code == 200, answer.text
        return answer

    def serves(self) -> bool:
        body = {"model": "tiny", "prompt": "are you there?", "max_tokens": 1}
        return httpx.post(f"{self.gateway.url}/v1/completions", json=body, timeout=20).status_code == 200

    def cached(self, prompt: str) -> tuple[int, int]:
        """Predicted and reported."""
        answer = self.complete(prompt)
        told = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return int(answer.headers["x-kvherd-predicted-cached-tokens"]), told

    @property
    def kv(self) -> dict[str, Any]:
        return self.gateway.workers()[0]["kv"]  # type: ignore[return-value]

    def running(self) -> int:
        return sum(load["num_running_reqs"] for load in json.loads(get(f"{self.engine.url}/get_loads")[1])["loads"])

    def restart_engine(self) -> None:
        self.engine.process.signal(signal.SIGKILL)
        self.engine.process.wait(within_s=5)
        wait_until(lambda: not self.engine.process.family(), within_s=5, what="its scheduler ended too")
        self.engine = begin_engine(
            lambda *words: self.stack.enter_context(KvherdProcess(*words)), port=self.engine.port
        )


@pytest.fixture(scope="module", params=[True, False], ids=["relayed events", "the engine's events"])
def row(request: pytest.FixtureRequest) -> Iterator[Row]:
    with ExitStack() as stack:

        def start(*words: str) -> KvherdProcess:
            return stack.enter_context(KvherdProcess(*words))

        engine = begin_engine(start)
        bridge = begin_bridge(start, engine.grpc_url, *(engine.events if request.param else ()))
        gateway = begin_gateway(start, bridge.url, up=1)
        row = Row(stack, engine, bridge, gateway, relays=request.param)
        wait_until(lambda: row.kv["state"] == "live", within_s=10, what="its events are followed")
        yield row


def test_a_chat_and_a_stream_are_answered(row: Row) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 16, "temperature": 0}
    whole = httpx.post(f"{row.gateway.url}/v1/chat/completions", json=body, timeout=20)
    assert whole.status_code == 200, whole.text
    streamed = httpx.post(f"{row.gateway.url}/v1/chat/completions", json=body | {"stream": True}, timeout=20)
    lines = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    deltas = [choice["delta"].get("content") or "" for line in lines for choice in json.loads(line)["choices"]]
    assert "".join(deltas) == whole.json()["choices"][0]["message"]["content"]
    assert whole.headers["x-kvherd-worker"] == row.bridge.url


def test_what_is_predicted_is_what_the_engine_reports_until_a_flush(row: Row) -> None:
    prompt = uuid.uuid4().hex * 6
    held = row.kv["blocks"]
    assert row.cached(prompt) == (0, 0)
    wait_until(lambda: row.kv["blocks"] >= held + len(prompt) // BLOCK, within_s=10, what="its blocks are known")
    cacheable = (len(prompt) - 1) // BLOCK * BLOCK
    assert row.cached(prompt) == (cacheable, cacheable)
    flushed = httpx.post(f"{row.gateway.url}/flush_cache?timeout=5", timeout=20)
    assert flushed.status_code == 200, flushed.text
    [rank] = flushed.json()["workers"][0]["ranks"]
    assert (rank["rank"], rank["outcome"]) == (0, "done")
    assert row.cached(prompt) == (0, 0)


def test_a_client_that_leaves_ends_its_request_on_the_engine(row: Row) -> None:
    body = {"model": "tiny", "prompt": uuid.uuid4().hex, "max_tokens": 1900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{row.gateway.url}/v1/completions", json=body, timeout=20) as answer:
        arriving = answer.iter_raw()  # kept: httpx hangs up when its iterator is dropped
        assert answer.status_code == 200, next(arriving)
        next(arriving)
        wait_until(lambda: row.running() == 1, within_s=5, what="the engine runs it")
    wait_until(lambda: row.running() == 0, within_s=2, what="the engine runs nothing")


def accepted(stub: Any) -> bool:
    call = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(), timeout=20)
    told = "kvherd-epoch" in dict(call.initial_metadata())
    call.cancel()
    return told


def test_an_engine_that_is_killed_and_started_again_is_another_one_to_all_who_follow(row: Row) -> None:
    prompt = uuid.uuid4().hex * 6
    row.cached(prompt)
    with grpc.insecure_channel(f"127.0.0.1:{row.bridge.port}") as channel:
        stub = SglangSchedulerStub(channel)
        events = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(), timeout=60)
        before, followed = dict(events.initial_metadata())["kvherd-epoch"], row.kv["epoch"]
        assert next(events).events
        row.restart_engine()
        with pytest.raises(grpc.RpcError) as ended:
            list(events)
        expected = grpc.StatusCode.DATA_LOSS if row.relays else grpc.StatusCode.UNAVAILABLE
        assert ended.value.code() is expected
        if not row.relays:
            assert row.engine.grpc_url in ended.value.details()
        wait_until(lambda: row.gateway.has_up(1), within_s=20, what="the worker is up again")
        wait_until(lambda: accepted(stub), within_s=10, what="the bridge reaches the engine again")
        fresh = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(), timeout=20)
        assert dict(fresh.initial_metadata())["kvherd-epoch"] != before
        first = next(fresh)
        assert first.HasField("snapshot")
        assert [event.WhichOneof("data") for event in first.events] == ["cleared"]
        fresh.cancel()
    wait_until(
        lambda: row.kv["state"] == "live" and row.kv["epoch"] != followed,
        within_s=20,
        what="the gateway has noticed its death, and follows its next life",
    )
    wait_until(row.serves, within_s=20, what="the gateway has noticed its return")
    assert row.cached(prompt) == (0, 0)
    assert not row.bridge.process.has_ended()
    assert "Traceback" not in row.bridge.process.said


def test_a_stopped_bridge_leaves_nothing_while_a_gateway_follows_it(row: Row) -> None:
    row.bridge.process.signal(signal.SIGTERM)
    assert row.bridge.process.wait(within_s=9) == 0
    assert "Traceback" not in row.bridge.process.said
    row.bridge.process.assert_nothing_left(ports=[row.bridge.port])
