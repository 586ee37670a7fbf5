"""A worker's life in the fleet: late, ill, dead, back, and gone."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from kvherd.core.errors import OptionInvalid, WorkerFailed, WorkerUnreachable
from kvherd.core.fleet.breaker import BreakerState
from kvherd.core.fleet.roster import Member, WorkerState
from kvherd.core.fleet.spec import WorkerChange, WorkerSpec, normal_url
from kvherd.core.ids import RequestId, WorkerId
from kvherd.ports.completions import Tokenizer
from kvherd.ports.kv_feed import EventSource, KvFeed
from kvherd.ports.worker import WorkerFacts, WorkerKind, WorkerLoad
from kvherd.services.gateway.fleet.fleet import Fleet
from kvherd.services.gateway.fleet.fleet_edges import FleetConfig
from kvherd.services.gateway.settings import ProbeBounds
from kvherd.testing.interrupted import interrupted
from kvherd.testing.tokenizer import ByteTokenizer
from kvherd.testing.workers import HOURS, FakeWorker

ANN, BOB = WorkerId("grpc://ann:1"), WorkerId("http://bob:1")
FACTS = WorkerFacts(WorkerKind.SGLANG_GRPC, ("m",), block_size=4)
GONE = WorkerUnreachable(ANN, "connection refused")


@dataclass
class Following:
    """Keeps what it was asked to follow."""

    now: dict[WorkerId, str] = field(default_factory=dict)
    back: list[WorkerId] = field(default_factory=list)

    def add(self, worker: WorkerId, feed: KvFeed, *, model: str) -> None:
        self.now[worker] = model

    def remove(self, worker: WorkerId) -> None:
        self.now.pop(worker, None)

    def returned(self, worker: WorkerId) -> None:
        self.back.append(worker)


@dataclass
class Yard:
    fleet: Fleet
    following: Following
    feeds: list[str]
    tokenizers: list[str]
    restarted: list[WorkerId]

    def add(self, worker: FakeWorker, events: str | None = None) -> Member:
        return self.fleet.add(WorkerSpec(worker.id, events))


@asynccontextmanager
async def yard(*workers: FakeWorker, config: FleetConfig | None = None) -> AsyncIterator[Yard]:
    known = {worker.id: worker for worker in workers}
    feeds: list[str] = []
    tokenizers: list[str] = []
    restarted: list[WorkerId] = []
    following = Following()

    def feed(source: EventSource) -> KvFeed:
        feeds.append(source.events)
        return None  # type: ignore[return-value]

    async def tokenizer(url: str) -> Tokenizer:
        tokenizers.append(url)
        return ByteTokenizer()

    fleet = Fleet(
        worker_factory=lambda url, _: known[WorkerId(url)],
        feed_factory=feed,
        tokenizer_factory=tokenizer,
        following=following,
        config=config,
        on_restart=restarted.append,
        dice=lambda: 0.5,
    )
    async with fleet:
        yield Yard(fleet, following, feeds, tokenizers, restarted)
    assert all(worker.closed for worker in workers if worker.probes)


def is_in(member: Member, state: WorkerState) -> bool:
    return member.state is state


def fake(worker: WorkerId = ANN, **acts: object) -> FakeWorker:
    return FakeWorker(worker, facts=FACTS, **acts)  # type: ignore[arg-type]


async def test_a_worker_that_comes_up_late_is_taken_in_when_it_does() -> None:
    ann = fake(fails=GONE)
    async with yard(ann) as it:
        member = it.add(ann)
        await asyncio.sleep(60.0)
        assert (member.state, member.reason) == (WorkerState.CONNECTING, "cannot be reached: connection refused")
        ann.fails = None
        await asyncio.sleep(6.0)
        assert (member.state, member.models, member.kind) == (WorkerState.UP, ("m",), "sglang-grpc")


async def test_one_that_never_answers_is_asked_again_and_again() -> None:
    ann = fake(opens_s=9 * HOURS)
    async with yard(ann) as it:
        member = it.add(ann)
        await asyncio.sleep(30.0)
        assert member.reason == "gave no answer within 5 s"
        ann.opens_s = 0.0
        await asyncio.sleep(11.0)
        assert member.state is WorkerState.UP


async def test_a_dead_worker_is_noticed_and_taken_back() -> None:
    ann = fake()
    async with yard(ann) as it:
        member = it.add(ann)
        await asyncio.sleep(0.1)
        ann.fails = GONE
        await asyncio.sleep(2.5)
        assert (member.state, member.reason) == (WorkerState.DOWN, "cannot be reached: connection refused")
        ann.fails = None
        await asyncio.sleep(2.5)
        assert member.state is WorkerState.UP
        assert it.restarted == it.following.back == [ANN]


async def test_a_worker_that_returns_as_another_is_known_as_that() -> None:
    ann = fake()
    async with yard(ann) as it:
        member = it.add(ann)
        await asyncio.sleep(0.1)
        ann.fails = GONE
        await asyncio.sleep(2.5)
        ann.fails, ann.facts = None, WorkerFacts(WorkerKind.VLLM_GRPC, ("other",), block_size=16)
        await asyncio.sleep(2.5)
        assert (member.models, member.block_size, it.following.now) == (("other",), 16, {ANN: "other"})


async def test_a_slow_probe_makes_suspect_first_and_down_only_in_a_row() -> None:
    ann = fake()
    async with yard(ann) as it:
        member = it.add(ann)
        await asyncio.sleep(0.1)
        ann.opens_s = 9 * HOURS
        states: dict[str, None] = {}
        for _ in range(150):
            await asyncio.sleep(0.1)
            states[member.state.value] = None
        assert list(states) == ["up", "suspect", "down"]


async def test_a_failed_request_brings_a_probe_at_once() -> None:
    ann = fake()
    async with yard(ann, config=FleetConfig(probe=ProbeBounds(period_s=600.0))) as it:
        member = it.add(ann)
        await asyncio.sleep(0.1)
        ann.fails = GONE
        it.fleet.request_failed(member, RequestId("r"), GONE)
        assert is_in(member, WorkerState.SUSPECT)
        await asyncio.sleep(0.5)
        assert is_in(member, WorkerState.DOWN)


async def test_requests_that_fail_again_and_again_open_the_circuit() -> None:
    ann = fake()
    async with yard(ann) as it:
        member = it.add(ann)
        await asyncio.sleep(0.1)
        for _ in range(5):
            member.breaker.begin(RequestId("r"), asyncio.get_running_loop().time())
            it.fleet.request_failed(member, RequestId("r"), WorkerFailed(ANN, "out of memory"))
        await asyncio.sleep(0.5)
        assert (member.state, member.unavailable(0.7)) == (
            WorkerState.UP,
            "failed too often lately; its circuit breaker is open",
        )
        await asyncio.sleep(2.0)
        now_s = asyncio.get_running_loop().time()
        assert (member.breaker.state(now_s), member.unavailable(now_s)) == (BreakerState.HALF_OPEN, "")


async def test_load_is_asked_for_and_may_be_refused() -> None:
    ann = fake(loaded=WorkerLoad(running=3, waiting=2, used_tokens=10, capacity_tokens=100))
    async with yard(ann) as it:
        member = it.add(ann)
        await asyncio.sleep(0.1)
        assert (member.running, member.waiting, member.used_tokens, member.capacity_tokens) == (3, 2, 10, 100)


@pytest.mark.parametrize(
    ("worker", "told", "given", "followed"),
    [
        (ANN, None, None, ANN),
        (ANN, None, "grpc://bridge:9", "grpc://bridge:9"),
        (BOB, "grpc://bob:2", None, "grpc://bob:2"),
        (BOB, None, "grpc://bridge:9", "grpc://bridge:9"),
        (BOB, None, None, None),
    ],
)
async def test_events_are_followed_where_they_are(
    worker: WorkerId, told: str | None, given: str | None, followed: str | None
) -> None:
    facts = WorkerFacts(WorkerKind.SGLANG_GRPC, ("m",), block_size=4, events_url=told)
    one = FakeWorker(worker, facts=facts)
    async with yard(one) as it:
        it.add(one, given)
        await asyncio.sleep(10.0)
        expected = [followed] if followed else []
        assert it.feeds == it.tokenizers == expected
        assert (it.fleet.tokenizer("m") is not None) == bool(followed)
        assert it.following.now == ({worker: "m"} if followed else {})


async def test_a_worker_that_leaves_takes_no_request_and_ends_those_it_has() -> None:
    ann = fake()
    async with yard(ann) as it:
        member = it.add(ann)
        await asyncio.sleep(0.1)
        member.begin(RequestId("r"), prompt_tokens=1, uncached_tokens=1, now_s=0.1)
        async with asyncio.TaskGroup() as group:
            leaving = group.create_task(it.fleet.remove(ANN))
            await asyncio.sleep(1.0)
            assert (member.state, leaving.done()) == (WorkerState.DRAINING, False)
            it.fleet.request_ended(member, RequestId("r"), it.fleet.now_s())
        assert leaving.result()
        assert (len(it.fleet.roster), it.following.now, ann.closed) == (0, {}, True)


async def test_draining_is_bounded() -> None:
    ann = fake()
    async with yard(ann) as it:
        member = it.add(ann)
        await asyncio.sleep(0.1)
        member.begin(RequestId("r"), prompt_tokens=1, uncached_tokens=1, now_s=0.1)
        began_s = asyncio.get_running_loop().time()
        assert not await it.fleet.remove(ANN, drain_s=7.0)
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(7.0)
        it.fleet.request_ended(member, RequestId("r"), it.fleet.now_s())


async def test_a_caller_that_leaves_does_not_stop_the_draining() -> None:
    ann = fake()
    async with yard(ann) as it:
        member = it.add(ann)
        await asyncio.sleep(0.1)
        member.begin(RequestId("r"), prompt_tokens=1, uncached_tokens=1, now_s=0.1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await it.fleet.remove(ANN)
        it.fleet.request_ended(member, RequestId("r"), it.fleet.now_s())
        await asyncio.sleep(0.1)
        assert len(it.fleet.roster) == 0


async def test_a_worker_that_left_may_come_again() -> None:
    known = [fake(), fake()]
    async with yard(known[0]) as it:
        it.add(known[0])
        await asyncio.sleep(0.1)
        await it.fleet.remove(ANN)
        known[0].closed = False
        assert it.add(known[0]).state is WorkerState.CONNECTING
        await asyncio.sleep(0.1)
        assert [one.state for one in it.fleet.roster] == [WorkerState.UP]


async def test_a_defect_in_one_adapter_costs_that_worker_alone() -> None:
    class Broken(FakeWorker):
        async def probe(self) -> None:
            raise ZeroDivisionError

    broken, bob = Broken(ANN, facts=FACTS), fake(BOB)
    async with yard(bob, broken) as it:
        first, second = it.add(broken), it.add(bob)
        await asyncio.sleep(60.0)
        assert (first.state, second.state) == (WorkerState.DOWN, WorkerState.UP)


async def test_the_number_of_workers_is_bounded() -> None:
    async with yard(fake(), fake(BOB), config=FleetConfig(max_workers=1)) as it:
        it.fleet.add(WorkerSpec(ANN))
        with pytest.raises(OptionInvalid, match="1 workers are registered already"):
            it.fleet.add(WorkerSpec(BOB))


@pytest.mark.parametrize(
    ("given", "normal"),
    [
        ("HTTP://Ann:80/", "http://ann:80"),
        (" grpc://[::1]:5 ", "grpc://[::1]:5"),
        ("https://ann/base/", "https://ann/base"),
    ],
)
def test_a_url_has_one_spelling(given: str, normal: str) -> None:
    assert normal_url(given, "url") == normal


@pytest.mark.parametrize(
    "given", ["", "ann:1", "http://", "http://u:p@ann", "http://ann?x=1", "grpc://ann", "http://[::1"]
)
def test_what_is_no_workers_url_is_refused(given: str) -> None:
    with pytest.raises(OptionInvalid):
        normal_url(given, "url")


async def test_a_worker_too_busy_for_probes_stays_up_while_it_answers_requests() -> None:
    ann = fake()
    async with yard(ann) as it:
        member = it.add(ann)
        await asyncio.sleep(0.1)
        ann.opens_s = 9 * HOURS
        for _ in range(60):
            member.answered(RequestId("r"), now_s=asyncio.get_running_loop().time())
            await asyncio.sleep(1.0)
        assert is_in(member, WorkerState.UP)
        await asyncio.sleep(20.0)
        assert is_in(member, WorkerState.DOWN)
        member.answered(RequestId("late"), now_s=asyncio.get_running_loop().time())
        await asyncio.sleep(5.0)
        assert is_in(member, WorkerState.DOWN), "only a probe ends it"


async def test_a_second_call_can_bring_the_end_of_a_drain_nearer() -> None:
    async with yard(FakeWorker(ANN)) as it:
        member = it.fleet.add(WorkerSpec(ANN))
        await asyncio.sleep(0.1)
        member.begin(RequestId("r"), prompt_tokens=1, uncached_tokens=1, now_s=0.0)
        began_s = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as group:
            first = group.create_task(it.fleet.remove(ANN, drain_s=9 * HOURS))
            await asyncio.sleep(5)
            assert not await it.fleet.remove(ANN, drain_s=2.0)
        assert not first.result()
        assert asyncio.get_running_loop().time() == pytest.approx(began_s + 7.0)


async def test_a_worker_that_leaves_cannot_be_called_back() -> None:
    async with yard(FakeWorker(ANN)) as it:
        member = it.fleet.add(WorkerSpec(ANN))
        await asyncio.sleep(0.1)
        member.begin(RequestId("r"), prompt_tokens=1, uncached_tokens=1, now_s=0.0)
        leaving = it.fleet.begin_remove(ANN, drain_s=5.0)
        with pytest.raises(OptionInvalid, match="is leaving; add it again when it has left"):
            it.fleet.change(ANN, WorkerChange(draining=False))
        assert not await leaving


async def test_the_label_of_a_sidecar_reaches_the_worker() -> None:
    ann = FakeWorker(ANN)
    async with yard(ann) as it:
        it.fleet.add(WorkerSpec(ANN, labels={"sidecar": "http://ann:9"}))
        assert ann.sidecar == "http://ann:9"
        it.fleet.change(ANN, WorkerChange(labels={"sidecar": None}))
        assert not ann.sidecar
        with pytest.raises(OptionInvalid, match=r"labels\.sidecar: 'ann' is not of the form http"):
            it.fleet.change(ANN, WorkerChange(labels={"sidecar": "ann"}, weight=3.0))
        member = it.fleet.roster.get(ANN)
        assert member is not None
        assert member.weight == 1.0


async def test_a_worker_that_cannot_be_made_is_no_member() -> None:
    def none(*_: object) -> FakeWorker:
        raise OptionInvalid("worker URL", "cannot be")

    async with yard() as it:
        it.fleet._worker_factory = none
        with pytest.raises(OptionInvalid, match="cannot be"):
            it.fleet.add(WorkerSpec(ANN))
        assert len(it.fleet.roster) == 0


def remember_made(fleet: Fleet) -> list[FakeWorker]:
    """Every worker that the fleet makes from now on, in that order."""
    made: list[FakeWorker] = []

    def make(url: str, key: str | None) -> FakeWorker:
        made.append(FakeWorker(WorkerId(url), facts=FACTS))
        return made[-1]

    fleet._worker_factory = make
    return made


async def test_a_renewed_connection_takes_what_comes_and_the_old_one_ends_with_what_it_has() -> None:
    async with yard() as it:
        made = remember_made(it.fleet)
        member = it.fleet.add(WorkerSpec(ANN, labels={"sidecar": "http://ann:9"}))
        await asyncio.sleep(0.1)
        member.begin(RequestId("old"), prompt_tokens=1, uncached_tokens=1, now_s=0.0)
        it.fleet.renew(lambda worker: worker == ANN)
        before, after = made
        assert it.fleet.worker(ANN) is after
        assert after.sidecar == "http://ann:9"
        await asyncio.sleep(10)
        assert (before.closed, member.state) == (False, WorkerState.UP)
        it.fleet.request_ended(member, RequestId("old"), it.fleet.now_s())
        await asyncio.sleep(10)
        assert (before.closed, after.closed) == (True, False)
        assert after.probes > 0


async def test_a_connection_renewed_at_the_very_end_is_closed_too() -> None:
    async with yard() as it:
        made = remember_made(it.fleet)
        it.fleet.add(WorkerSpec(ANN))
        await asyncio.sleep(0.1)
        it.fleet.renew(lambda worker: worker == ANN)
    assert [one.closed for one in made] == [True, True]


async def test_an_end_that_is_cut_short_leaves_no_worker_open() -> None:
    ann, bob = fake(), fake(BOB)

    async def whole_life() -> None:
        async with yard(ann, bob) as it:
            it.add(ann)
            it.add(bob)
            await asyncio.sleep(0.1)

    number = 0
    while await interrupted(whole_life(), number):
        assert (ann.closed, bob.closed) == (True, True)
        ann.closed = bob.closed = False
        number += 1
    assert number > 2


async def test_one_that_leaves_as_its_probe_fails_unforeseen_is_tended_no_more() -> None:
    ann = fake()

    async def probe() -> None:
        ann.probes += 1
        try:
            await asyncio.sleep(9 * HOURS)
        finally:
            raise RuntimeError("a defect")

    async with yard(ann) as it:
        it.add(ann)
        ann.probe = probe  # type: ignore[method-assign]
        await asyncio.sleep(1.0)
        assert await it.fleet.remove(ANN, drain_s=0.0)
        probes = ann.probes
        await asyncio.sleep(60.0)
        assert ann.probes == probes
