"""A request that is left at any moment gives back all that it had taken: its places, its key's share, its worker."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest

from kvherd.core.errors import KvherdError, WorkerUnreachable
from kvherd.core.fleet.keyring import DataKey, Keyring, key_digest
from kvherd.core.fleet.spec import WorkerSpec
from kvherd.core.ids import RequestId, WorkerId
from kvherd.core.kv.hashing import PrefixHasher
from kvherd.core.kv.index import PrefixIndex
from kvherd.core.kv.reactions import FollowState
from kvherd.core.kv.watch import Watch
from kvherd.core.routing.late import LateBounds
from kvherd.core.routing.policy import make_policy
from kvherd.ports.completions import Tokenizer
from kvherd.ports.worker import Call, Flight, Responder, WorkerFacts, WorkerKind
from kvherd.services.gateway.fleet.fleet import Fleet
from kvherd.services.gateway.following.follow_stream import Following
from kvherd.services.gateway.following.standing import Standing
from kvherd.services.gateway.metrics import GatewayMetrics
from kvherd.services.gateway.relay.edge import DataRequest
from kvherd.services.gateway.settings import AdmissionBounds
from kvherd.services.gateway.turns.access import AccessLog
from kvherd.services.gateway.turns.audit import Audit
from kvherd.services.gateway.turns.chat import DataPath
from kvherd.services.gateway.turns.credit import Credit
from kvherd.services.gateway.turns.keyed import KeyedPath
from kvherd.services.gateway.turns.late_binding import LateBinding
from kvherd.services.gateway.waiting.admission import Admission, AdmittedPath
from kvherd.testing.interrupted import interrupted
from kvherd.testing.kv_feeds import NoFollowing
from kvherd.testing.patience import until
from kvherd.testing.tokenizer import ByteTokenizer
from kvherd.testing.workers import FakeResponder, FakeWorker

ANN, BOB = WorkerId("grpc://ann:1"), WorkerId("grpc://bob:1")
HEADERS = [(b"authorization", b"Bearer secret")]


@dataclass
class Entries:
    """What is watched."""

    watches: list[Watch] = field(default_factory=list)

    def watch(self, worker: WorkerId) -> Watch:
        self.watches.append(Watch(0.0))
        return self.watches[-1]

    def unwatch(self, worker: WorkerId, watch: Watch) -> None:
        self.watches = [one for one in self.watches if one is not watch]

    def answered(self, worker: WorkerId, watch: Watch) -> None: ...

    def rebuild(self, worker: WorkerId, reason: str) -> None: ...

    def beyond_device(self, worker: WorkerId) -> bool:
        return False


@dataclass
class Gate:
    """The whole data path, with places for two, over these workers."""

    path: KeyedPath
    data: DataPath
    admission: Admission
    keyring: Keyring
    fleet: Fleet
    credit: Credit
    entries: Entries

    def request(self, prompt: str = "hello world") -> DataRequest:
        body = json.dumps({"model": "m", "prompt": prompt}).encode()
        return DataRequest("POST", "/v1/completions", "", HEADERS, body, "127.0.0.1:1", RequestId("r"))

    async def ask(self, prompt: str = "hello world") -> None:
        await self.path(self.request(prompt), FakeResponder())

    def held(self) -> dict[str, object]:
        """What is taken, and by whom it should be given back."""
        account = self.keyring.accounts[0]
        held = {
            "places": self.admission.running,
            "waiting": self.admission.waiting,
            "share of the key": account.in_flight,
            "names": self.data._alive,
            "waits": self.data._patience.fresh,
            "credit": self.credit._coming._requests,
            "watches": self.entries.watches,
            "at workers": [one.worker for one in self.fleet.roster if one.in_flight],
        }
        return {what: each for what, each in held.items() if each}


@asynccontextmanager
async def gate(*workers: FakeWorker, late: LateBounds | None = None) -> AsyncIterator[Gate]:
    known = {worker.id: worker for worker in workers}
    index = PrefixIndex(PrefixHasher(b"key"))
    standings = {worker: Standing(Following(worker, index), lambda: 0.0, grace_s=5.0, settle_s=2.0) for worker in known}
    for standing in standings.values():
        standing.take(FollowState.LIVE)
    credit, metrics, entries, keyring = Credit(index, standings), GatewayMetrics(), Entries(), Keyring()
    keyring.replace([DataKey("ann", key_digest("secret"))])

    async def tokenizer(_: str) -> Tokenizer:
        return ByteTokenizer()

    fleet = Fleet(
        worker_factory=lambda url, _: known[WorkerId(url)],
        feed_factory=lambda _: None,  # type: ignore[arg-type,return-value]
        tokenizer_factory=tokenizer,
        following=NoFollowing(),
    )
    clock = asyncio.get_running_loop().time
    admission = Admission(AdmissionBounds(running=2, waiting=4))
    data = DataPath(
        fleet=fleet,
        policy=make_policy("kv"),
        credit=credit,
        metrics=metrics,
        audit=Audit(entries, metrics),
        late=LateBinding(admission, fleet.roster, clock, late),
        dice=lambda: 0.0,
    )
    access = AccessLog(metrics)
    admitted = AdmittedPath(data, admission, access.refused, data.launch)
    async with fleet:
        for worker in workers:
            fleet.add(WorkerSpec(worker.id))
            index.enrol(worker.id, model="m")
        await asyncio.sleep(0.1)
        path = KeyedPath(admitted, keyring, access, admitted.launch)
        yield Gate(path, data, admission, keyring, fleet, credit, entries)


class Slow(FakeWorker):
    """It takes a turn or two to stop, as one does that says goodbye over a connection."""

    async def forward(self, call: Call, responder: Responder) -> None:
        try:
            await super().forward(call, responder)
        finally:
            await asyncio.sleep(0)


def worker(name: WorkerId, **acts: Any) -> FakeWorker:
    return Slow(name, facts=WorkerFacts(WorkerKind.SGLANG_GRPC, ("m",), block_size=4), **acts)


Moment = Callable[[Gate], Coroutine[Any, Any, None]]


async def free(it: Gate) -> None:
    """Nobody else is there."""


async def full(it: Gate) -> None:
    """Two others have the places, and it waits."""
    others = [asyncio.ensure_future(it.ask()) for _ in range(2)]
    await until(lambda: it.admission.running == 2)
    assert not any(other.done() for other in others)


@pytest.mark.parametrize("late", [False, True], ids=["waiting", "about to go on"])
@pytest.mark.parametrize("before", [free, full])
@pytest.mark.parametrize("fails", [False, True], ids=["served", "tried at two workers"])
async def test_a_request_left_at_any_await_gives_everything_back(before: Moment, fails: bool, late: bool) -> None:
    for number in count():
        ann, bob = (worker(name, first_byte_s=0.2, chunk_s=0.1) for name in (ANN, BOB))
        async with gate(ann, bob) as it:
            await before(it)
            if fails:
                ann.fails = WorkerUnreachable(ANN, "nobody there")
            with suppress(KvherdError):
                reached = await interrupted(it.ask(), number, late=late)
            await asyncio.sleep(60.0)
            assert it.held() == {}
        if not reached:
            break
    assert number > 2


@pytest.mark.parametrize("late", [False, True], ids=["waiting", "about to go on"])
async def test_one_left_just_as_its_worker_is_given_up_is_not_tried_at_another(late: bool) -> None:
    for number in range(2):  # the second: while the worker takes leave
        ann, bob = worker(ANN, first_byte_s=9000.0), worker(BOB)
        async with gate(ann, bob) as it:
            asyncio.get_running_loop().call_later(0.5, setattr, ann, "fails", WorkerUnreachable(ANN, "nobody there"))
            assert await interrupted(it.ask(), number, late=late)
            assert (len(ann.calls), len(bob.calls)) == (1, 0)
            assert it.held() == {}


@pytest.mark.parametrize("late", [False, True], ids=["waiting", "about to go on"])
async def test_one_left_while_it_is_held_for_a_worker_gives_everything_back(late: bool) -> None:
    ann = worker(ANN, first_byte_s=2.0)
    async with gate(ann, late=LateBounds(backlog_s=0.001, longest_s=60.0)) as it:
        member = it.fleet.roster.get(ANN)
        assert member is not None
        it.fleet.roster.prefilled(member, 10_000, 10.0, 0.0)
        async with asyncio.TaskGroup() as group:
            group.create_task(it.ask("hello " * 200))
            await until(lambda: it.admission.running == 1)
            if late:
                group.create_task(until(lambda: it.admission.held == 1))
                assert await interrupted(it.ask(), 0, late=True)
            else:
                left = group.create_task(it.ask())
                await until(lambda: it.admission.held == 1)
                left.cancel()
        assert len(ann.calls) == 1
        assert it.held() == {}


@pytest.mark.parametrize("launches", [False, True], ids=["no connection yet", "a connection"])
@pytest.mark.parametrize("fails", [False, True], ids=["served", "tried at two workers"])
async def test_a_launched_request_left_after_any_number_of_turns_gives_everything_back(
    launches: bool, fails: bool
) -> None:
    for turns in range(16):
        ann, bob = (worker(name, launches=launches) for name in (ANN, BOB))
        async with gate(ann, bob) as it:
            if fails:
                ann.fails = WorkerUnreachable(ANN, "nobody there")
            await leave_after(turns, it)
            await asyncio.sleep(60.0)
            assert it.held() == {}


@pytest.mark.parametrize("launched", [False, True], ids=["awaited", "launched"])
async def test_one_that_fails_unforeseen_as_it_is_sent_gives_everything_back(
    launched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sent(*_: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(Credit, "sent", sent)
    async with gate(worker(ANN, launches=True)) as it:
        if launched:
            await leave_after(3, it)
        else:
            with pytest.raises(RuntimeError, match="a defect"):
                await it.ask()
        assert it.held() == {}


async def leave_after(turns: int, it: Gate) -> None:
    """As a client's connection does."""
    flights: list[Flight] = []
    tasks: list[asyncio.Task[None]] = []

    def landed(outcome: Exception | Coroutine[Any, Any, None] | None) -> None:
        flights.clear()
        if isinstance(outcome, Coroutine):
            tasks.append(asyncio.get_running_loop().create_task(outcome))

    flight = it.path.launch(it.request(), FakeResponder(), landed)
    assert flight is not None
    flights.append(flight)
    for _ in range(turns):
        await asyncio.sleep(0)
    for one in flights:
        one.cancel()
    for task in tasks:
        task.cancel()
        with suppress(asyncio.CancelledError, KvherdError):
            await task
