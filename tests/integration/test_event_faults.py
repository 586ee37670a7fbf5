"""Engines, bridges and gateways as real processes that are killed, stopped and started again.

One engine is followed twice by one gateway: over a bridge, and by its own sockets. What `GET /workers` says of it is
what it holds within 5 s of anything, or that it is not known.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from kvherd.testing.cache_truth import PROMISE_S
from kvherd.testing.herds import GatewayProcess, Start, begin_gateway
from kvherd.testing.processes import KvherdProcess, free_ports, wait_until
from kvherd.testing.publisher_process import PublisherProcess

pytestmark = pytest.mark.engine
VLLM = {
    "/version": '{"version": "0.32.0"}',
    "/v1/models": '{"data": [{"id": "smollm2", "max_model_len": 1024}]}',
    "/metrics": 'vllm:cache_config_info{block_size="16",num_gpu_blocks="10"} 1\n',
    "/health": "",
}
MARGIN_S = 1.0
"""For what it takes to ask."""


class _Vllm(BaseHTTPRequestHandler):
    """As much of an engine's HTTP as a gateway wants to see."""

    def do_GET(self) -> None:
        body = VLLM.get(self.path.partition("?")[0])
        data = (body or "").encode()
        self.send_response(404 if body is None else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@dataclass
class Stage:
    engine: PublisherProcess
    start: Start
    bridge_port: int
    bridge: KvherdProcess
    workers: tuple[str, str]
    gateway: GatewayProcess

    @property
    def specs(self) -> tuple[str, str]:
        over_bridge, direct = self.workers
        return (
            f"{over_bridge},events=grpc://127.0.0.1:{self.bridge_port}",
            f"{direct},events={self.engine.events},replay={self.engine.replay}",
        )

    def start_bridge(self) -> None:
        self.bridge = begin_bridge(self.start, self.engine, self.bridge_port)

    def kv(self) -> list[dict[str, Any]]:
        """What is known of the engine, over the bridge and directly."""
        known: dict[Any, Any] = {one["url"]: one["kv"] for one in self.gateway.workers()}
        return [known[url] for url in self.workers if url in known]

    def wait(self, condition: Callable[[], bool], what: str, within_s: float = PROMISE_S + MARGIN_S) -> None:
        try:
            wait_until(condition, within_s=within_s, what=what)
        except AssertionError as error:
            error.add_note(f"{self.kv()}, and the engine holds {len(self.engine.truth.blocks)} blocks")
            raise

    def is_true(self, within_s: float = 2 * PROMISE_S) -> None:
        """Both ways say all that the engine holds; after a fault it may take a pause of the follower's until then."""
        blocks = len(self.engine.truth.blocks)
        self.wait(lambda: [one["blocks"] for one in self.kv() if is_live(one)] == [blocks] * 2, "it is true", within_s)

    def keeps_its_promise(self) -> None:
        blocks = len(self.engine.truth.blocks)
        self.wait(
            lambda: all(
                not is_live(one) or one["blocks"] == blocks or (one["blocks"] < blocks and not one["complete"])
                for one in self.kv()
            ),
            "true or quarantined",
        )


def is_live(kv: dict[str, Any]) -> bool:
    return bool(kv["state"] == "live")


def begin_bridge(start: Start, engine: PublisherProcess, port: int, *options: str) -> KvherdProcess:
    words = ("bridge", "--engine", "http://127.0.0.1:1", "--listen", f"127.0.0.1:{port}")
    process: KvherdProcess = start(*words, "--events", engine.events, "--replay", engine.replay, *options)
    process.wait_for(lambda: "serving the KV events" in process.said, what="the bridge serves")
    return process


@pytest.fixture(scope="module")
def start_once() -> Iterator[Start]:
    with ExitStack() as stack:
        yield lambda *words: stack.enter_context(KvherdProcess(*words))


@pytest.fixture(scope="module")
def shared(start_once: Start, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with ExitStack() as stack:
        servers = [ThreadingHTTPServer(("127.0.0.1", 0), _Vllm) for _ in range(2)]
        for server in servers:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
        over_bridge, direct = (f"http://127.0.0.1:{server.server_port}" for server in servers)
        port = free_ports((0, 10, 20))
        engine = stack.enter_context(PublisherProcess(tmp_path_factory.mktemp("engine"), port, port + 10))
        bridge = begin_bridge(start_once, engine, port + 20)
        gateway = GatewayProcess(bridge, 0)
        stage = Stage(engine, start_once, port + 20, bridge, (over_bridge, direct), gateway)
        stage.gateway = begin_gateway(start_once, *stage.specs, up=2)
        yield stage


@pytest.fixture
def stage(shared: Stage) -> Stage:
    """Everything is up, and the engine's life is a new one. Tests remove the ends of chains: what is behind a hole is
    counted only by who knew it before."""
    shared.engine.kill()
    shared.engine.start()
    shared.engine.publish(("store", 1, None, 3))
    shared.engine.publish(("store", 10, 3, 2))
    shared.engine.publish(("remove", 11))
    shared.is_true()
    return shared


@pytest.mark.parametrize("batches", [0, 1, 3, 9], ids=["none", "fewer", "as many", "more"])
def test_a_killed_engine_is_known_by_its_next_life_alone(stage: Stage, batches: int) -> None:
    stage.engine.kill()
    stage.engine.start()
    for number in range(batches):
        stage.engine.publish(("store", 100 + number, None, 1))
    stage.keeps_its_promise()
    stage.is_true()


def test_a_killed_engine_that_stays_away_has_no_credit(stage: Stage) -> None:
    stage.engine.kill()
    stage.wait(lambda: not any(map(is_live, stage.kv())), "both ways say that they do not know")
    assert all(one["reason"] for one in stage.kv())
    stage.engine.start()
    stage.engine.publish(("store", 7, None, 1))
    stage.is_true()


def test_a_stopped_engine_has_no_credit_until_it_goes_on(stage: Stage) -> None:
    assert stage.engine.process is not None
    stage.engine.process.signal(signal.SIGSTOP)
    stage.wait(lambda: not any(map(is_live, stage.kv())), "both ways say that they do not know")
    stage.engine.process.signal(signal.SIGCONT)
    stage.engine.publish(("remove", 10), lost=True)
    stage.is_true()


def test_a_killed_bridge_costs_its_own_way_only_and_comes_back_knowing_all(stage: Stage) -> None:
    stage.bridge.signal(signal.SIGKILL)
    stage.bridge.wait(within_s=5)
    stage.engine.publish(("remove", 10, 3), ("store", 50, None, 4))
    stage.keeps_its_promise()
    over_bridge, direct = stage.kv()
    assert not is_live(over_bridge)
    assert direct["blocks"] == len(stage.engine.truth.blocks)
    stage.start_bridge()
    stage.is_true()


def test_a_stopped_bridge_is_not_believed_for_what_it_said_before_it_stopped(stage: Stage) -> None:
    stage.bridge.signal(signal.SIGSTOP)
    stage.engine.kill()
    stage.engine.start()
    stage.engine.publish(("store", 70, None, 1))
    time.sleep(0.5)
    stage.bridge.signal(signal.SIGCONT)
    stage.keeps_its_promise()
    stage.is_true()


def test_a_killed_gateway_gives_no_wrong_credit_when_it_is_back(stage: Stage) -> None:
    """1. The gateway is killed. 2. The engine removes blocks, restarts and stores others. 3. The gateway is back."""
    stage.gateway.process.signal(signal.SIGKILL)
    stage.gateway.process.wait(within_s=5)
    stage.engine.publish(("remove", 10, 3))
    stage.engine.kill()
    stage.engine.start()
    stage.engine.publish(("store", 30, None, 1))
    port, words = stage.gateway.port, [word for spec in stage.specs for word in ("--worker", spec)]
    gateway = stage.start("gateway", "--port", str(port), "--grpc-port", str(port + 1), "--max-retry-s", "0.5", *words)
    stage.gateway = GatewayProcess(gateway, port)
    seen: list[int] = []

    def true() -> bool:
        seen.extend(one["blocks"] for one in stage.kv() if is_live(one))
        return seen[-2:] == [1, 1]

    stage.wait(true, "it is true", within_s=30)
    assert set(seen) <= {0, 1}


def test_a_worker_that_is_removed_while_its_events_come_is_gone_and_can_come_back(stage: Stage) -> None:
    stop = threading.Event()

    def load() -> None:
        number = 1_000
        while not stop.is_set():
            number += 1
            stage.engine.publish(("store", number, None, 1), ("remove", number - 3))

    loading = threading.Thread(target=load)
    loading.start()
    try:
        for url in stage.workers:
            answer = httpx.delete(f"{stage.gateway.url}/workers/{url}", timeout=20)
            assert answer.status_code == 200, answer.text
        assert stage.gateway.workers() == []
        for spec in stage.specs:
            url, *extras = spec.split(",")
            body = {"url": url} | dict(extra.split("=", 1) for extra in extras)
            assert httpx.post(f"{stage.gateway.url}/workers", json=body, timeout=20).status_code == 201
        stage.wait(lambda: [is_live(one) for one in stage.kv()] == [True, True], "both are followed again", 10)
    finally:
        stop.set()
        loading.join()
    stage.is_true()


def test_a_subscriber_that_does_not_read_costs_the_bridge_no_memory(start: Start, tmp_path: Path) -> None:
    """Under a load that is many times what may wait to be read."""
    port = free_ports((0, 10, 20))
    with PublisherProcess(tmp_path, port, port + 10) as engine, grpc.insecure_channel(f"127.0.0.1:{port + 20}") as wire:
        bridge = begin_bridge(start, engine, port + 20, "--history-tokens", "100000")
        engine.flood(200, 64)
        lazy = VllmEngineStub(wire).SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(), wait_for_ready=True)
        next(lazy)
        engine.flood(2_500, 64)
        before_mib = resident_mib(bridge.pid)
        engine.flood(4_000, 64)
        assert resident_mib(bridge.pid) - before_mib < 60, "what it did not read would be some 250 MiB"
        with pytest.raises(grpc.RpcError) as cut_off:
            read_to_the_end(lazy)
        assert cut_off.value.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DATA_LOSS)
        wait_until(lambda: told_at_first(wire) == engine.truth.blocks, within_s=20, what="it catches up")


def read_to_the_end(stream: Iterator[common_pb2.KvEventBatch]) -> None:
    while True:
        next(stream)


def told_at_first(wire: grpc.Channel) -> set[int]:
    """The blocks that a new subscriber is told of; none while there is doubt."""
    stream = VllmEngineStub(wire).SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
    try:
        return {block.block_hash for event in next(stream).events for block in event.stored.blocks}
    except grpc.RpcError:
        return set()
    finally:
        stream.cancel()


def resident_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024
