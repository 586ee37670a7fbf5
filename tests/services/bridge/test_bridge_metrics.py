"""What a bridge tells those who watch it; the metrics page has all of it."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvherd.adapters.zmq_kv_feed import ZmqFrameFeed
from kvherd.core.errors import WorkerUnreachable
from kvherd.core.ids import EngineHash, WorkerId
from kvherd.core.kv.events import BlocksStored
from kvherd.services.bridge.metrics import BridgeMetrics, metrics_app
from kvherd.services.bridge.pulse import Pulse, watched
from kvherd.services.kv_relay.event_streams import EventStreams
from kvherd.services.kv_relay.relay import KvRelay, RelayOptions
from kvherd.services.tls.handshakes import Handshakes
from kvherd.testing.patience import until
from kvherd.testing.publisher import FakePublisher

PAGE = Path(__file__).parents[3] / "docs/metrics.md"
FAST = RelayOptions(probe_s=0.05, replay_silence_s=2.0)


def block(number: int) -> BlocksStored:
    return BlocksStored((EngineHash(number),), None, (number, 1), 2)


async def well() -> None:
    return


class Certificate:
    expires_at_s = 1.0


@asynccontextmanager
async def watched_relay(publisher: FakePublisher) -> AsyncIterator[tuple[KvRelay, BridgeMetrics]]:
    feed = ZmqFrameFeed(publisher.events_endpoint, publisher.replay_endpoint)
    async with KvRelay({publisher.rank: feed}, options=FAST) as relay:
        tls: Any = Certificate()
        handshakes = Handshakes()
        handshakes.begin()
        yield relay, BridgeMetrics(relay, EventStreams(relay), Pulse(well), tls=tls, handshakes=handshakes)


def samples(metrics: BridgeMetrics) -> dict[str, float]:
    """By name and labels."""
    families = text_string_to_metric_families(metrics.text().decode())
    return {
        one.name + "".join(f" {key}={value}" for key, value in one.labels.items()): one.value
        for family in families
        for one in family.samples
    }


@pytest.mark.net
async def test_the_page_and_the_bridge_have_the_same_metrics_of_the_same_kinds() -> None:
    page = PAGE.read_text().partition("\n## The bridge\n")[2]
    rows = re.findall(r"^\| `([\w:]+)` \| (\w+) \| [^|]+ \| [^|]+ \|$", page, re.MULTILINE)
    async with FakePublisher() as publisher, watched_relay(publisher) as (_, metrics):
        families = list(text_string_to_metric_families(metrics.text().decode()))
    told = {f"{one.name}_total" if one.type == "counter" else one.name: one.type for one in families}
    assert len(rows) == len(set(rows))
    assert dict(rows) == told


@pytest.mark.net
async def test_what_happens_to_the_events_can_be_read() -> None:
    async with FakePublisher() as publisher, watched_relay(publisher) as (relay, metrics):
        await publisher.publish(block(1))
        await until(lambda: samples(metrics)["kvherd_bridge_blocks rank=0"] == 1)
        await publisher.publish(block(2), lost=True)
        await publisher.publish(block(3))
        await until(lambda: samples(metrics)["kvherd_bridge_blocks rank=0"] == 3)
        await until(lambda: samples(metrics)["kvherd_bridge_in_doubt rank=0"] == 0)
        told = samples(metrics)
        assert told[f"kvherd_bridge_epoch_info epoch={relay.epoch}"] == 1
        assert told["kvherd_bridge_batches rank=0"] == told["kvherd_bridge_frames_total"] == 3
        assert told["kvherd_bridge_engine_sequence rank=0"] == 2
        assert told["kvherd_bridge_gaps_total rank=0"] <= 1, "a probe may have found it before"
        assert told["kvherd_bridge_replays_total"] >= 2
        assert 0 <= told["kvherd_bridge_lag_seconds rank=0"] <= told["kvherd_bridge_worst_lag_seconds rank=0"]
        await publisher._pub.send_multipart([b"kv-events", b"short", b"x"])
        await until(lambda: samples(metrics)["kvherd_bridge_bad_messages_total rank=0"] == 1)
        relay.flushed(asyncio.get_running_loop().time())
        assert samples(metrics)["kvherd_bridge_flushes_total"] == 1
        assert samples(metrics)["kvherd_bridge_blocks rank=0"] == 0


async def test_without_a_relay_there_is_the_engine_alone() -> None:
    metrics = BridgeMetrics(None, None, Pulse(well))
    assert samples(metrics) == {"kvherd_bridge_engine_up": 0.0}
    assert metrics.health() == {
        "engine": {"up": None, "problem": ""},
        "epoch": None,
        "ranks": [],
        "subscribers": 0,
    }


async def test_an_engine_that_goes_away_or_hangs_is_not_up_until_it_is_back() -> None:
    ways: list[Any] = [None, WorkerUnreachable(WorkerId("w"), "refused"), None, "hangs", None]

    async def probe() -> None:
        way = ways.pop(0) if ways else None
        if way == "hangs":
            await asyncio.Event().wait()
        if way is not None:
            raise way

    pulse, seen = Pulse(probe, period_s=10.0), []
    async with watched(pulse):
        for pause_s in (5, 10, 10, 27, 10):
            await asyncio.sleep(pause_s)
            seen.append((pulse.up, pulse.problem))
    assert [up for up, _ in seen] == [True, False, True, False, True]
    assert "refused" in seen[1][1]
    assert seen[3][1] == "no answer within 21 s"


async def test_metrics_and_health_are_served() -> None:
    metrics = BridgeMetrics(None, None, Pulse(well))
    transport = httpx.ASGITransport(metrics_app(metrics))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        page, health = await client.get("/metrics"), await client.get("/health")
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert page.content == metrics.text()
    assert (health.status_code, health.json()) == (200, metrics.health())


@pytest.mark.parametrize("path", ["/metrics", "/health"])
async def test_a_web_page_by_a_name_of_its_own_reads_nothing(path: str) -> None:
    transport = httpx.ASGITransport(metrics_app(BridgeMetrics(None, None, Pulse(well))))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:9100") as client:
        assert (await client.get(path)).status_code == 200
        answer = await client.get(path, headers={"host": "evil.test:9100"})
    assert (answer.status_code, answer.text) == (
        421,
        "this server is not known as 'evil.test': ask it as localhost or by its address",
    )
