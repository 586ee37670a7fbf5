"""Requests that are launched and land, without a task: what the relay makes of each way to end."""

import asyncio
import json
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvherd.core.errors import FieldInvalid, WorkerFailed
from kvherd.core.ids import WorkerId
from kvherd.ports.worker import Flight, Landed, Responder
from kvherd.services.gateway.relay.edge import DataRequest, RelayLimits
from kvherd.services.gateway.relay.server import RelayServer
from kvherd.testing.raw_http import RawAnswer, RawClient, until

pytestmark = pytest.mark.net

POST = b"POST /v1/x HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\nhi"
CLOSING = POST.replace(b"Host", b"Connection: close\r\nHost")
EMPTY = [(b"content-length", b"0")]


async def no_app(*_: object) -> None:
    raise AssertionError("only data is asked for here")


async def not_awaited(_request: DataRequest, _responder: Responder) -> None:
    raise AssertionError("every request is launched here")


@dataclass
class Launched:
    responder: Responder
    landed: Landed
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True

    def answer(self) -> None:
        self.responder.start(200, EMPTY)
        self.responder.end()
        self.landed(None)


@dataclass
class Pad:
    """Lets a test say when each flight lands."""

    flights: list[Launched] = field(default_factory=list)

    def __call__(self, _request: DataRequest, responder: Responder, landed: Landed) -> Flight:
        self.flights.append(Launched(responder, landed))
        return self.flights[-1]

    async def flight(self, number: int) -> Launched:
        await until(lambda: len(self.flights) == number, "it is launched")
        return self.flights[-1]


def code(answer: RawAnswer) -> str:
    return str(json.loads(answer.body)["error"]["code"])


async def test_one_flight_at_a_time_and_the_answers_in_order() -> None:
    pad = Pad()
    async with RelayServer(not_awaited, no_app, launch=pad) as relay, RawClient(relay.port) as client:
        client.send(POST * 3)
        for number in (1, 2, 3):
            (await pad.flight(number)).answer()
            assert (await client.answer()).status == 200


async def test_an_error_is_the_answer_before_it_began_and_its_end_after() -> None:
    pad = Pad()
    async with RelayServer(not_awaited, no_app, launch=pad) as relay, RawClient(relay.port) as client:
        client.send(POST * 3)
        (await pad.flight(1)).landed(WorkerFailed(WorkerId("ann"), "why"))
        assert (await client.answer()).status == 502
        (await pad.flight(2)).landed(ZeroDivisionError("a defect"))
        assert (await client.answer()).status == 500
        streaming = await pad.flight(3)
        streaming.responder.start(200, [(b"content-type", b"text/event-stream")])
        streaming.landed(WorkerFailed(WorkerId("ann"), "why"))
        answer = await client.answer()
        assert answer.whole
        assert b'"code":"worker_failed"' in answer.body


@pytest.mark.parametrize(
    ("asked", "headers", "body"),
    [
        pytest.param(CLOSING, [], b"a\r\ndata: 17\n\n\r\n0\r\n\r\n", id="to who takes chunks"),
        pytest.param(CLOSING.replace(b"/1.1", b"/1.0"), [], b"data: 17\n\n", id="to who does not"),
        pytest.param(CLOSING, [(b"content-length", b"10")], b"data: 17\n\n", id="within a told length"),
        pytest.param(CLOSING, [(b"content-length", b"9")], b"data: 17\n", id="beyond a told length"),
    ],
)
async def test_a_whole_chunk_goes_out_as_the_client_can_take_it(
    asked: bytes, headers: list[tuple[bytes, bytes]], body: bytes
) -> None:
    pad = Pad()
    async with RelayServer(not_awaited, no_app, launch=pad) as relay, RawClient(relay.port) as client:
        client.send(asked)
        flight = await pad.flight(1)
        flight.responder.start(200, [(b"content-type", b"text/event-stream"), *headers])
        flight.responder.write_chunk(b"a\r\ndata: 17\n\n\r\n")
        flight.responder.end()
        flight.landed(None)
        flight.responder.write_chunk(b"a\r\ndata: 18\n\n\r\n")  # late: nothing comes of it
        assert (await client.ended()).partition(b"\r\n\r\n")[2] == body


async def test_an_error_after_a_whole_chunk_is_an_event_of_its_own() -> None:
    pad = Pad()
    async with RelayServer(not_awaited, no_app, launch=pad) as relay, RawClient(relay.port) as client:
        client.send(POST)
        flight = await pad.flight(1)
        flight.responder.start(200, [(b"content-type", b"text/event-stream")])
        flight.responder.write(b"data: 1")
        flight.responder.write_chunk(b"3\r\n7\n\n\r\n")
        flight.responder.fail("it broke")
        flight.landed(None)
        answer = await client.answer()
        assert answer.body.startswith(b'data: 17\n\ndata: {"error":')


async def test_a_launch_that_raises_is_answered_and_the_next_request_too() -> None:
    def refuse(_request: DataRequest, _responder: Responder, _landed: Landed) -> Flight | None:
        raise FieldInvalid("model", "is missing")

    async with RelayServer(not_awaited, no_app, launch=refuse) as relay, RawClient(relay.port) as client:
        client.send(POST * 500)
        for _ in range(500):
            assert (await client.answer()).status == 400


async def test_a_flight_may_go_on_in_a_task() -> None:
    pad = Pad()

    async def again(responder: Responder) -> None:
        await asyncio.sleep(0)
        responder.start(200, EMPTY)
        responder.end()

    async with RelayServer(not_awaited, no_app, launch=pad) as relay, RawClient(relay.port) as client:
        client.send(POST * 2)
        flight = await pad.flight(1)
        flight.landed(again(flight.responder))
        assert (await client.answer()).status == 200
        (await pad.flight(2)).answer()
        assert (await client.answer()).status == 200


async def test_what_lands_late_reaches_no_other_request() -> None:
    pad = Pad()
    ran: list[int] = []

    async def never() -> None:
        ran.append(1)

    async with RelayServer(not_awaited, no_app, launch=pad) as relay, RawClient(relay.port) as client:
        client.send(POST * 2)
        first = await pad.flight(1)
        first.answer()
        second = await pad.flight(2)
        coroutine: Coroutine[Any, Any, None] = never()
        for late in (None, ValueError("late"), coroutine):
            first.landed(late)
        first.responder.write(b"late")
        second.answer()
        assert [(await client.answer()).status for _ in range(2)] == [200, 200]
        assert not ran


@pytest.mark.parametrize("began", [False, True])
async def test_a_client_that_leaves_cancels_its_flight(began: bool) -> None:
    pad = Pad()
    async with RelayServer(not_awaited, no_app, launch=pad) as relay:
        async with RawClient(relay.port) as client:
            client.send(POST)
            flight = await pad.flight(1)
            if began:
                flight.responder.start(200, [(b"content-type", b"text/event-stream")])
                flight.responder.write(b"data: 1\n\n")
                await client.reader.readuntil(b"data: 1\n\n")
        await until(lambda: flight.cancelled, "it is cancelled")
        await until(lambda: relay.connections == 0, "the connection is gone")
        flight.landed(None)


async def test_a_flight_that_outlasts_the_drain_is_cancelled_and_its_client_told() -> None:
    pad = Pad()
    relay = RelayServer(not_awaited, no_app, launch=pad, limits=RelayLimits(drain_s=0.1))
    async with AsyncExitStack() as clients:
        async with relay:
            client = await clients.enter_async_context(RawClient(relay.port))
            client.send(POST)
            flight = await pad.flight(1)
        answer = await client.answer()
        assert (answer.status, code(answer)) == (503, "gateway_stopping")
        assert flight.cancelled
        assert await client.ended() == b""


async def test_a_flight_may_land_while_the_server_drains() -> None:
    pad = Pad()
    async with AsyncExitStack() as clients, asyncio.TaskGroup() as group:
        async with RelayServer(not_awaited, no_app, launch=pad) as relay:
            client = await clients.enter_async_context(RawClient(relay.port))
            client.send(POST)
            flight = await pad.flight(1)
            group.create_task(landing(flight))  # begins once leaving waits for it
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"], flight.cancelled) == (200, "close", False)
        assert await client.ended() == b""


async def landing(flight: Launched) -> None:
    flight.answer()


async def test_who_does_not_read_is_told_when_it_reads_again() -> None:
    pad = Pad()
    settled: list[int] = []
    async with RelayServer(not_awaited, no_app, launch=pad) as relay, RawClient(relay.port, read_limit_bytes=1024) as c:
        c.send(POST)
        flight = await pad.flight(1)
        flight.responder.when_drained(lambda: settled.append(0))
        assert settled == [0], "nothing waits to be read"
        flight.responder.start(200, [(b"content-type", b"text/event-stream")])
        for _ in range(100):
            flight.responder.write(b"x" * 200_000)
        flight.responder.when_drained(lambda: settled.append(1))
        assert settled == [0]
        flight.responder.end()
        flight.landed(None)
        assert len((await c.answer()).body) == 20_000_000
        await until(lambda: settled == [0, 1], "it is told")
