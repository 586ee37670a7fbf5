"""Flushing workers that may hold blocks nobody told of, once they are idle; in virtual time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from kvherd.core.errors import WorkerUnreachable
from kvherd.core.fleet.roster import Member
from kvherd.core.fleet.spec import WorkerSpec
from kvherd.core.ids import RequestId, WorkerId
from kvherd.ports.completions import Tokenizer
from kvherd.ports.worker import FlushAnswer, WorkerFacts, WorkerKind, WorkerLoad
from kvherd.services.gateway.fleet.fleet import Fleet
from kvherd.services.gateway.fleet.orders import UNHEEDED
from kvherd.services.gateway.metrics import GatewayMetrics
from kvherd.services.gateway.turns.heal import IdleFlushes
from kvherd.testing.kv_feeds import NoFollowing
from kvherd.testing.tokenizer import ByteTokenizer
from kvherd.testing.workers import FakeWorker

ANN, BOB = WorkerId("http://ann:1"), WorkerId("http://bob:1")
BUSY = WorkerLoad(running=0, waiting=1)
IDLE = WorkerLoad(running=0, waiting=0)


@dataclass
class Healing:
    """Workers are complete again once they are flushed."""

    fleet: Fleet
    incomplete: set[WorkerId]
    metrics: GatewayMetrics = field(default_factory=GatewayMetrics)

    def flushed(self, worker: WorkerId, _ordered_s: float) -> None:
        self.incomplete.discard(worker)

    def member(self, worker: WorkerId) -> Member:
        member = self.fleet.roster.get(worker)
        assert member is not None
        return member


@asynccontextmanager
async def healing(*workers: FakeWorker) -> AsyncIterator[Healing]:
    known = {worker.id: worker for worker in workers}

    async def tokenizer(_: str) -> Tokenizer:
        return ByteTokenizer()

    fleet = Fleet(
        worker_factory=lambda url, _: known[WorkerId(url)],
        feed_factory=lambda _: None,  # type: ignore[arg-type,return-value]
        tokenizer_factory=tokenizer,
        following=NoFollowing(),
    )
    async with fleet:
        for worker in workers:
            fleet.add(WorkerSpec(worker.id))
        await asyncio.sleep(0.1)
        it = Healing(fleet, set(known))
        heed = replace(UNHEEDED, obeyed=it.flushed)
        async with IdleFlushes(fleet, lambda worker: worker in it.incomplete, heed, it.metrics):
            yield it


def fake(worker: WorkerId, **acts: object) -> FakeWorker:
    return FakeWorker(worker, facts=WorkerFacts(WorkerKind.SGLANG_HTTP, ("m",)), **acts)  # type: ignore[arg-type]


async def test_an_idle_worker_is_flushed_once_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    ann, bob = fake(ANN, loaded=IDLE), fake(BOB, loaded=IDLE)
    async with healing(ann, bob) as it:
        it.incomplete.discard(BOB)
        await asyncio.sleep(5.0)
        assert (ann.flushes, bob.flushes, it.incomplete) == (1, 0, set())
        assert it.member(ANN).healings == 1
    assert [record.message for record in caplog.records if "is flushed" in record.message] == [
        f"{ANN} was idle and is flushed, as it may hold blocks that nobody told of"
    ]


async def test_a_busy_worker_is_left_alone_until_it_is_idle() -> None:
    ann = fake(ANN, loaded=BUSY)
    async with healing(ann) as it:
        await asyncio.sleep(30.0)
        assert ann.flushes == 0, "its engine said that a request waits"
        ann.loaded = IDLE
        it.member(ANN).begin(RequestId("r"), prompt_tokens=1, uncached_tokens=1, now_s=30.0)
        await asyncio.sleep(30.0)
        assert ann.flushes == 0, "a request of ours is under way"
        it.member(ANN).end(RequestId("r"), now_s=60.0)
        await asyncio.sleep(2.0)
        assert ann.flushes == 1


async def test_a_worker_that_refuses_is_asked_again_a_minute_later(caplog: pytest.LogCaptureFixture) -> None:
    ann = fake(ANN, loaded=IDLE, answer=FlushAnswer(done=False, message="busy after all"))
    async with healing(ann) as it:
        await asyncio.sleep(59.0)
        assert ann.flushes == 1
        await asyncio.sleep(3.0)
        assert ann.flushes == 2
        assert it.member(ANN).healings == 0
    assert any("was not flushed: busy after all" in record.message for record in caplog.records)


async def test_a_worker_that_tells_no_load_is_never_taken_for_idle() -> None:
    class Silent(FakeWorker):
        async def load(self) -> WorkerLoad:
            raise WorkerUnreachable(self.id)

    ann = Silent(ANN, facts=WorkerFacts(WorkerKind.OPENAI_HTTP, ("m",)))
    async with healing(ann):
        await asyncio.sleep(10.0)
        assert ann.flushes == 0
