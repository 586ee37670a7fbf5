"""How many requests run, how many wait, and who is told to return."""

import asyncio

import pytest

from kvherd.core.errors import FieldInvalid, KvherdError
from kvherd.core.fleet.refusals import DeadlinePassed, GatewayBusy, WaitedInVain
from kvherd.core.ids import RequestId
from kvherd.ports.worker import Responder
from kvherd.services.gateway.relay.edge import DataRequest
from kvherd.services.gateway.settings import AdmissionBounds
from kvherd.services.gateway.waiting.admission import Admission, AdmittedPath
from kvherd.testing.workers import FakeResponder
from kvherd.wire.status import status_of


class Desk:
    """A path behind an admission, whose requests take a second each."""

    def __init__(self, bounds: AdmissionBounds) -> None:
        self.admission = Admission(bounds)
        self.path = AdmittedPath(self._serve, self.admission)
        self.served: list[str] = []
        self.timeouts: list[bytes] = []
        self.waited: list[float] = []
        self.most = 0
        self.now = 0

    async def _serve(self, request: DataRequest, _responder: Responder) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        self.served.append(request.key)
        self.waited.append(request.waited_s)
        self.timeouts += [value for name, value in request.headers if name == b"x-request-timeout"]
        try:
            await asyncio.sleep(1.0)
        finally:
            self.now -= 1

    async def ask(self, key: str = "", own: bytes = b"") -> None:
        headers = [(b"x-request-timeout", own)] if own else []
        request = DataRequest("POST", "/v1/x", "", headers, b"", "127.0.0.1:1", RequestId("r"))
        await self.path(request.changed(key=key), FakeResponder())

    def assert_idle(self) -> None:
        assert (self.admission.running, self.admission.waiting) == (0, 0)
        assert self.admission.free


async def test_a_flood_is_served_as_far_as_it_may_wait_and_the_rest_is_told_to_return() -> None:
    desk = Desk(AdmissionBounds(running=4, waiting=8))
    outcomes = await asyncio.gather(*(desk.ask() for _ in range(200)), return_exceptions=True)
    assert outcomes.count(None) == 12
    busy = [one for one in outcomes if isinstance(one, GatewayBusy)]
    assert len(busy) == 188
    assert status_of(busy[0]).http == 429
    assert busy[0].retry_after_s > 0
    assert desk.most == 4
    desk.assert_idle()


async def test_each_key_that_waits_has_its_turn_however_many_another_has() -> None:
    desk = Desk(AdmissionBounds(running=1, waiting=20))
    async with asyncio.TaskGroup() as group:
        for key in ("many", *["many"] * 6, "few", "few", "one"):
            group.create_task(desk.ask(key))
    assert desk.served == ["many", "many", "few", "one", "many", "few", *["many"] * 4]
    desk.assert_idle()


async def test_a_turn_that_does_not_come_is_not_waited_for_longer_than_is_said() -> None:
    desk = Desk(AdmissionBounds(running=1, waiting=20, longest_s=2.5))
    outcomes = await asyncio.gather(*(desk.ask() for _ in range(5)), return_exceptions=True)
    assert outcomes.count(None) == 3
    assert [type(one) for one in outcomes if one is not None] == [WaitedInVain] * 2
    assert status_of(WaitedInVain(2.5)).http == 503
    desk.assert_idle()


async def test_a_client_that_leaves_while_it_waits_gives_its_place_to_the_next() -> None:
    desk = Desk(AdmissionBounds(running=1, waiting=2))
    first, second, third = (asyncio.ensure_future(desk.ask(key)) for key in ("a", "b", "c"))
    await asyncio.sleep(0.5)
    second.cancel()
    await asyncio.sleep(0)
    fourth = asyncio.ensure_future(desk.ask("d"))
    await asyncio.gather(first, third, fourth)
    assert desk.served == ["a", "c", "d"]
    desk.assert_idle()


async def test_a_client_that_leaves_just_as_its_turn_comes_costs_nobody_a_turn() -> None:
    desk = Desk(AdmissionBounds(running=1, waiting=2))
    await desk.admission.enter("")
    second, third = (asyncio.ensure_future(desk.ask(key)) for key in ("b", "c"))
    await asyncio.sleep(0.1)
    desk.admission.leave()
    second.cancel()
    await asyncio.gather(second, third, return_exceptions=True)
    assert desk.served == ["c"]
    desk.assert_idle()


async def test_waiting_counts_for_a_client_s_own_deadline() -> None:
    desk = Desk(AdmissionBounds(running=1, waiting=5))
    outcomes = await asyncio.gather(desk.ask(), desk.ask(own=b"0.5"), desk.ask(own=b"3"), return_exceptions=True)
    assert [type(one) for one in outcomes] == [type(None), DeadlinePassed, type(None)]
    assert [float(left) for left in desk.timeouts] == [pytest.approx(2.0)]
    desk.assert_idle()


async def test_who_waited_is_known_to_have_waited() -> None:
    desk = Desk(AdmissionBounds(running=1, waiting=5))
    await asyncio.gather(desk.ask(), desk.ask(own=b"9"), desk.ask())
    assert desk.waited == [0.0, pytest.approx(1.0), pytest.approx(2.0)]


async def test_a_deadline_that_is_none_is_refused_by_name() -> None:
    desk = Desk(AdmissionBounds(running=1, waiting=5))
    first = asyncio.ensure_future(desk.ask())
    await asyncio.sleep(0)
    with pytest.raises(FieldInvalid, match="x-request-timeout"):
        await desk.ask(own=b"soon")
    await first
    desk.assert_idle()


async def test_a_request_that_fails_leaves_its_place() -> None:
    async def fail(_request: DataRequest, _responder: Responder) -> None:
        raise WaitedInVain(1.0)

    admission = Admission(AdmissionBounds(running=1))
    request = DataRequest("POST", "/v1/x", "", [], b"", "127.0.0.1:1", RequestId("r"))
    for _ in range(3):
        with pytest.raises(KvherdError):
            await AdmittedPath(fail, admission)(request, FakeResponder())
    assert admission.free
