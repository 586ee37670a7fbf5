"""A stock SMG gateway takes `kvherd engine` for an SGLang worker: answers, cached tokens, KV events, flushes, restarts.

It takes a `kvherd bridge` before that engine for the same, and gets its events from the bridge's relay.

`make test-smg` installs it and runs these tests.
"""

import json
import os
import re
import signal
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvherd.testing.herds import EngineProcess, begin_engine, get
from kvherd.testing.processes import KvherdProcess, OwnedProcess, free_ports, wait_until

pytestmark = [pytest.mark.peers, pytest.mark.timeout(180)]

BLOCK = 16
EVENTS_OFFSET, REPLAY_OFFSET = 10, 30
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
CONNECTED = "KV event stream connected"


@dataclass
class SmgOverEngine:
    """SMG with one worker, the engine or a bridge before it. `engine` changes when it is started anew."""

    smg: OwnedProcess
    url: str
    engine: EngineProcess
    stack: ExitStack

    @property
    def log(self) -> str:
        return COLOURS.sub("", self.smg.said)

    def chat(self, text: str, **more: Any) -> httpx.Response:
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 4, "temperature": 0}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body | more, timeout=20)

    def cached(self, text: str) -> tuple[int, int]:
        """Prompt tokens and how many of them were cached, as SMG tells its client."""
        answer = self.chat(text)
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

    def restart_engine(self) -> None:
        self.engine.process.signal(signal.SIGKILL)
        self.engine.process.wait(within_s=5)
        wait_until(lambda: not self.engine.process.family(), within_s=5, what="its scheduler ended too")
        self.engine = begin_engine(
            lambda *words: self.stack.enter_context(KvherdProcess(*words)), port=self.engine.port
        )

    def running(self) -> int:
        return sum(load["num_running_reqs"] for load in json.loads(get(f"{self.engine.url}/get_loads")[1])["loads"])


def begin_bridge(engine: EngineProcess, stack: ExitStack) -> str:
    """A bridge that reads the engine's own sockets; its URL."""
    port = free_ports((0,))
    words = ("bridge", "--engine", engine.grpc_url, "--listen", f"127.0.0.1:{port}")
    sockets = (f"tcp://127.0.0.1:{engine.port + EVENTS_OFFSET}", f"tcp://127.0.0.1:{engine.port + REPLAY_OFFSET}")
    bridge = stack.enter_context(KvherdProcess(*words, "--events", sockets[0], "--replay", sockets[1]))
    bridge.wait_for(lambda: "serving the KV events and calls" in bridge.said, what="the bridge serves")
    return f"grpc://127.0.0.1:{port}"


@pytest.fixture(scope="module", params=["engine", "bridge"])
def pair(request: pytest.FixtureRequest) -> Iterator[SmgOverEngine]:
    binary = Path(os.environ.get("KVHERD_SMG", ".venv-smg/bin/smg"))
    assert binary.is_file(), f"there is no {binary}; `make test-smg` installs it and runs these tests"
    with ExitStack() as stack:
        engine = begin_engine(lambda *words: stack.enter_context(KvherdProcess(*words)))
        worker = engine.grpc_url if request.param == "engine" else begin_bridge(engine, stack)
        port = free_ports((0, 1))
        options = ["--host", "127.0.0.1", "--port", str(port), "--worker-urls", worker]
        options += ["--policy", "cache_aware", "--prometheus-host", "127.0.0.1", "--prometheus-port", str(port + 1)]
        smg = stack.enter_context(OwnedProcess([str(binary), "launch", *options]))
        url = f"http://127.0.0.1:{port}"
        smg.wait_for(lambda: b"tiny" in get(f"{url}/v1/models")[1], what="SMG knows its worker's model")
        pair = SmgOverEngine(smg, url, engine, stack)
        # It lists the model before it has the tokenizer, which it asks for again after 2 s if the worker was not up.
        smg.wait_for(lambda: pair.chat("ready?").status_code == 200, what="SMG has its worker's tokenizer")
        yield pair


def test_a_chat_is_answered_whole(pair: SmgOverEngine) -> None:
    answer = pair.chat("hello")
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert choice["message"]["content"]
    assert choice["finish_reason"] == "length"
    assert answer.json()["usage"]["completion_tokens"] == 4


def test_a_chat_is_streamed(pair: SmgOverEngine) -> None:
    whole = pair.chat("stream this", max_tokens=24).json()["choices"][0]["message"]["content"]
    answer = pair.chat("stream this", max_tokens=24, stream=True, stream_options={"include_usage": True})
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    chunks = [json.loads(line) for line in lines]
    deltas = [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]]
    assert "".join(deltas) == whole
    assert len([delta for delta in deltas if delta]) > 1
    assert chunks[-1]["usage"]["completion_tokens"] == 24


def test_a_prompt_that_repeats_is_cached_until_smg_flushes(pair: SmgOverEngine) -> None:
    text = uuid.uuid4().hex * 8
    tokens, cached = pair.cached(text)
    assert cached < 2 * BLOCK, "no more than what the template begins every chat with"
    assert pair.cached(text) == (tokens, (tokens - 1) // BLOCK * BLOCK)
    flushed = httpx.post(f"{pair.url}/flush_cache", timeout=20)
    assert flushed.status_code == 200
    assert (flushed.json()["workers_flushed"], flushed.json()["total_grpc_workers"]) == (1, 1)
    assert pair.cached(text) == (tokens, 0)


def test_a_prompt_too_long_is_refused(pair: SmgOverEngine) -> None:
    answer = pair.chat("x" * 5000)
    assert answer.status_code == 400
    assert pair.chat("still there?").status_code == 200


def test_its_event_stream_is_fed(pair: SmgOverEngine) -> None:
    pair.cached(uuid.uuid4().hex * 8)
    assert CONNECTED in pair.log
    pair.smg.wait_for(lambda: "Learned block_size from KV event" in pair.log, within_s=10, what="events arrive")
    assert f"block_size={BLOCK}" in pair.log


def test_a_client_that_leaves_smg_ends_its_request_on_the_engine(pair: SmgOverEngine) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": uuid.uuid4().hex}],
        "max_tokens": 1900,
        "ignore_eos": True,
        "stream": True,
    }
    with httpx.stream("POST", f"{pair.url}/v1/chat/completions", json=body, timeout=20) as answer:
        arriving = answer.iter_raw()  # kept: httpx hangs up when its iterator is dropped
        next(arriving)
        wait_until(lambda: pair.running() == 1, within_s=5, what="the engine runs it")
    wait_until(lambda: pair.running() == 0, within_s=2, what="the engine runs nothing")


def test_an_engine_that_was_killed_and_restarted_serves_again_and_its_events_start_over(pair: SmgOverEngine) -> None:
    text = uuid.uuid4().hex * 8
    pair.cached(text)
    connections = pair.log.count(CONNECTED)
    pair.restart_engine()
    pair.smg.wait_for(lambda: pair.log.count(CONNECTED) > connections, within_s=30, what="its event stream is back")
    pair.smg.wait_for(lambda: pair.chat("back?").status_code == 200, within_s=90, what="it sends requests there again")
    assert pair.cached(text)[1] < 2 * BLOCK, "a new engine holds nothing of the old one's"
