"""A subscriber whose process stands still under load: its bridge does not grow, others do not wait, it starts over."""

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from kvherd.testing.herds import Start
from kvherd.testing.processes import KvherdProcess, free_ports, wait_until
from kvherd.testing.publisher_process import PublisherProcess
from kvherd.testing.subscriber_process import SubscriberProcess

pytestmark = pytest.mark.engine
ROUND = 50
BLOCKS = 64
PATIENCE_S = 30.0


@dataclass
class Stage:
    engine: PublisherProcess
    bridge: KvherdProcess
    metrics_url: str
    quick: SubscriberProcess
    slow: SubscriberProcess

    def publish_a_round(self) -> None:
        """And wait until the subscriber that reads has all of it."""
        self.engine.flood(ROUND, BLOCKS)
        truth = set(self.engine.truth.blocks)
        wait_until(lambda: self.quick.seen.held == truth, within_s=PATIENCE_S, what="who reads is told at once")

    @property
    def streams(self) -> int:
        with httpx.Client(timeout=PATIENCE_S) as client:
            return int(client.get(f"{self.metrics_url}/health").json()["subscribers"])


@pytest.fixture
def stall_s() -> str:
    return "1"


@pytest.fixture
def stage(start: Start, stall_s: str, tmp_path: Path) -> Iterator[Stage]:
    port = free_ports((0, 10, 20, 21))
    address = f"127.0.0.1:{port + 20}"
    with ExitStack() as stack:
        engine = stack.enter_context(PublisherProcess(tmp_path, port, port + 10))
        words = ("bridge", "--engine", "http://127.0.0.1:1", "--listen", address, "--stall-s", stall_s)
        more = ("--history-tokens", "1000000", "--metrics-port", str(port + 21))
        bridge = start(*words, *more, "--events", engine.events, "--replay", engine.replay)
        bridge.wait_for(lambda: "serving the KV events" in bridge.said, what="the bridge serves")
        quick = stack.enter_context(SubscriberProcess(address, tmp_path / "quick"))
        slow = stack.enter_context(SubscriberProcess(address, tmp_path / "slow"))
        yield Stage(engine, bridge, f"http://127.0.0.1:{port + 21}", quick, slow)


def stands_still(stage: Stage, least_s: float) -> str:
    """1. Two subscribers follow. 2. One is stopped, and the engine goes on. 3. It goes on, too.

    The status that its stream ended with.
    """
    for _ in range(4):
        stage.publish_a_round()
    wait_until(lambda: stage.slow.seen.held == stage.quick.seen.held, within_s=PATIENCE_S, what="both follow")
    before_mib, ends = resident_mib(stage.bridge.pid), len(stage.slow.seen.ends)
    stage.slow.signal(signal.SIGSTOP)
    began_s, rounds = time.monotonic(), 0
    while stage.streams > 1 or time.monotonic() - began_s < least_s:
        stage.publish_a_round()
        rounds += 1
        assert rounds < 4000, "it is not cut off"
    assert resident_mib(stage.bridge.pid) - before_mib < 60
    assert "RESOURCE_EXHAUSTED" not in stage.quick.seen.ends
    stage.slow.signal(signal.SIGCONT)
    truth = set(stage.engine.truth.blocks)
    wait_until(lambda: stage.slow.seen.held == truth, within_s=PATIENCE_S, what="it starts over")
    wait_until(lambda: stage.streams == 2, within_s=PATIENCE_S, what="both follow again")
    assert stage.slow.seen.snapshots >= 2
    return stage.slow.seen.ends[ends]


def test_a_stopped_subscriber_is_cut_off_and_starts_over(stage: Stage) -> None:
    # data are lost where the machine stood still, too
    assert stands_still(stage, least_s=0.0) in ("RESOURCE_EXHAUSTED", "DATA_LOSS", "UNAVAILABLE")


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stall_s", ["30", "3600"], ids=["by the bridge", "by the connection"])
def test_a_subscriber_that_stands_still_for_a_minute_under_load_starts_over(stage: Stage) -> None:
    stands_still(stage, least_s=60.0)


def resident_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024
