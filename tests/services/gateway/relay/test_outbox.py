"""Pieces of streams go out together at the end of the loop's turn, in order, and never later than what follows them."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest

from kvherd.core.errors import GatewayStopping
from kvherd.core.ids import RequestId
from kvherd.services.gateway.relay.edge import DataRequest
from kvherd.services.gateway.relay.incoming import Incoming
from kvherd.services.gateway.relay.outbox import Outbox
from kvherd.services.gateway.relay.responder import ConnectionResponder

SSE = [(b"content-type", b"text/event-stream")]


class Transport:
    def __init__(self, client: str, log: list[str]) -> None:
        self._client = client
        self._log = log
        self.closed = False
        self.got = b""

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.got += data
        self._log.append(self._client)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


class Client:
    """The connection of one client that has asked for a stream, of which the head is out."""

    def __init__(self, outbox: Outbox, log: list[str], name: str = "ann") -> None:
        self.pipe = Transport(name, log)
        self.transport = cast("asyncio.Transport", self.pipe)
        self.drained: list[bytes] = []
        asked = DataRequest("POST", "/v1/x", "", [], b"", "peer", RequestId("r"))
        incoming = Incoming(asked, keep_alive=True, http10=False, is_data=True)
        self.answer = ConnectionResponder(self, incoming, outbox)
        self.answer.start(200, SSE)
        self.pipe.got = b""
        log.clear()

    async def drain(self) -> None:
        self.drained.append(self.pipe.got)

    def when_drained(self, then: Callable[[], None]) -> None:
        self.drained.append(self.pipe.got)
        then()

    def landed(self, responder: ConnectionResponder, outcome: Exception | Coroutine[Any, Any, None] | None) -> None: ...


def clients(*names: str) -> tuple[list[Client], list[str]]:
    log: list[str] = []
    outbox = Outbox(asyncio.get_running_loop())
    return [Client(outbox, log, name) for name in names], log


async def test_what_came_in_one_turn_goes_out_at_its_end_in_the_order_it_came() -> None:
    (ann, bob), log = clients("ann", "bob")
    ann.answer.write(b"1")
    bob.answer.write_chunk(b"1\r\n2\r\n")
    ann.answer.write_chunk(b"1\r\n3\r\n")
    assert log == []
    await asyncio.sleep(0)
    assert log == ["ann", "bob"]
    assert ann.pipe.got == b"1\r\n1\r\n1\r\n3\r\n"
    ann.answer.write(b"4")
    await asyncio.sleep(0)
    assert ann.pipe.got.endswith(b"1\r\n4\r\n")


async def test_nobody_waits_behind_more_than_thirty_two() -> None:
    many, log = clients(*(f"c{number}" for number in range(70)))
    for client in many:
        client.answer.write(b"1")
    assert log == [f"c{number}" for number in range(64)]
    await asyncio.sleep(0)
    assert log == [f"c{number}" for number in range(70)]
    many[0].answer.write(b"2")
    await asyncio.sleep(0)
    assert log[70:] == ["c0"]


async def test_the_end_goes_out_with_what_waits_and_nothing_after_it() -> None:
    (ann,), log = clients("ann")
    ann.answer.write(b"1")
    ann.answer.end()
    assert (ann.pipe.got, log) == (b"1\r\n1\r\n0\r\n\r\n", ["ann"])
    await asyncio.sleep(0)
    assert log == ["ann"]


async def test_an_error_comes_after_what_waits() -> None:
    (ann,), _ = clients("ann")
    ann.answer.write(b"data: 1\n\n")
    ann.answer.fail_with(GatewayStopping())
    assert ann.pipe.got.startswith(b"9\r\ndata: 1\n\n\r\n")
    assert ann.pipe.got.endswith(b"\n\n\r\n0\r\n\r\n")


async def test_an_answer_that_is_cut_off_has_all_that_waits_and_no_end() -> None:
    log: list[str] = []
    client = Client(Outbox(asyncio.get_running_loop()), log)
    client.answer._sse = False
    client.answer.write(b"1")
    client.answer.fail("it broke")
    assert (client.pipe.got, client.pipe.closed) == (b"1\r\n1\r\n", True)


async def test_whether_a_client_takes_more_is_asked_when_it_has_all_there_is() -> None:
    (ann,), _ = clients("ann")
    ann.answer.write(b"1")
    ann.answer.when_drained(lambda: None)
    ann.answer.write(b"2")
    await ann.answer.drain()
    assert ann.drained == [b"1\r\n1\r\n", b"1\r\n1\r\n1\r\n2\r\n"]


@pytest.mark.parametrize("left", ["closed", "abandoned"])
async def test_nothing_is_written_to_who_has_left_and_the_others_get_theirs(left: str) -> None:
    (ann, bob), log = clients("ann", "bob")
    ann.answer.write(b"1")
    bob.answer.write(b"1")
    if left == "closed":
        ann.pipe.closed = True
    else:
        ann.answer.abandon()
    await asyncio.sleep(0)
    assert log == ["bob"]
