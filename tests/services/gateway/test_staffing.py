"""The fleet is kept to what was written down, and to what host names resolve to."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from kvherd.core.errors import OptionInvalid
from kvherd.core.fleet.roster import WorkerState
from kvherd.core.fleet.spec import WorkerChange, WorkerSpec
from kvherd.core.ids import RequestId, WorkerId
from kvherd.ports.completions import Tokenizer
from kvherd.services.gateway.fleet.fleet import Fleet
from kvherd.services.gateway.fleet.staffing import Staffing
from kvherd.testing.kv_feeds import NoFollowing
from kvherd.testing.tokenizer import ByteTokenizer
from kvherd.testing.workers import FakeWorker

ANN, BOB = WorkerSpec("http://ann:1"), WorkerSpec("http://bob:1")


@dataclass
class Names:
    """A resolver that says what a test wants."""

    hosts: dict[str, list[str]] = field(default_factory=dict)
    down: bool = False

    async def __call__(self, host: str) -> list[str]:
        await asyncio.sleep(0.01)
        if self.down or host not in self.hosts:
            raise OSError("no such name")
        return self.hosts[host]


@asynccontextmanager
async def staffed(names: Names | None = None) -> AsyncIterator[tuple[Staffing, Fleet]]:
    async def tokenizer(_: str) -> Tokenizer:
        return ByteTokenizer()

    fleet = Fleet(
        worker_factory=lambda url, _: FakeWorker(WorkerId(url)),
        feed_factory=lambda _: None,  # type: ignore[arg-type,return-value]
        tokenizer_factory=tokenizer,
        following=NoFollowing(),
    )
    async with fleet, Staffing(fleet, resolve=names or Names()) as staffing:
        yield staffing, fleet


def members(fleet: Fleet) -> list[str]:
    return [one.worker for one in fleet.roster]


async def test_workers_join_and_drain_as_the_file_says() -> None:
    async with staffed() as (staffing, fleet):
        staffing.want("file", [ANN, BOB])
        await asyncio.sleep(1)
        assert members(fleet) == [ANN.url, BOB.url]
        busy = fleet.roster.get(ANN.worker)
        assert busy is not None
        busy.begin(RequestId("r"), prompt_tokens=1, uncached_tokens=1, now_s=0.0)
        staffing.want("file", [BOB])
        await asyncio.sleep(1)
        assert busy.state is WorkerState.DRAINING
        fleet.request_ended(busy, RequestId("r"), fleet.now_s())
        await asyncio.sleep(1)
        assert members(fleet) == [BOB.url]


async def test_a_worker_with_another_key_is_connected_to_anew_and_stays_a_member() -> None:
    made: list[tuple[str, str | None]] = []

    def make(url: str, key: str | None) -> FakeWorker:
        made.append((url, key))
        return FakeWorker(WorkerId(url))

    async with staffed(Names({"herd": ["10.0.0.1"]})) as (staffing, fleet):
        fleet._worker_factory = make
        herd = WorkerSpec("http://herd:1", resolve=True, engine_key="one")
        for key in ("one", "one", "two", None):
            staffing.want("file", [replace(herd, engine_key=key)])
            await asyncio.sleep(1)
            assert members(fleet) == ["http://10.0.0.1:1"]
    assert made == [("http://10.0.0.1:1", key) for key in ("one", "two", None)]


async def test_a_worker_that_two_sources_name_stays_while_one_does() -> None:
    async with staffed() as (staffing, fleet):
        staffing.want("command line", [ANN])
        staffing.want("file", [ANN, BOB])
        staffing.want("file", [])
        await asyncio.sleep(1)
        assert members(fleet) == [ANN.url]


async def test_workers_that_joined_at_run_time_are_left_alone() -> None:
    async with staffed() as (staffing, fleet):
        fleet.add(BOB)
        staffing.want("file", [ANN])
        staffing.want("file", [])
        await asyncio.sleep(1)
        assert members(fleet) == [BOB.url]


async def test_a_worker_that_an_operator_removed_stays_away_until_the_file_says_something_new_of_it() -> None:
    async with staffed() as (staffing, fleet):
        staffing.want("file", [ANN])
        await fleet.remove(ANN.worker)
        staffing.want("file", [ANN, BOB])
        await asyncio.sleep(1)
        assert members(fleet) == [BOB.url]
        staffing.want("file", [WorkerSpec(ANN.url, weight=2.0), BOB])
        await asyncio.sleep(1)
        assert sorted(members(fleet)) == [ANN.url, BOB.url]


async def test_labels_and_weight_change_in_place_and_only_when_the_file_does() -> None:
    async with staffed() as (staffing, fleet):
        staffing.want("file", [WorkerSpec(ANN.url, labels={"zone": "a"})])
        await asyncio.sleep(1)
        fleet.change(ANN.worker, WorkerChange(labels={"mine": "1"}, weight=5.0))
        staffing.want("file", [WorkerSpec(ANN.url, labels={"zone": "a"})])
        member = fleet.roster.get(ANN.worker)
        assert member is not None
        assert (member.labels, member.weight) == ({"zone": "a", "mine": "1"}, 5.0)
        staffing.want("file", [WorkerSpec(ANN.url, labels={"zone": "b"}, draining=True)])
        assert (member.labels, member.weight, member.draining) == ({"zone": "b"}, 1.0, True)
        assert fleet.roster.get(ANN.worker) is member


async def test_a_worker_that_is_reached_otherwise_drains_and_joins_again() -> None:
    async with staffed() as (staffing, fleet):
        staffing.want("file", [ANN])
        await asyncio.sleep(1)
        before = fleet.roster.get(ANN.worker)
        staffing.want("file", [WorkerSpec(ANN.url, events="grpc://ann:2")])
        await asyncio.sleep(2)
        after = fleet.roster.get(ANN.worker)
        assert after is not None
        assert after is not before
        assert after.events_url == "grpc://ann:2"


async def test_a_worker_that_cannot_be_changes_nothing() -> None:
    async with staffed() as (staffing, fleet):
        staffing.want("file", [ANN])
        with pytest.raises(OptionInvalid, match="replay: says nothing without events"):
            staffing.want("file", [BOB, WorkerSpec("http://cat:1", replay="tcp://cat:2")])
        await asyncio.sleep(1)
        assert members(fleet) == [ANN.url]


async def test_every_address_of_a_name_is_a_worker_and_they_come_and_go() -> None:
    names = Names({"herd": ["10.0.0.1", "10.0.0.2"]})
    async with staffed(names) as (staffing, fleet):
        staffing.want("file", [WorkerSpec("http://herd:8000", "grpc://{host}:9", labels={"zone": "a"}, resolve=True)])
        await asyncio.sleep(1)
        assert members(fleet) == ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
        member = fleet.roster.get(WorkerId("http://10.0.0.1:8000"))
        assert member is not None
        assert (member.labels, member.events_url) == ({"host": "herd", "zone": "a"}, "grpc://10.0.0.1:9")
        names.hosts["herd"] = ["10.0.0.2", "10.0.0.3"]
        await asyncio.sleep(11)
        assert members(fleet) == ["http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://10.0.0.3:8000"]
        await asyncio.sleep(31)
        assert members(fleet) == ["http://10.0.0.2:8000", "http://10.0.0.3:8000"]
        staffing.want("file", [])
        await asyncio.sleep(1)
        assert members(fleet) == []


async def test_an_address_that_no_worker_may_have_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    names = Names({"herd": ["169.254.169.254", "10.0.0.1"]})
    async with staffed(names) as (staffing, fleet):
        staffing.want("file", [WorkerSpec("http://herd:8000", resolve=True)])
        await asyncio.sleep(40)
        assert members(fleet) == ["http://10.0.0.1:8000"]
    assert sum("169.254.169.254 is a link-local address" in line for line in caplog.messages) == 1


async def test_a_resolver_that_is_down_takes_no_worker_away(caplog: pytest.LogCaptureFixture) -> None:
    names = Names({"herd": ["10.0.0.1"]})
    async with staffed(names) as (staffing, fleet):
        staffing.want("file", [WorkerSpec("http://herd:8000", resolve=True)])
        await asyncio.sleep(1)
        names.down = True
        await asyncio.sleep(100)
        assert members(fleet) == ["http://10.0.0.1:8000"]
    assert caplog.messages.count("herd does not resolve: no such name; its 1 workers stay") == 1
