"""`kvherd doctor` as a process, before servers that have one thing wrong: what it says is true, and mends it.

A tcp:// endpoint without a wildcard means to vLLM that it connects, so the fake says what it does by an ipc:// one.
"""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from kvherd.adapters.tokenizer import tokenizer_from_directory
from kvherd.adapters.vocabulary import hf_files, tiny_vocabulary
from kvherd.adapters.zmq_kv_feed import ZmqFrameFeed
from kvherd.core.kv.frames import Connected
from kvherd.testing.doctors import Told, examined
from kvherd.testing.herds import begin_bridge, begin_engine
from kvherd.testing.processes import KvherdProcess, free_ports
from kvherd.testing.publisher import FakePublisher
from kvherd.testing.stock_vllm import StockVllm

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


async def doctor(url: str, *words: str, key: str = "") -> Told:
    return await asyncio.to_thread(examined, url, *words, key=key)


@pytest.fixture
def folder() -> Iterator[Path]:
    # Short, because the path of a Unix socket may have 107 bytes only.
    with TemporaryDirectory(prefix="kht-", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture
def model(folder: Path) -> Path:
    """A model's directory, as much of it as a tokenizer needs."""
    directory = folder / "model"
    directory.mkdir()
    for name, data in hf_files(tiny_vocabulary()).items():
        (directory / name).write_bytes(data)
    return directory


def listening(folder: Path, **more: bool) -> FakePublisher:
    return FakePublisher(events_endpoint=f"ipc://{folder}/events", replay_endpoint=f"ipc://{folder}/replay")


def stock(folder: Path, model: Path, **more: Any) -> StockVllm:
    fields: dict[str, Any] = {"publisher": listening(folder), "tokenizer": tokenizer_from_directory(model)}
    return StockVllm(**fields | more)


async def test_a_server_with_nothing_wrong_is_told_so(folder: Path, model: Path) -> None:
    async with stock(folder, model) as server:
        told = await doctor(server.url, "--tokenizer", str(model))
        assert (told.status, told.but_ok()) == (0, {}), told
        assert len(server.asked) == 3
        assert server.cache.truth, "nothing was flushed"


async def test_what_works_and_could_do_better_is_warned_of(folder: Path, model: Path) -> None:
    async with stock(folder, model, dev_mode=False, details=False) as server:
        events = server.publisher.events_endpoint
        told = await doctor(server.url, "--tokenizer", str(model), "--events", events)
        assert told.status == 0
        assert told.but_ok() == {"flush": "warning", "replay": "warning", "cached tokens": "warning"}
        assert "VLLM_SERVER_DEV_MODE=1" in told.checks["flush"][2]
        assert "--enable-prompt-tokens-details" in told.checks["cached tokens"][2]
        assert "replay_endpoint" in told.checks["replay"][2]


async def test_events_that_are_off_are_a_problem_where_the_server_says_so(folder: Path, model: Path) -> None:
    async with stock(folder, model, publishes=False) as server:
        told = await doctor(server.url, "--tokenizer", str(model))
        assert (told.status, told.but_ok()) == (1, {"KV events": "problem"})
        assert "--kv-events-config" in told.checks["KV events"][2]
        server.dev_mode = False
        told = await doctor(server.url, "--tokenizer", str(model))
        assert (told.status, told.but_ok()["KV events"]) == (0, "unknown")


async def test_a_publisher_of_another_engine_and_a_replay_of_nobody(folder: Path, model: Path) -> None:
    async with listening(folder) as other, stock(folder, model, publisher=FakePublisher(), dev_mode=False) as server:
        nobody = f"tcp://127.0.0.1:{free_ports((0,))}"
        words = ("--tokenizer", str(model), "--events", other.events_endpoint, "--replay", nobody)
        told = await doctor(server.url, *words)
        assert told.status == 1
        assert told.but_ok() == {"flush": "warning", "events arrive": "problem", "replay": "problem"}


async def test_an_engine_that_connects_is_heard_by_whoever_listens_there(folder: Path, model: Path) -> None:
    endpoint = f"tcp://127.0.0.1:{free_ports((0,))}"
    publisher = FakePublisher(events_endpoint=endpoint, connects=True)
    async with stock(folder, model, publisher=publisher) as server:
        told = await doctor(server.url, "--tokenizer", str(model))
        assert (told.status, told.but_ok()) == (1, {"KV events": "problem"})
        assert f"--events {endpoint} --bind-events" in told.checks["KV events"][2]
        words = ("--events", endpoint, "--replay", publisher.replay_endpoint, "--bind-events")
        told = await doctor(server.url, "--tokenizer", str(model), *words)
        assert (told.status, told.but_ok()) == (0, {}), told


async def test_an_engine_that_listens_keeps_its_place(folder: Path, model: Path) -> None:
    async with stock(folder, model, dev_mode=False) as server:
        events = server.publisher.events_endpoint
        told = await doctor(server.url, "--tokenizer", str(model), "--events", events, "--bind-events")
        assert (told.status, told.but_ok()["KV events"]) == (1, "problem")
        async with ZmqFrameFeed(events) as feed:
            assert isinstance(await feed.next(within_s=10), Connected)


async def test_a_server_that_wants_a_key_gets_it_from_the_environment(folder: Path, model: Path) -> None:
    async with stock(folder, model, api_key="sesame") as server:
        told = await doctor(server.url, "--tokenizer", str(model))
        assert (told.status, told.but_ok()) == (1, {"API key": "problem"})
        assert "wants an API key" in told.checks["API key"][1]
        assert "KVHERD_ENGINE_API_KEY" in told.checks["API key"][2]
        told = await doctor(server.url, "--tokenizer", str(model), key="wrong")
        assert "does not accept" in told.checks["API key"][1]
        told = await doctor(server.url, "--tokenizer", str(model), key="sesame")
        assert (told.status, told.but_ok()) == (0, {}), told


async def test_another_chat_template_is_told_from_another_tokenizer(folder: Path, model: Path) -> None:
    async with stock(folder, model) as server:
        (model / "chat_template.jinja").write_text("{% for one in messages %}{{ one.content }}{% endfor %}")
        told = await doctor(server.url, "--tokenizer", str(model))
        assert told.status == 1
        assert told.checks["tokenization: chat"][0] == "problem"
        assert "chat_template.jinja" in told.checks["tokenization: chat"][2]
        assert "text" in told.checks["tokenization"][1]


async def test_a_url_where_nobody_is() -> None:
    told = await doctor(f"http://127.0.0.1:{free_ports((0,))}")
    assert (told.status, told.but_ok()) == (3, {"reachable": "problem"})


async def test_our_engine_over_both_its_protocols_and_behind_a_bridge() -> None:
    with ExitStack() as stack:

        def start(*words: str) -> KvherdProcess:
            return stack.enter_context(KvherdProcess(*words))

        engine = await asyncio.to_thread(begin_engine, start)
        bridge = await asyncio.to_thread(begin_bridge, start, engine.grpc_url, *engine.events)
        for words in ((engine.url,), (engine.grpc_url,), (bridge.url,), (engine.url, "--events", bridge.url)):
            told = await doctor(*words)
            assert (words, told.status, told.but_ok()) == (words, 0, {})
