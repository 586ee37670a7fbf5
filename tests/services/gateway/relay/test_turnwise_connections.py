"""What is read in one turn of the loop is handled together and written at its end, in order, and nothing is lost."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from kvherd.adapters.http_connection import UpstreamBroken, UpstreamConnection
from kvherd.core.errors import FrameInvalid, GatewayStopping, KvherdError
from kvherd.ports.loop_turn import AT_ONCE_BYTES, LoopTurn, TurnwiseConnection
from kvherd.ports.worker import Flight, Responder
from kvherd.services.gateway.relay.connection import Connection
from kvherd.services.gateway.relay.edge import DataRequest, RelayLimits
from kvherd.services.gateway.relay.premises import Premises

SSE = [(b"content-type", b"text/event-stream")]
JSON = [(b"content-type", b"application/json"), (b"content-length", b"2")]
ASK = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}"
MET_BODY = AT_ONCE_BYTES + 1


class Pipe:
    """Of a transport what a connection asks for; `log` has who wrote, in order."""

    def __init__(self, name: str, log: list[str], *, full: bool = False) -> None:
        self._name = name
        self._log = log
        self._full = full
        self.whose: TurnwiseConnection | None = None
        self.closed = self.aborted = False
        self.got = b""

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.got += data
        self._log.append(self._name)
        if self._full:
            cast("Connection", self.whose).pause_writing()

    def writelines(self, pieces: list[bytes]) -> None:
        self.write(b"".join(pieces))

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = self.aborted = True

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, _name: str) -> None: ...

    def set_write_buffer_limits(self, high: int) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def can_write_eof(self) -> bool:
        return False


def joined(one: TurnwiseConnection, pipe: Pipe) -> None:
    pipe.whose = one
    cast("Any", one).connection_made(cast("asyncio.Transport", pipe))


class NoFlight:
    def cancel(self) -> None: ...


class Relay:
    """Clients of one server, whose requests wait for the test to answer them."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self.log: list[str] = []
        self.turn = LoopTurn()
        self.asked: list[Responder] = []
        self.answer: Callable[[Responder], None] | None = None
        self.unread: list[KvherdError] = []
        loop = asyncio.get_running_loop()
        app, limits, unread = cast("Any", None), RelayLimits(), self._unread
        self._premises = Premises(self._no_task, self._launch, app, limits, group, loop, self.turn, unread)

    def _unread(self, error: KvherdError, _: str) -> None:
        self.unread.append(error)

    async def _no_task(self, request: DataRequest, responder: Responder) -> None:
        raise AssertionError

    def _launch(self, request: DataRequest, responder: Responder, landed: Callable[[None], None]) -> Flight | None:
        self.asked.append(responder)
        if self.answer is not None:
            self.answer(responder)
            landed(None)
        return NoFlight()

    def client(self, name: str = "ann", *, full: bool = False) -> tuple[Connection, Pipe]:
        connection, pipe = Connection(self._premises), Pipe(name, self.log, full=full)
        joined(connection, pipe)
        return connection, pipe

    async def stream(self, name: str = "ann") -> tuple[Responder, Pipe]:
        """An answer that has begun, of which the head is out."""
        connection, pipe = self.client(name)
        connection.data_received(ASK)
        await asyncio.sleep(0)
        self.asked[-1].start(200, SSE)
        await asyncio.sleep(0)
        self.log.clear()
        pipe.got = b""
        return self.asked[-1], pipe


@asynccontextmanager
async def relaying() -> AsyncIterator[Relay]:
    async with asyncio.TaskGroup() as group:
        yield Relay(group)


def answer_at_once(responder: Responder) -> None:
    responder.start(200, JSON)
    responder.write(b"ok")
    responder.end()


# --- clients ---------------------------------------------------------------------------------------------------------


async def test_requests_of_one_turn_are_answered_after_all_were_read() -> None:
    async with relaying() as relay:
        relay.answer = answer_at_once
        (ann, to_ann), (bob, to_bob) = relay.client("ann"), relay.client("bob")
        ann.data_received(ASK)
        bob.data_received(ASK)
        assert (relay.asked, relay.log) == ([], [])
        await asyncio.sleep(0)
        assert relay.log == ["ann", "bob"]
        assert to_ann.got.endswith(b"\r\n\r\nok")
        assert to_bob.got.endswith(b"\r\n\r\nok")


async def test_a_request_in_several_pieces_of_one_turn_is_read_in_order() -> None:
    async with relaying() as relay:
        relay.answer = answer_at_once
        ann, pipe = relay.client()
        for at in range(len(ASK)):
            ann.data_received(ASK[at : at + 1])
        await asyncio.sleep(0)
        assert pipe.got.count(b"HTTP/1.1 200") == 1


async def test_answers_to_pipelined_requests_leave_in_order_in_one_write() -> None:
    async with relaying() as relay:
        relay.answer = answer_at_once
        ann, pipe = relay.client()
        ann.data_received(ASK * 3)
        await asyncio.sleep(0)
        assert relay.log == ["ann"]
        assert pipe.got.count(b"HTTP/1.1 200 OK") == 3


async def test_what_waits_for_a_client_is_bounded() -> None:
    async with relaying() as relay:
        ann, pipe = await relay.stream()
        for _ in range(100):
            ann.write(b"x" * 1000)
        assert len(pipe.got) > 100_000 - AT_ONCE_BYTES
        assert len(relay.log) < 10


async def test_a_client_that_takes_no_more_gets_no_second_answer_made_for_it() -> None:
    async with relaying() as relay:
        ann, _ = relay.client(full=True)
        ann.data_received(ASK * 2)
        await asyncio.sleep(0)
        responder = relay.asked[0]
        responder.start(200, SSE)
        responder.write(b"data: 1\n\n")
        told: list[str] = []
        responder.when_drained(lambda: told.append("drained"))
        assert told == []
        ann.resume_writing()
        assert told == ["drained"]


async def test_a_client_that_finished_sending_gets_what_was_answered_in_the_same_turn() -> None:
    async with relaying() as relay:
        relay.answer = answer_at_once
        ann, pipe = relay.client()
        ann.data_received(ASK)
        assert ann.eof_received() is False
        assert pipe.got.endswith(b"\r\n\r\nok")


async def test_a_client_that_asked_and_left_in_one_turn_is_not_served() -> None:
    async with relaying() as relay:
        relay.answer = answer_at_once
        ann, pipe = relay.client()
        ann.data_received(ASK)
        pipe.closed = True
        ann.connection_lost(ConnectionResetError())
        await asyncio.sleep(0)
        assert (relay.asked, pipe.got) == ([], b"")


async def test_an_answer_is_out_before_its_connection_is_closed() -> None:
    async with relaying() as relay:
        relay.answer = answer_at_once
        ann, pipe = relay.client()
        ann.data_received(ASK.replace(b"content-length", b"connection: close\r\ncontent-length"))
        await asyncio.sleep(0)
        assert pipe.got.endswith(b"connection: close\r\n\r\nok")
        assert pipe.closed


async def test_a_request_that_cannot_be_read_is_refused_after_the_answers_before_it() -> None:
    async with relaying() as relay:
        relay.answer = answer_at_once
        ann, pipe = relay.client()
        ann.data_received(ASK + b"NONSENSE\r\n\r\n")
        await asyncio.sleep(0)
        first, second = pipe.got.index(b"HTTP/1.1 200"), pipe.got.index(b"HTTP/1.1 400")
        assert first < second
        assert [type(error) for error in relay.unread] == [FrameInvalid]


async def test_a_long_piece_is_handled_where_it_is_read() -> None:
    async with relaying() as relay:
        ann, _ = relay.client()
        ann.data_received(ASK.replace(b"content-length: 2", b"content-length: %d" % MET_BODY)[:-2] + b" " * MET_BODY)
        assert len(relay.asked) == 1


async def test_a_server_that_stops_answers_what_was_read_already() -> None:
    async with relaying() as relay:
        relay.answer = answer_at_once
        ann, pipe = relay.client()
        ann.data_received(ASK)
        relay._premises.stopping = True
        ann.stop()
        await asyncio.sleep(0)
        assert pipe.got.endswith(b"connection: close\r\n\r\nok")
        assert pipe.closed


# --- streams ---------------------------------------------------------------------------------------------------------


async def test_events_of_one_turn_go_out_at_its_end_in_the_order_they_came() -> None:
    async with relaying() as relay:
        ann, to_ann = await relay.stream("ann")
        bob, _ = await relay.stream("bob")
        ann.write(b"1")
        bob.write_chunk(b"1\r\n2\r\n")
        ann.write_chunk(b"1\r\n3\r\n")
        assert relay.log == []
        await asyncio.sleep(0)
        assert relay.log == ["ann", "bob"]
        assert to_ann.got == b"1\r\n1\r\n1\r\n3\r\n"
        ann.write(b"4")
        await asyncio.sleep(0)
        assert to_ann.got.endswith(b"1\r\n4\r\n")


async def test_nobody_waits_behind_more_than_thirty_two() -> None:
    async with relaying() as relay:
        many = [await relay.stream(f"c{number}") for number in range(70)]
        for responder, _ in many:
            responder.write(b"1")
        assert relay.log == [f"c{number}" for number in range(64)]
        await asyncio.sleep(0)
        assert relay.log == [f"c{number}" for number in range(70)]


async def test_the_end_goes_out_with_what_waits() -> None:
    async with relaying() as relay:
        ann, pipe = await relay.stream()
        ann.write(b"1")
        ann.end()
        await asyncio.sleep(0)
        assert (pipe.got, relay.log) == (b"1\r\n1\r\n0\r\n\r\n", ["ann"])


async def test_an_error_comes_after_what_waits() -> None:
    async with relaying() as relay:
        ann, pipe = await relay.stream()
        ann.write(b"data: 1\n\n")
        cast("Any", ann).fail_with(GatewayStopping())
        await asyncio.sleep(0)
        assert pipe.got.startswith(b"9\r\ndata: 1\n\n\r\n")
        assert pipe.got.endswith(b"\n\n\r\n0\r\n\r\n")


async def test_an_answer_that_is_cut_off_has_all_that_waits_and_no_end() -> None:
    async with relaying() as relay:
        ann, pipe = await relay.stream()
        cast("Any", ann)._sse = False
        ann.write(b"1")
        ann.fail("it broke")
        assert (pipe.got, pipe.closed) == (b"1\r\n1\r\n", True)


async def test_nothing_is_written_to_who_has_left_and_the_others_get_theirs() -> None:
    async with relaying() as relay:
        ann, to_ann = await relay.stream("ann")
        bob, _ = await relay.stream("bob")
        ann.write(b"1")
        bob.write(b"1")
        to_ann.closed = True
        await asyncio.sleep(0)
        assert relay.log == ["bob"]


async def test_what_cannot_be_handled_ends_its_connection_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    async with relaying() as relay:
        relay.answer = answer_at_once
        (ann, to_ann), (bob, to_bob) = relay.client("ann"), relay.client("bob")
        cast("Any", ann)._parser = None
        ann.data_received(ASK)
        bob.data_received(ASK)
        with caplog.at_level(logging.ERROR):
            await asyncio.sleep(0)
        assert to_ann.aborted
        assert to_bob.got.endswith(b"\r\n\r\nok")
        assert "could not be handled" in caplog.text
        to_ann.closed = True


# --- workers ---------------------------------------------------------------------------------------------------------


class Pool:
    def free(self, connection: UpstreamConnection) -> None: ...

    def forget(self, connection: UpstreamConnection) -> None: ...


class Sink:
    def __init__(self) -> None:
        self.heard = b""
        self.outcomes: list[Exception | None] = []

    def head(self, status: int, headers: object) -> None: ...

    def body(self, data: bytes) -> None:
        self.heard += data

    events = body

    def when_settled(self, then: Callable[[], None]) -> None:
        then()

    def over(self, outcome: Exception | None) -> None:
        self.outcomes.append(outcome)


ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


def upstream() -> tuple[UpstreamConnection, Pipe]:
    connection, pipe = UpstreamConnection(Pool(), LoopTurn()), Pipe("engine", [])
    joined(connection, pipe)
    return connection, pipe


async def test_what_nobody_asked_for_is_not_the_answer_to_a_request_that_is_begun_in_the_same_turn() -> None:
    connection, pipe = upstream()
    connection.data_received(ANSWER)
    assert not connection.begin(b"GET / HTTP/1.1\r\n\r\n", b"", Sink(), lambda _: None)
    await asyncio.sleep(0)
    assert (pipe.got, pipe.aborted) == (b"", True)


async def test_an_answer_that_came_before_the_connection_ended_is_heard() -> None:
    connection, _ = upstream()
    sink = Sink()
    assert connection.begin(b"GET / HTTP/1.1\r\n\r\n", b"", sink, sink.over)
    await asyncio.sleep(0)
    connection.data_received(ANSWER)
    connection.connection_lost(None)
    assert (sink.heard, sink.outcomes) == (b"ok", [None])


async def test_a_request_that_had_not_left_when_the_connection_ended_may_be_sent_again() -> None:
    connection, pipe = upstream()
    sink = Sink()
    assert connection.begin(b"POST / HTTP/1.1\r\n\r\n", b"", sink, sink.over)
    pipe.closed = True
    await asyncio.sleep(0)
    connection.connection_lost(None)
    (outcome,) = sink.outcomes
    assert isinstance(outcome, UpstreamBroken)
    assert outcome.unsent
    assert pipe.got == b""


async def test_a_request_that_is_cancelled_in_its_own_turn_never_leaves() -> None:
    connection, pipe = upstream()
    sink = Sink()
    assert connection.begin(b"POST / HTTP/1.1\r\n\r\n", b"", sink, sink.over)
    connection.cancel()
    await asyncio.sleep(0)
    assert (pipe.got, sink.outcomes) == (b"", [])
