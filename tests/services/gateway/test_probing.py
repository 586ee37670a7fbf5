"""How long a worker may be silent when it is asked whether it is well, before it is suspect, and before it is down."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from kvherd.core.errors import WorkerRefused, WorkerUnreachable
from kvherd.core.fleet.roster import Member
from kvherd.core.fleet.spec import WorkerSpec
from kvherd.core.ids import RequestId, WorkerId
from kvherd.ports.worker import SGLANG_HEALTH_S, WorkerFacts, WorkerKind
from kvherd.services.gateway.fleet.fleet import Fleet
from kvherd.services.gateway.fleet.fleet_edges import FleetConfig
from kvherd.services.gateway.fleet.probing import probe_deadline_s
from kvherd.services.gateway.settings import ProbeBounds
from kvherd.testing.kv_feeds import NoFollowing
from kvherd.testing.tokenizer import ByteTokenizer
from kvherd.testing.workers import HOURS, FakeWorker

ANN = WorkerId("http://ann:1")
SGLANG = WorkerFacts(WorkerKind.SGLANG_HTTP, ("m",), health_s=SGLANG_HEALTH_S)
VLLM = WorkerFacts(WorkerKind.VLLM_HTTP, ("m",))


@dataclass
class Patient(FakeWorker):
    """Counts the questions that it has not answered yet."""

    asked_now: int = 0
    most_at_once: int = 0

    async def probe(self) -> None:
        self.asked_now += 1
        self.most_at_once = max(self.most_at_once, self.asked_now)
        try:
            await super().probe()
        finally:
            self.asked_now -= 1


@dataclass
class Ward:
    fleet: Fleet
    member: Member
    worker: Patient

    async def states(self, *, for_s: float) -> list[str]:
        """The states that it has in that time, one after another."""
        seen: list[str] = []
        for _ in range(round(for_s * 10)):
            if seen[-1:] != [self.member.state.value]:
                seen.append(self.member.state.value)
            await asyncio.sleep(0.1)
        return seen


@asynccontextmanager
async def ward(facts: WorkerFacts, probe: ProbeBounds | None = None) -> AsyncIterator[Ward]:
    """A worker that is up; what it does from now on is the test's."""
    worker = Patient(ANN, facts=facts)

    async def tokenizer(_: str) -> ByteTokenizer:
        return ByteTokenizer()

    fleet = Fleet(
        worker_factory=lambda *_: worker,
        feed_factory=lambda _: None,  # type: ignore[arg-type,return-value]
        tokenizer_factory=tokenizer,
        following=NoFollowing(),
        config=FleetConfig(probe=probe or ProbeBounds()),
        dice=lambda: 0.5,
    )
    async with fleet:
        member = fleet.add(WorkerSpec(ANN))
        await asyncio.sleep(0.5)
        yield Ward(fleet, member, worker)
    assert worker.asked_now == 0, "nobody waits for an answer when the fleet is gone"


@pytest.mark.parametrize(
    ("wanted_s", "health_s", "deadline_s"), [(None, 0.0, 3.0), (None, 20.0, 7.0), (5.0, 20.0, 5.0), (5.0, 0.0, 5.0)]
)
def test_a_deadline_is_what_was_wanted_or_what_the_worker_needs(
    wanted_s: float | None, health_s: float, deadline_s: float
) -> None:
    assert probe_deadline_s(wanted_s, health_s, 3) == deadline_s


@pytest.mark.parametrize(("facts", "takes_s"), [(SGLANG, 1.0), (SGLANG, 2.5), (SGLANG, 6.5), (VLLM, 2.5)])
async def test_a_worker_whose_health_takes_seconds_is_up_all_the_time(facts: WorkerFacts, takes_s: float) -> None:
    async with ward(facts) as it:
        it.worker.opens_s = takes_s
        assert await it.states(for_s=200.0) == ["up"]


async def test_a_sglang_between_two_long_steps_is_suspect_and_never_down_and_is_not_asked_twice_at_once() -> None:
    async with ward(SGLANG) as it:
        it.worker.opens_s = SGLANG_HEALTH_S
        seen = await it.states(for_s=200.0)
        assert (set(seen), len(seen) > 10) == ({"up", "suspect"}, True)
        assert it.worker.most_at_once == 1


@pytest.mark.parametrize(("facts", "down_s"), [(SGLANG, 21.0), (VLLM, 9.0)])
async def test_a_worker_that_stops_answering_is_down_after_three_deadlines(facts: WorkerFacts, down_s: float) -> None:
    async with ward(facts) as it:
        it.worker.opens_s = 9 * HOURS
        assert await it.states(for_s=down_s) == ["up", "suspect"]
        assert await it.states(for_s=2.5) == ["suspect", "down"]
        assert it.member.reason == f"gave no answer within {down_s:g} s"


async def test_an_answer_that_comes_late_ends_all_suspicion_at_once() -> None:
    async with ward(VLLM) as it:
        it.worker.opens_s = 8.0
        assert await it.states(for_s=12.0) == ["up", "suspect", "up"]


async def test_a_worker_that_goes_on_is_taken_back_by_the_next_question() -> None:
    async with ward(VLLM) as it:
        it.worker.opens_s = 9 * HOURS
        assert (await it.states(for_s=30.0))[-1] == "down"
        it.worker.opens_s = 0.5
        assert await it.states(for_s=12.0) == ["down", "up"]


@pytest.mark.parametrize("facts", [SGLANG, VLLM])
async def test_a_refused_connection_needs_no_second_question(facts: WorkerFacts) -> None:
    async with ward(facts) as it:
        it.worker.fails = WorkerUnreachable(ANN, "connection refused")
        assert await it.states(for_s=2.5) == ["up", "down"]


async def test_a_worker_that_says_it_is_ill_is_down_with_the_third_time() -> None:
    async with ward(VLLM) as it:
        it.worker.fails = WorkerRefused(ANN, "it is not healthy (HTTP 503): the scheduler is gone")
        assert await it.states(for_s=8.0) == ["up", "suspect", "down"]
        assert it.worker.probes >= 4


async def test_first_tokens_break_the_silence_and_only_as_long_as_they_come() -> None:
    async with ward(SGLANG) as it:
        it.worker.opens_s = 9 * HOURS
        for _ in range(30):
            it.member.answered(RequestId("r"), now_s=it.fleet.now_s())
            assert await it.states(for_s=5.0) == ["up"]
        assert (await it.states(for_s=60.0))[-1] == "down"


async def test_an_operator_may_want_another_deadline_and_another_period() -> None:
    async with ward(SGLANG, ProbeBounds(period_s=60.0, deadline_s=1.0)) as it:
        assert await it.states(for_s=50.0) == ["up"]
        assert it.worker.probes == 1
        it.worker.opens_s = 9 * HOURS
        assert await it.states(for_s=14.0) == ["up", "suspect", "down"]


async def test_the_log_says_each_change_of_a_worker_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with ward(VLLM) as it:
        it.worker.opens_s = 9 * HOURS
        await asyncio.sleep(60.0)
        it.worker.opens_s = 0.0
        await asyncio.sleep(12.0)
    assert [record.getMessage() for record in caplog.records] == [
        f"worker {ANN} is suspect: gave no answer within 3 s",
        f"worker {ANN} is down: gave no answer within 9 s",
        f"worker {ANN} is up",
    ]
