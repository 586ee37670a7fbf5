"""A stock vLLM on a CPU, with `kvherd bridge`, and gateways that follow the bridge and vLLM's own sockets.

`make test-vllm` installs it and runs these tests.
"""

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from kvherd.testing.herds import GatewayProcess, Start, begin_gateway
from kvherd.testing.processes import KvherdProcess, free_ports, wait_until
from kvherd.testing.stock_engines import StockEngine, StockServer, vllm
from kvherd.testing.stock_herds import StockHerd, chat, is_live, stock_herd
from kvherd.testing.stock_story import StockStory

pytestmark = [pytest.mark.peers, pytest.mark.timeout(600)]


@pytest.fixture(scope="class")
def herd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StockHerd]:
    sockets: Path = tmp_path_factory.mktemp("v")
    server = vllm(free_ports((0,)), events=f"ipc://{sockets}/events", replay=f"ipc://{sockets}/replay")
    with stock_herd(server) as herd:
        yield herd


class TestVllm(StockStory):
    kind = "vllm-http"
    block_size = 32


@pytest.fixture(scope="module")
def plain() -> Iterator[tuple[StockServer, Start]]:
    """A vLLM that connects to whoever reads its events, and has no development mode."""
    port = free_ports((0, 1, 2))
    events, replay = (f"tcp://127.0.0.1:{port + offset}" for offset in (1, 2))
    with ExitStack() as stack:
        server = vllm(port, events=events, replay=replay, dev_mode=False)
        StockEngine(server, stack.enter_context).await_ready()
        yield server, lambda *words: stack.enter_context(KvherdProcess(*words))


def test_an_engine_that_connects_is_followed_directly_and_by_a_bridge(plain: tuple[StockServer, Start]) -> None:
    """Only one of them can listen where it connects, so the bridge takes the place of the gateway."""
    server, start = plain
    gateway = begin_gateway(start, server.direct_worker, up=1)
    await_prediction(gateway)
    gateway.process.signal(signal.SIGTERM)
    assert gateway.process.wait(within_s=10) == 0
    listen = f"127.0.0.1:{free_ports((0,))}"
    start(*server.bridge_words(listen))
    await_prediction(begin_gateway(start, f"{server.url},events=grpc://{listen}", up=1))


def test_a_flush_without_the_development_mode_is_unsupported_and_says_why(plain: tuple[StockServer, Start]) -> None:
    server, start = plain
    gateway = begin_gateway(start, server.url, up=1)
    answer = httpx.post(f"{gateway.url}/flush_cache?timeout=5", timeout=20)
    assert answer.status_code == 502
    (result,) = answer.json()["workers"]
    assert result["outcome"] == "unsupported"
    assert "VLLM_SERVER_DEV_MODE=1" in result["message"]


def await_prediction(gateway: GatewayProcess) -> None:
    """Until a prompt that was sent before is predicted exactly, and to be cached."""
    wait_until(lambda: is_live(gateway), within_s=20, what="its events are followed")
    messages = [{"role": "user", "content": "Say it again, please. " * 20}]

    def is_known() -> bool:
        answered, _ = chat(gateway, messages)
        return answered.exact and answered.reported > 0

    wait_until(is_known, within_s=20, what="its blocks are known")
