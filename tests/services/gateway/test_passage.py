"""Requests without a task: what stands around them is left once, however they end."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from kvherd.core.errors import WorkerFailed
from kvherd.core.fleet.keyring import DataKey, KeyLimitReached, KeyLimits, Keyring, key_digest
from kvherd.core.ids import RequestId, WorkerId
from kvherd.ports.worker import Flight, Landed, Responder
from kvherd.services.gateway.metrics import GatewayMetrics
from kvherd.services.gateway.relay.edge import DataRequest
from kvherd.services.gateway.settings import AdmissionBounds
from kvherd.services.gateway.turns.access import AccessLog
from kvherd.services.gateway.turns.keyed import KeyedPath
from kvherd.services.gateway.waiting.admission import Admission, AdmittedPath
from kvherd.services.gateway.waiting.passage import hand_over
from kvherd.testing.workers import FakeResponder

REQUEST = DataRequest(
    "POST", "/generate", "", [(b"authorization", b"Bearer secret")], b"{}", "127.0.0.1", RequestId("r")
)
Outcome = Exception | Coroutine[Any, Any, None] | None


class Flown:
    """A flight, and what it was launched with."""

    def __init__(self, request: DataRequest, landed: Landed) -> None:
        self.request = request
        self.landed = landed
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Stage:
    """A door with one place and one key, and nothing behind it but what the test says."""

    def __init__(self, *, launches: bool = True) -> None:
        self.admission = Admission(AdmissionBounds(running=1, waiting=1))
        self.keyring = Keyring()
        self.keyring.replace([DataKey("ann", key_digest("secret"), KeyLimits(in_flight=1))])
        self.outcomes: list[Exception | None] = []
        self.tasks: list[asyncio.Future[None]] = []
        self.flown: list[Flown] = []
        self._launches = launches
        access = AccessLog(GatewayMetrics())
        admitted = AdmittedPath(self._handle, self.admission, launch=self._launch)
        self.path = KeyedPath(admitted, self.keyring, access, admitted.launch)

    def launch(self) -> Flight | None:
        return self.path.launch(REQUEST, FakeResponder(), self._land)

    def _land(self, outcome: Outcome) -> None:
        if isinstance(outcome, Coroutine):
            self.tasks.append(asyncio.ensure_future(outcome))
        else:
            self.outcomes.append(outcome)

    def under_way(self) -> tuple[int, int]:
        return self.admission.running, self.keyring.accounts[0].in_flight

    async def _handle(self, _request: DataRequest, _responder: Responder) -> None:
        await asyncio.sleep(0)

    def _launch(self, request: DataRequest, _responder: Responder, landed: Landed) -> Flight | None:
        if not self._launches:
            return None
        self.flown.append(Flown(request, landed))
        return self.flown[-1]


async def test_a_request_has_its_place_until_it_lands() -> None:
    it = Stage()
    it.launch()
    assert it.under_way() == (1, 1)
    assert it.flown[0].request.key == "ann"
    assert all(name != b"authorization" for name, _ in it.flown[0].request.headers)
    it.flown[0].landed(None)
    assert it.under_way() == (0, 0)
    assert it.outcomes == [None]


async def test_a_request_whose_client_leaves_gives_its_place_back() -> None:
    it = Stage()
    flight = it.launch()
    assert flight is not None
    flight.cancel()
    assert it.flown[0].cancelled
    assert (it.under_way(), it.outcomes) == ((0, 0), [])


async def test_an_error_is_passed_on_when_the_place_is_free_again() -> None:
    it = Stage()
    it.launch()
    error = WorkerFailed(WorkerId("w"), "it broke")
    it.flown[0].landed(error)
    assert (it.under_way(), it.outcomes) == ((0, 0), [error])


async def test_what_goes_on_in_a_task_keeps_its_place_until_that_ends() -> None:
    it, goes_on = Stage(), asyncio.Event()

    async def rest() -> None:
        await goes_on.wait()

    it.launch()
    it.flown[0].landed(rest())
    await asyncio.sleep(1.0)
    assert it.under_way() == (1, 1)
    goes_on.set()
    await it.tasks[0]
    assert it.under_way() == (0, 0)


async def test_a_task_that_is_cancelled_before_its_first_step_leaves_too() -> None:
    left: list[str] = []

    async def rest() -> None:
        raise AssertionError("it never began")

    async def within_a_task(outcome: Outcome) -> None:
        assert isinstance(outcome, Coroutine)
        await outcome

    def leave_at_once(outcome: Outcome) -> None:
        asyncio.ensure_future(within_a_task(outcome)).cancel()

    hand_over(leave_at_once, rest(), lambda: left.append("once"))
    await asyncio.sleep(0.1)
    assert left == ["once"]


async def test_what_cannot_be_launched_leaves_no_trace_and_is_asked_for_again() -> None:
    it = Stage(launches=False)
    assert it.launch() is None
    account = it.keyring.accounts[0]
    assert (it.under_way(), account.admitted_total) == ((0, 0), 0)
    await it.path(REQUEST, FakeResponder())
    assert (it.under_way(), account.admitted_total) == ((0, 0), 1)


async def test_beyond_the_bound_nothing_is_launched_and_a_limit_of_a_key_is_told_at_once() -> None:
    it = Stage()
    it.launch()
    with pytest.raises(KeyLimitReached):
        it.launch()
    it.keyring.replace([])
    assert it.launch() is None
    assert len(it.flown) == 1
