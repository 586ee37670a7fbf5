"""A stock SGLang on a CPU, with `kvherd bridge`, and gateways that follow the bridge and SGLang's own sockets.

`make test-sglang` installs it and runs these tests.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from kvherd.testing.herds import GatewayProcess, begin_gateway
from kvherd.testing.processes import KvherdProcess, free_ports, wait_until
from kvherd.testing.stock_engines import StockEngine, sglang
from kvherd.testing.stock_herds import StockHerd, Talks, can_predict, is_live, stock_herd
from kvherd.testing.stock_story import StockStory

pytestmark = [pytest.mark.peers, pytest.mark.timeout(1200)]


@pytest.fixture(scope="class")
def herd() -> Iterator[StockHerd]:
    port = free_ports((0, 1, 2))
    server = sglang(port, events=f"tcp://127.0.0.1:{port + 1}", replay=f"tcp://127.0.0.1:{port + 2}")
    with stock_herd(server) as herd:
        yield herd


class TestSglang(StockStory):
    kind = "sglang-http"
    block_size = 16


@pytest.fixture(scope="module")
def on_grpc() -> Iterator[tuple[StockEngine, GatewayProcess]]:
    """SGLang's gRPC mode, which tells its KV events itself."""
    port = free_ports((0, 1, 2, 3))
    events, replay = (f"tcp://127.0.0.1:{port + offset}" for offset in (2, 3))
    with ExitStack() as stack:
        engine = StockEngine(sglang(port, events=events, replay=replay, grpc=True), stack.enter_context)
        engine.await_ready()
        gateway = begin_gateway(lambda *words: stack.enter_context(KvherdProcess(*words)), engine.server.url)
        gateway.process.wait_for(lambda: can_predict(gateway), within_s=60, what="it follows the engine")
        yield engine, gateway


def test_the_events_of_its_grpc_mode_are_followed_through_a_flush_and_a_restart(
    on_grpc: tuple[StockEngine, GatewayProcess], capsys: pytest.CaptureFixture[str]
) -> None:
    engine, gateway = on_grpc
    (worker,) = gateway.workers()
    assert (worker["kind"], worker["block_size"]) == ("sglang-grpc", 16)
    talks = Talks(seed=5)
    for _ in range(30):
        talks.turn(gateway)
    (flushed,) = httpx.post(f"{gateway.url}/flush_cache?timeout=10", timeout=30).json()["workers"]
    assert flushed["outcome"] == "done"
    assert talks.turn(gateway).reported == 0
    for _ in range(19):
        talks.turn(gateway)
    engine.kill()
    wait_until(lambda: gateway.workers()[0]["state"] == "down", within_s=20, what="it is down")
    engine.begin()
    engine.await_ready()
    wait_until(lambda: is_live(gateway), within_s=60, what="it is followed again")
    assert talks.turn(gateway).reported == 0
    for _ in range(19):
        talks.turn(gateway)
    with capsys.disabled():
        sys.stdout.write(f"\nsglang-grpc: {talks.figures()}\n")
    assert sum(one.exact for one in talks.answers) >= 0.99 * len(talks.answers), talks.figures()
    assert sum(one.reported > 0 for one in talks.answers) >= 0.5 * len(talks.answers), talks.figures()
