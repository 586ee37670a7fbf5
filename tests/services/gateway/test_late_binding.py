"""Requests that wait in the gateway until a worker has room, over workers that compute one prompt after the other."""

import asyncio
import json
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvherd.core.errors import NoWorker, WorkerUnreachable
from kvherd.core.fleet.refusals import DeadlinePassed
from kvherd.core.fleet.spec import WorkerSpec
from kvherd.core.ids import RequestId, WorkerId
from kvherd.core.kv.hashing import PrefixHasher
from kvherd.core.kv.index import PrefixIndex
from kvherd.core.kv.reactions import FollowState
from kvherd.core.kv.watch import Watch
from kvherd.core.routing.late import LateBounds
from kvherd.core.routing.policy import make_policy
from kvherd.ports.completions import Tokenizer
from kvherd.ports.worker import Call, Responder, WorkerFacts, WorkerKind
from kvherd.services.gateway.fleet.fleet import Fleet
from kvherd.services.gateway.following.follow_stream import Following
from kvherd.services.gateway.following.standing import Standing
from kvherd.services.gateway.metrics import GatewayMetrics
from kvherd.services.gateway.relay.edge import DataRequest
from kvherd.services.gateway.settings import AdmissionBounds
from kvherd.services.gateway.turns.audit import Audit
from kvherd.services.gateway.turns.chat import DataPath
from kvherd.services.gateway.turns.credit import Credit
from kvherd.services.gateway.turns.late_binding import LateBinding
from kvherd.services.gateway.waiting.admission import Admission, AdmittedPath
from kvherd.testing.tokenizer import ByteTokenizer
from kvherd.testing.virtual_time import virtual_time
from kvherd.testing.workers import FakeResponder, FakeWorker

ANN, BOB = WorkerId("grpc://ann:1"), WorkerId("grpc://bob:1")
RATE = 1_000.0


class Prefilling(FakeWorker):
    """Computes one prompt after the other, in the order in which they came, at `RATE`; then it answers at once."""

    def __init__(self, worker: WorkerId) -> None:
        super().__init__(worker, facts=WorkerFacts(WorkerKind.SGLANG_GRPC, ("m",), block_size=16))
        self.turn = asyncio.Lock()
        self.busy = 0
        self.on_idle: Callable[[], object] = lambda: None

    async def forward(self, call: Call, responder: Responder) -> None:
        self.busy += 1
        try:
            async with self.turn:
                await asyncio.sleep(len(call.prompt_token_ids or call.body) / RATE)
                await super().forward(call, responder)
        finally:
            self.busy -= 1
            if not self.busy:
                self.on_idle()


class Slotted(Prefilling):
    """The same with two slots, each kept until the answer ends, 4 s later; what it has computed is cached."""

    def __init__(self, worker: WorkerId) -> None:
        super().__init__(worker)
        self.facts = replace(self.facts, max_running=2)
        self.chunk_s = 2.0
        self.slots = asyncio.Semaphore(2)
        self.cached: set[bytes] = set()

    async def forward(self, call: Call, responder: Responder) -> None:
        self.busy += 1
        try:
            async with self.slots:
                async with self.turn:
                    if call.body not in self.cached:
                        await asyncio.sleep(len(call.prompt_token_ids or call.body) / RATE)
                    self.cached.add(call.body)
                await FakeWorker.forward(self, call, responder)
        finally:
            self.busy -= 1
            if not self.busy:
                self.on_idle()


class NoFollowing:
    def add(self, *_: object, **__: object) -> None: ...
    def remove(self, worker: WorkerId) -> None: ...
    def returned(self, worker: WorkerId) -> None: ...


class NoEntries:
    def watch(self, worker: WorkerId) -> Watch:
        return Watch(0.0)

    def unwatch(self, worker: WorkerId, watch: Watch) -> None: ...
    def answered(self, worker: WorkerId, watch: Watch) -> None: ...
    def rebuild(self, worker: WorkerId, reason: str) -> None: ...
    def beyond_device(self, worker: WorkerId) -> bool:
        return False


@dataclass
class Stage:
    path: AdmittedPath
    admission: Admission
    fleet: Fleet
    late: LateBinding
    metrics: GatewayMetrics
    workers: dict[WorkerId, Prefilling]
    served: list[str] = field(default_factory=list)

    async def ask(
        self, name: str, tokens: int, *, key: str = "", own: bytes = b"", path: str = "/v1/completions"
    ) -> FakeResponder:
        """A prompt of its own; its first letters name it."""
        headers = [(b"x-kvherd-explain", b"1")] + ([(b"x-request-timeout", own)] if own else [])
        body = json.dumps({"model": "m", "prompt": name.ljust(tokens, "."), "stream": True}).encode()
        request = DataRequest("POST", path, "", headers, body, "127.0.0.1:1", RequestId("r"), key=key)
        responder = FakeResponder()
        await self.path(request, responder)
        self.served.append(name)
        return responder

    def begin(self, name: str, tokens: int, **more: Any) -> "asyncio.Task[FakeResponder]":
        return asyncio.ensure_future(self.ask(name, tokens, **more))

    async def occupy(self, tokens: int = 2_000) -> list["asyncio.Task[FakeResponder]"]:
        """Every worker has a prompt of so many tokens to compute."""
        tasks = [self.begin(f"{number} busy", tokens) for number in range(len(self.workers))]
        await asyncio.sleep(0.01)
        assert all(worker.busy for worker in self.workers.values())
        return tasks

    def learn(self) -> None:
        """Every worker has shown its rate."""
        for member in self.fleet.roster:
            self.fleet.roster.prefilled(member, 10_000, 10_000 / RATE, now())

    def assert_idle(self) -> None:
        assert (self.admission.running, self.admission.waiting, self.admission.held) == (0, 0, 0)


def now() -> float:
    return asyncio.get_running_loop().time()


def live(following: Following) -> Standing:
    """Its stream is there, and has been for long."""
    standing = Standing(following, lambda: 0.0, grace_s=5.0, settle_s=2.0)
    standing.take(FollowState.LIVE)
    return standing


@asynccontextmanager
async def stage(
    *names: WorkerId,
    policy: str = "kv",
    bounds: LateBounds | None = None,
    admission: AdmissionBounds | None = None,
    weight_of: Callable[[str], float] = lambda _: 1.0,
    make: Callable[[WorkerId], Prefilling] = Prefilling,
) -> AsyncIterator[Stage]:
    workers = {name: make(name) for name in names}
    index, metrics = PrefixIndex(PrefixHasher(b"key")), GatewayMetrics()

    async def tokenizer(_: str) -> Tokenizer:
        return ByteTokenizer()

    fleet = Fleet(
        worker_factory=lambda url, _: workers[WorkerId(url)],
        feed_factory=lambda _: None,  # type: ignore[arg-type,return-value]
        tokenizer_factory=tokenizer,
        following=NoFollowing(),
    )
    room = Admission(admission, weight_of=weight_of)
    metrics.watch_admission(room)
    late = LateBinding(room, fleet.roster, now, bounds, held=metrics.held)
    path = DataPath(
        fleet=fleet,
        policy=make_policy(policy),
        credit=Credit(index, {worker: live(Following(worker, index)) for worker in map(WorkerId, names)}),
        metrics=metrics,
        audit=Audit(NoEntries(), metrics, wall=now),
        late=late,
        dice=lambda: 0.0,
    )
    async with fleet:
        for name in names:
            fleet.add(WorkerSpec(name))
            index.enrol(name, model="m")
        await asyncio.sleep(0.1)
        it = Stage(AdmittedPath(path, room), room, fleet, late, metrics, workers)
        it.learn()
        yield it


def held_s(answer: FakeResponder) -> float:
    told = json.loads(answer.headers["x-kvherd-explain"])["held_s"]
    assert isinstance(told, float)
    return told


async def test_a_request_waits_here_while_every_worker_is_busy_and_goes_where_there_is_room_first() -> None:
    async with stage(ANN, BOB) as it:
        tasks = [it.begin("a", 3_000), it.begin("b", 1_000), it.begin("c", 500)]
        await asyncio.sleep(0.5)
        assert (it.admission.held, sum(worker.busy for worker in it.workers.values())) == (1, 2)
        last = await tasks[2]
        await asyncio.gather(*tasks)
        it.assert_idle()
    assert last.headers["x-kvherd-worker"] == (await tasks[1]).headers["x-kvherd-worker"]
    assert held_s(last) == pytest.approx(0.7, abs=0.02), "a second less the 0.3 s that a worker has before it"
    assert held_s(await tasks[0]) == 0.0


async def test_the_shortest_of_those_that_wait_goes_first() -> None:
    async with stage(ANN) as it:
        tasks = await it.occupy()
        tasks += [it.begin(name, tokens) for name, tokens in (("long", 1_500), ("mid", 800), ("short", 400))]
        await asyncio.gather(*tasks)
    assert it.served == ["0 busy", "short", "mid", "long"]


async def test_what_is_cached_does_not_make_a_prompt_long() -> None:
    async with stage(ANN) as it:
        (busy,) = await it.occupy()
        blocks = "0 busy".ljust(2_000, ".")
        tasks = [it.begin("other", 300), it.begin(blocks, 2_100)]
        await asyncio.gather(busy, *tasks)
    assert it.served[1:] == [blocks, "other"]


async def test_who_has_waited_long_enough_goes_before_who_is_shorter() -> None:
    async with stage(ANN, bounds=LateBounds(ageing=2.0)) as it:
        tasks = await it.occupy(3_000)
        tasks.append(it.begin("long", 2_000))
        await asyncio.sleep(1.5)
        tasks.append(it.begin("short", 400))
        await asyncio.gather(*tasks)
    assert it.served == ["0 busy", "long", "short"]


async def test_a_hold_is_bounded() -> None:
    async with stage(ANN, bounds=LateBounds(longest_s=1.0)) as it:
        tasks = await it.occupy(9_000)
        tasks.append(it.begin("next", 1_000))
        await asyncio.sleep(1.5)
        assert (it.admission.held, it.workers[ANN].busy) == (0, 2), "it waits at the worker now"
        await asyncio.gather(*tasks)
        it.assert_idle()
    assert held_s(await tasks[1]) == pytest.approx(1.0, abs=0.01)


async def test_keys_are_served_by_their_weights() -> None:
    async with stage(ANN, weight_of={"gold": 3.0, "iron": 1.0}.__getitem__, bounds=LateBounds(longest_s=99.0)) as it:
        tasks = [it.begin("busy", 2_000, key="iron")]
        await asyncio.sleep(0.01)
        for number in range(12):
            tasks += [it.begin(f"{number} {key}", 500, key=key) for key in ("iron", "gold")]
        await asyncio.gather(*tasks)
    assert [name.split()[-1] for name in it.served[1:13]].count("gold") == 9


async def test_a_client_that_leaves_while_it_is_held_leaves_nothing_behind() -> None:
    async with stage(ANN) as it:
        (busy,) = await it.occupy()
        waiting = [it.begin(name, 500) for name in "abc"]
        await asyncio.sleep(0.5)
        assert (it.admission.running, it.admission.held) == (1, 3)
        waiting[1].cancel()
        await asyncio.gather(busy, *waiting, return_exceptions=True)
        it.assert_idle()
    assert it.served == ["0 busy", "a", "c"]
    assert waiting[1].cancelled()


async def test_being_held_counts_for_a_client_s_own_deadline() -> None:
    async with stage(ANN) as it:
        (busy,) = await it.occupy()
        with pytest.raises(DeadlinePassed, match=r"0\.5 s"):
            await it.ask("a", 500, own=b"0.5")
        assert it.workers[ANN].busy == 1
        await busy
        it.assert_idle()


async def test_who_finds_the_room_full_is_sent_at_once() -> None:
    async with stage(ANN, admission=AdmissionBounds(waiting=2)) as it:
        tasks = await it.occupy()
        tasks += [it.begin(name, 500) for name in "abcd"]
        await asyncio.sleep(0.1)
        assert (it.admission.held, it.workers[ANN].busy) == (2, 3)
        await asyncio.gather(*tasks)
        it.assert_idle()


async def test_who_is_held_takes_no_place_among_those_under_way() -> None:
    async with stage(ANN, BOB, admission=AdmissionBounds(running=2)) as it:
        tasks = [it.begin("a", 2_000), it.begin("b", 2_000)]
        await asyncio.sleep(0.01)
        tasks += [it.begin("c", 1_000), it.begin("d", 500)]
        await asyncio.sleep(0.01)
        assert (it.admission.running, it.admission.waiting, it.admission.held) == (2, 2, 0)
        await asyncio.gather(*tasks)
        it.assert_idle()


async def test_without_a_worker_that_takes_requests_nobody_is_held() -> None:
    async with stage(ANN) as it:
        tasks = await it.occupy(9_000)
        tasks.append(it.begin("a", 500))
        await asyncio.sleep(0.1)
        it.workers[ANN].fails = WorkerUnreachable(ANN, "nobody there")
        it.fleet.request_failed(it.fleet.roster.get(ANN), RequestId("x"), WorkerUnreachable(ANN, "gone"))  # type: ignore[arg-type]
        with pytest.raises(NoWorker):
            await tasks[1]
        assert now() < 3.0
        await asyncio.gather(*tasks, return_exceptions=True)
        it.assert_idle()


async def test_a_worker_that_comes_back_takes_those_that_are_held() -> None:
    async with stage(ANN, BOB) as it:
        it.fleet.roster.get(BOB).draining = True  # type: ignore[union-attr]
        tasks = [it.begin("a", 9_000), it.begin("b", 500)]
        await asyncio.sleep(1.0)
        assert it.admission.held == 1
        it.fleet.roster.get(BOB).draining = False  # type: ignore[union-attr]
        assert (await tasks[1]).headers["x-kvherd-worker"] == BOB
        assert now() < 2.0
        await tasks[0]


@pytest.mark.parametrize("policy", ["round_robin", "least_load", "power_of_two", "consistent_hash"])
async def test_a_policy_that_does_not_know_what_a_prompt_costs_holds_none(policy: str) -> None:
    async with stage(ANN, policy=policy) as it:
        tasks = await it.occupy()
        tasks += [it.begin(name, 500) for name in "abc"]
        await asyncio.sleep(0.1)
        assert (it.admission.held, it.workers[ANN].busy) == (0, 4)
        await asyncio.gather(*tasks)


@pytest.mark.parametrize("bounds", [LateBounds(backlog_s=0.0), LateBounds(longest_s=0.0)])
async def test_without_a_bound_nobody_is_held(bounds: LateBounds) -> None:
    async with stage(ANN, bounds=bounds) as it:
        tasks = await it.occupy()
        tasks += [it.begin(name, 500) for name in "abc"]
        await asyncio.sleep(0.1)
        assert (it.admission.held, it.workers[ANN].busy) == (0, 4)
        await asyncio.gather(*tasks)


async def test_of_workers_whose_rate_nobody_knows_a_backlog_is_no_reason_to_wait() -> None:
    async with stage(ANN) as it:
        it.fleet.roster.get(ANN).rate.observations = 0  # type: ignore[union-attr]
        it.fleet.roster.get(ANN).rate.usual = 1_000.0  # type: ignore[union-attr]
        tasks = await it.occupy()
        tasks.append(it.begin("a", 500))
        await asyncio.sleep(0.1)
        assert (it.admission.held, it.workers[ANN].busy) == (0, 2)
        await asyncio.gather(*tasks)


async def test_equal_prompts_beyond_the_slots_of_one_worker_go_to_the_other() -> None:
    async with stage(ANN, BOB, make=Slotted, bounds=LateBounds(backlog_s=0.0)) as it:
        answers = await asyncio.gather(*[it.begin("same", 100) for _ in range(4)])
        assert Counter(answer.headers["x-kvherd-worker"] for answer in answers) == {ANN: 2, BOB: 2}
        costs = [json.loads(answer.headers["x-kvherd-explain"])["candidates"] for answer in answers]
        assert [one["costs_s"]["slots"] > 0 for one in costs[2] if one["worker"] == ANN] == [True]
        again = await asyncio.gather(*[it.begin("same", 100) for _ in range(8)])
        assert Counter(answer.headers["x-kvherd-worker"] for answer in again) == {ANN: 4, BOB: 4}


async def test_while_all_slots_are_in_use_a_request_waits_here() -> None:
    async with stage(ANN, BOB, make=Slotted) as it:
        await asyncio.gather(*[it.begin("0", 100) for _ in range(4)])
        answers = [it.begin("same", 100) for _ in range(6)]
        await asyncio.sleep(1.0)
        assert (it.admission.held, *(worker.busy for worker in it.workers.values())) == (2, 2, 2)
        held = [held_s(answer) for answer in await asyncio.gather(*answers)]
        it.assert_idle()
    assert held == [0.0] * 4 + [pytest.approx(4.1, abs=0.11)] * 2


async def test_where_nobody_knows_how_long_a_slot_is_kept_full_slots_hold_none() -> None:
    async with stage(ANN, make=Slotted) as it:
        answers = [it.begin("same", 100) for _ in range(6)]
        await asyncio.sleep(1.0)
        assert (it.admission.held, it.workers[ANN].busy) == (0, 6)
        await asyncio.gather(*answers)


async def test_who_waited_for_a_slot_teaches_nothing_of_how_fast_prompts_are_computed() -> None:
    async with stage(ANN, make=Slotted, bounds=LateBounds(backlog_s=0.0)) as it:
        member = it.fleet.roster.get(ANN)
        assert member is not None
        await asyncio.gather(*[it.begin(f"{number}", 400) for number in range(6)])
        assert member.rate.at(now()) == pytest.approx(RATE, rel=0.1)
        assert member.slot_time.seconds == pytest.approx(4.5, rel=0.3)


async def test_what_needs_no_prefill_is_never_held() -> None:
    async with stage(ANN) as it:
        tasks = await it.occupy()
        tasks.append(it.begin("a", 500, path="/tokenize"))
        await asyncio.sleep(0.1)
        assert (it.admission.held, it.workers[ANN].busy) == (0, 2)
        await asyncio.gather(*tasks)


async def test_metrics_and_the_log_tell_who_is_held_and_how_long(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvherd.access")
    async with stage(ANN) as it:
        tasks = await it.occupy()
        tasks.append(it.begin("a", 500))
        await asyncio.sleep(0.1)
        assert "kvherd_gateway_held_requests 1.0" in it.metrics.text().decode()
        await asyncio.gather(*tasks)
    assert 'kvherd_gateway_held_seconds_bucket{le="2.5",model="m"} 1.0' in it.metrics.text().decode()
    first, second = (json.loads(record.message) for record in caplog.records)
    assert (first["held_s"], second["held_s"] > 1.0) == (0.0, True)


async def mean_ttft_s(bounds: LateBounds) -> float:
    """Of prompts whose lengths differ by orders of magnitude, with workers that are busy most of the time."""
    dice = random.Random(7)
    async with stage(ANN, BOB, bounds=bounds) as it:

        async def timed(name: str, tokens: int) -> float:
            began_s = now()
            await it.ask(name, tokens)
            return now() - began_s

        tasks = []
        for number in range(200):
            tokens = min(8_000, int(dice.lognormvariate(5.5, 1.2)))
            await asyncio.sleep(dice.expovariate(1 / 0.3))
            tasks.append(asyncio.ensure_future(timed(f"{number}", tokens)))
        return sum(await asyncio.gather(*tasks)) / len(tasks)


async def test_late_binding_brings_the_first_token_sooner() -> None:
    late, none = await mean_ttft_s(LateBounds()), await mean_ttft_s(LateBounds(backlog_s=0.0))
    assert late < 0.85 * none, (late, none)


Story = list[tuple[float, int, str, bool]]
STORIES: st.SearchStrategy[Story] = st.lists(
    st.tuples(st.floats(0.0, 2.0), st.integers(1, 3_000), st.sampled_from(["x", "y"]), st.booleans()),
    min_size=1,
    max_size=25,
)
"""How long after the one before, of how many tokens, whose, and whether the client leaves after a second."""


async def tell(story: Story, bounds: LateBounds, running: int, make: Callable[[WorkerId], Prefilling]) -> list[float]:
    """How long each was held. All along, nobody waits while a worker is idle."""
    held: list[float] = []
    wrong: list[float] = []
    room = AdmissionBounds(running=running, waiting=30)
    async with stage(ANN, BOB, bounds=bounds, admission=room, make=make) as it:

        async def client(number: int, tokens: int, key: str, *, leaves: bool) -> None:
            try:
                async with asyncio.timeout(1.0 if leaves else None):
                    held.append(held_s(await it.ask(f"{number}", tokens, key=key)))
            except TimeoutError:
                assert leaves

        def look() -> None:
            """A moment after a worker became idle, or one was held."""
            if it.admission.held and not all(worker.busy for worker in it.workers.values()):
                wrong.append(now())

        for worker in it.workers.values():
            worker.on_idle = lambda: asyncio.get_running_loop().call_later(0.002, look)
        async with asyncio.TaskGroup() as group:
            for number, (later_s, tokens, key, leaves) in enumerate(story):
                await asyncio.sleep(later_s)
                group.create_task(client(number, tokens, key, leaves=leaves))
                asyncio.get_running_loop().call_later(0.002, look)
        it.assert_idle()
        assert all(not member.in_flight for member in it.fleet.roster)
        assert not wrong, "one waits while a worker is idle"
    return held


@settings(max_examples=40)
@given(
    STORIES, st.floats(0.05, 1.0), st.floats(0.1, 3.0), st.sampled_from([4, 64]), st.sampled_from([Prefilling, Slotted])
)
def test_whatever_comes_nobody_waits_while_a_worker_is_idle_and_a_hold_is_bounded(
    story: Story, backlog_s: float, longest_s: float, running: int, make: Callable[[WorkerId], Prefilling]
) -> None:
    held = virtual_time(tell(story, LateBounds(backlog_s, longest_s), running, make))
    if running > len(story):  # then a place is there as soon as one has been held for long enough
        assert all(seconds <= longest_s + 0.001 for seconds in held)
