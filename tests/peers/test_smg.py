"""A stock SMG gateway takes `kvherd engine` for an SGLang worker: answers, events, orders, restarts.

It takes a `kvherd bridge` before that engine for the same, and gets its events from the bridge's relay.

`make test-smg` installs it and runs these tests.
"""

import json
import os
import re
import signal
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvherd.testing.engines_under_test import ENDLESS
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
            lambda *words: self.stack.enter_context(KvherdProcess(*words)), *ENDLESS, port=self.engine.port
        )

    def order(self, path: str, **body: Any) -> dict[str, Any]:
        """What SMG says of it; with a body if there is something to say."""
        answer = httpx.post(f"{self.url}{path}", json=body or None, timeout=20)
        told: dict[str, Any] = answer.json()
        return told

    @contextmanager
    def busy(self) -> Iterator[None]:
        """The engine runs a long answer."""
        body: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": uuid.uuid4().hex}]}
        body |= {"max_tokens": 50_000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{self.url}/v1/chat/completions", json=body, timeout=20) as answer:
            arriving = answer.iter_raw()  # kept: httpx hangs up when its iterator is dropped
            next(arriving)
            wait_until(lambda: self.running() == 1, within_s=10, what="the engine runs it")
            yield
        wait_until(lambda: self.running() == 0, within_s=10, what="the engine runs nothing")

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
    with smg_over(begin_bridge if request.param == "bridge" else lambda engine, _: engine.grpc_url) as pair:
        yield pair


@pytest.fixture
def over_http() -> Iterator[SmgOverEngine]:
    with smg_over(lambda engine, _: engine.url) as pair:
        yield pair


@contextmanager
def smg_over(url_of: Callable[[EngineProcess, ExitStack], str]) -> Iterator[SmgOverEngine]:
    binary = Path(os.environ.get("KVHERD_SMG", ".venv-smg/bin/smg"))
    assert binary.is_file(), f"there is no {binary}; `make test-smg` installs it and runs these tests"
    with ExitStack() as stack:
        engine = begin_engine(lambda *words: stack.enter_context(KvherdProcess(*words)), *ENDLESS)
        port = free_ports((0, 1))
        options = ["--host", "127.0.0.1", "--port", str(port), "--worker-urls", url_of(engine, stack)]
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


def test_a_flush_of_a_busy_engine_says_at_smg_what_is_busy(pair: SmgOverEngine) -> None:
    with pair.busy():
        refused = pair.order("/flush_cache")
    assert "the engine is busy: 1 running" in refused["failed"][0]["error"]
    assert pair.order("/flush_cache")["status"] == "success"


def test_a_profile_begins_and_ends_through_smg(pair: SmgOverEngine, tmp_path: Path) -> None:
    body = {"output_dir": str(tmp_path), "activities": ["CPU"]}
    assert pair.order("/start_profile", **body)["status"] == "success"
    assert "is on; stop it first" in pair.order("/start_profile", **body)["failed"][0]["error"]
    pair.chat(uuid.uuid4().hex, ignore_eos=True)
    assert pair.order("/stop_profile")["status"] == "success"
    [trace] = tmp_path.iterdir()
    assert len(steps(trace)) == 4
    assert "no profile is on" in pair.order("/stop_profile")["failed"][0]["error"]


def test_over_http_it_flushes_profiles_and_reads_metrics_at_the_operators_routes(
    over_http: SmgOverEngine, tmp_path: Path
) -> None:
    text = uuid.uuid4().hex * 8
    tokens, _ = over_http.cached(text)
    assert over_http.cached(text)[1] == (tokens - 1) // BLOCK * BLOCK
    assert over_http.order("/flush_cache")["status"] == "success"
    assert over_http.order("/start_profile", output_dir=str(tmp_path), num_steps=3)["status"] == "success"
    assert "HTTP 409" in over_http.order("/start_profile")["failed"][0]["error"]
    assert over_http.cached(text)[1] == 0
    over_http.chat(text, ignore_eos=True)
    wait_until(lambda: [path.suffix for path in tmp_path.iterdir()] == [".json"], within_s=10, what="the profile ended")
    assert len(steps(next(tmp_path.iterdir()))) == 3
    assert "HTTP 409" in over_http.order("/stop_profile")["failed"][0]["error"]
    assert "sglang:num_running_reqs{" in httpx.get(f"{over_http.url}/engine_metrics", timeout=20).text


def steps(trace: Path) -> list[dict[str, Any]]:
    return [each for each in json.loads(trace.read_bytes()) if each["name"].startswith("step ")]


def test_a_prompt_too_long_is_refused(pair: SmgOverEngine) -> None:
    answer = pair.chat("x" * 70_000)
    assert answer.status_code == 400
    assert pair.chat("still there?").status_code == 200


def test_its_event_stream_is_fed(pair: SmgOverEngine) -> None:
    pair.cached(uuid.uuid4().hex * 8)
    assert CONNECTED in pair.log
    pair.smg.wait_for(lambda: "Learned block_size from KV event" in pair.log, within_s=10, what="events arrive")
    assert f"block_size={BLOCK}" in pair.log


def test_a_client_that_leaves_smg_ends_its_request_on_the_engine(pair: SmgOverEngine) -> None:
    with pair.busy():
        assert pair.running() == 1
    assert pair.running() == 0


def test_an_engine_that_was_killed_and_restarted_serves_again_and_its_events_start_over(pair: SmgOverEngine) -> None:
    text = uuid.uuid4().hex * 8
    pair.cached(text)
    connections = pair.log.count(CONNECTED)
    pair.restart_engine()
    pair.smg.wait_for(lambda: pair.log.count(CONNECTED) > connections, within_s=30, what="its event stream is back")
    pair.smg.wait_for(lambda: pair.chat("back?").status_code == 200, within_s=90, what="it sends requests there again")
    assert pair.cached(text)[1] < 2 * BLOCK, "a new engine holds nothing of the old one's"
