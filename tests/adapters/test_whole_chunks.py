"""Events that come as whole chunks are passed on as they are, and whatever else comes is read as HTTP has it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvherd.adapters.http_connection import UpstreamBroken, UpstreamConnection
from kvherd.adapters.http_pool import HttpPool
from kvherd.adapters.http_worker import HttpWorker
from kvherd.core.ids import RequestId, WorkerId
from kvherd.ports.completions import Usage
from kvherd.ports.loop_turn import LoopTurn
from kvherd.ports.worker import Call, NewsTo
from kvherd.testing.workers import FakeResponder
from kvherd.wire.http_chunks import content
from kvherd.wire.http_heads import Header

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2}}\n\n'
LAST = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Transport:
    """Of asyncio.Transport what a connection asks for."""

    closed = False

    def write(self, _data: bytes) -> None: ...

    def abort(self) -> None:
        self.closed = True

    close = abort

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return 0


def at_once() -> LoopTurn:
    """A turn of nothing but what is read or written in it."""
    return LoopTurn(lambda callback: callback())


class Owner:
    def free(self, connection: UpstreamConnection) -> None: ...

    def forget(self, connection: UpstreamConnection) -> None: ...


@dataclass
class Told:
    """A sink that keeps everything, and what came as a whole chunk apart too."""

    body_: bytes = b""
    chunks: list[bytes] = field(default_factory=list)
    outcomes: list[Exception | None] = field(default_factory=list)
    refuses: bool = False

    def head(self, status: int, headers: Sequence[Header]) -> None: ...

    def body(self, data: bytes) -> None:
        self.body_ += data

    def events(self, chunk: bytes) -> None:
        if self.refuses:
            raise LookupError("not wanted")
        self.chunks.append(chunk)
        self.body(content(chunk))

    def when_settled(self, then: Callable[[], None]) -> None:
        then()

    def over(self, outcome: Exception | None) -> None:
        self.outcomes.append(outcome)


def told(*pieces: bytes, sink: Told | None = None) -> Told:
    """What a sink heard of these pieces on a new connection."""
    connection, sink = UpstreamConnection(Owner(), at_once()), sink or Told()
    connection.connection_made(cast("object", Transport()))  # type: ignore[arg-type]
    assert connection.begin(b"", b"", sink, sink.over)
    for piece in pieces:
        if not sink.outcomes:
            connection.data_received(piece)
    return sink


def test_a_chunk_of_whole_events_is_passed_on_as_it_came() -> None:
    sink = told(HEAD, chunk(EVENT), chunk(EVENT * 3), LAST)
    assert sink.chunks == [chunk(EVENT), chunk(EVENT * 3)]
    assert (sink.body_, sink.outcomes) == (EVENT * 4, [None])


@pytest.mark.parametrize(
    "piece",
    [
        pytest.param(chunk(b"data: half"), id="half an event"),
        pytest.param(chunk(EVENT) * 2, id="two chunks"),
        pytest.param(b"%X\r\n%b\r\n" % (len(EVENT), EVENT), id="its size as it may be"),
        pytest.param(b"%x;name=value\r\n%b\r\n" % (len(EVENT), EVENT), id="an extension"),
        pytest.param(b"0%x\r\n%b\r\n" % (len(EVENT), EVENT), id="a zero before its size"),
        pytest.param(chunk(EVENT * 100), id="a long one"),
    ],
)
def test_what_is_no_such_chunk_is_read_and_the_next_is_passed_on_again(piece: bytes) -> None:
    sink = told(HEAD, piece, chunk(EVENT), LAST)
    assert sink.chunks[-1:] == [chunk(EVENT)]
    assert sink.body_.endswith(EVENT)
    assert sink.outcomes == [None]


def test_a_chunk_within_a_chunk_is_content() -> None:
    inner = chunk(EVENT)
    outer = chunk(inner)
    at = outer.index(b"\n") + 1
    sink = told(HEAD, outer[:at], outer[at:-2], outer[-2:], LAST)
    assert (sink.chunks, sink.body_, sink.outcomes) == ([], inner, [None])


def test_what_looks_like_a_chunk_behind_the_first_digit_of_a_size_is_none() -> None:
    inner = chunk(EVENT)
    size = b"1" + inner[: inner.index(b"\r")]
    rest = b"x" * (int(size, 16) - len(EVENT) - 2)
    sink = told(HEAD, b"1", inner, rest + b"\r\n", LAST)
    assert (sink.chunks, sink.body_, sink.outcomes) == ([], EVENT + b"\r\n" + rest, [None])


def test_a_body_of_a_told_length_is_no_chunks_whatever_it_looks_like() -> None:
    body = chunk(EVENT)
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (2 * len(body))
    early = b"HTTP/1.1 103 Early Hints\r\ntransfer-encoding: chunked\r\n\r\n"
    for first in ((head,), (early, head)):
        sink = told(*first, body, body)
        assert (sink.chunks, sink.body_, sink.outcomes) == ([], body * 2, [None])


def test_an_answer_that_ends_after_a_whole_chunk_is_cut_off() -> None:
    sink = Told()
    connection = UpstreamConnection(Owner(), at_once())
    connection.connection_made(cast("object", Transport()))  # type: ignore[arg-type]
    connection.begin(b"", b"", sink, sink.over)
    for piece in (HEAD, chunk(EVENT), chunk(EVENT)):
        connection.data_received(piece)
    connection.connection_lost(None)
    assert len(sink.chunks) == 2
    assert [str(outcome) for outcome in sink.outcomes] == ["it closed the connection in the middle of its answer"]


def test_what_a_sink_raises_at_a_whole_chunk_is_for_who_waits() -> None:
    sink = told(HEAD, chunk(EVENT), sink=Told(refuses=True))
    assert [type(outcome) for outcome in sink.outcomes] == [LookupError]


def test_what_is_no_http_after_a_whole_chunk_breaks_the_answer() -> None:
    sink = told(HEAD, chunk(EVENT), b"no chunk\r\n")
    assert [type(outcome) for outcome in sink.outcomes] == [UpstreamBroken]


@given(data=st.data())
def test_however_a_stream_is_cut_into_pieces_its_content_is_the_same(data: st.DataObject) -> None:
    bodies = data.draw(st.lists(st.sampled_from([EVENT, EVENT * 2, b"x", b"a\n\n", b"5\r\nab\n\n\r\n", b"y" * 300])))
    stream = HEAD + b"".join(map(chunk, bodies)) + LAST
    bounds = [len(HEAD)]
    for body in bodies:
        bounds.append(bounds[-1] + len(chunk(body)))
    anywhere = st.integers(1, len(stream) - 1)
    cuts = data.draw(st.sets(st.one_of(st.sampled_from(bounds), anywhere)))
    places = [0, *sorted(cuts - {len(stream)}), len(stream)]
    sink = told(*(stream[begin:end] for begin, end in pairwise(places)))
    assert (sink.body_, sink.outcomes) == (b"".join(bodies), [None])


# --- through a worker ------------------------------------------------------------------------------------------------


class Chunks(FakeResponder):
    """Keeps whole chunks apart."""

    def write_chunk(self, chunk: bytes) -> None:
        self.whole = [*getattr(self, "whole", []), chunk]
        super().write_chunk(chunk)


def through_worker(*pieces: bytes) -> tuple[Chunks, list[Usage]]:
    """What a client and the gateway hear of an answer in these pieces."""
    pool = HttpPool("h", 1)
    worker = HttpWorker(WorkerId("ann"), "http://h:1", pool=pool)
    connection = UpstreamConnection(pool, at_once())
    connection.connection_made(cast("object", Transport()))  # type: ignore[arg-type]
    pool._idle.append(connection)
    responder, usages, landed = Chunks(), list[Usage](), list[object]()
    call = Call("POST", "/v1/x", [], b"", RequestId("r"), news=NewsTo(on_usage=usages.append))
    assert worker.launch(call, responder, landed.append) is not None
    for piece in pieces:
        connection.data_received(piece)
    return responder, usages


async def test_the_first_event_is_told_and_those_after_it_pass_as_they_are() -> None:
    responder, usages = through_worker(HEAD, chunk(EVENT), chunk(EVENT), chunk(EVENT), LAST)
    assert responder.whole == [chunk(EVENT)] * 2
    assert (responder.body, responder.ended, usages) == (EVENT * 3, True, [])


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param([chunk(USAGE)], id="whole"),
        pytest.param([chunk(USAGE[:30]), chunk(USAGE[30:])], id="in two chunks, of which the second looks whole"),
        pytest.param([chunk(USAGE)[:30], chunk(USAGE)[30:]], id="in two pieces"),
        pytest.param([chunk(EVENT + USAGE)], id="behind another"),
        pytest.param([chunk(USAGE), chunk(EVENT.replace(b"}\n", b',"usage":null}\n'))], id="before one that has none"),
    ],
)
async def test_the_usage_is_read_from_chunks_that_are_passed_on(pieces: list[bytes]) -> None:
    responder, usages = through_worker(HEAD, chunk(EVENT), chunk(EVENT), *pieces, chunk(b"data: [DONE]\n\n"), LAST)
    assert [(usage.prompt_tokens, usage.completion_tokens) for usage in usages] == [(7, 2)]
    assert responder.body.endswith(b"data: [DONE]\n\n")


async def test_the_reason_of_a_worker_that_refuses_by_events_is_none_of_the_clients() -> None:
    head = HEAD.replace(b"200 OK", b"503 Busy")
    responder, _ = through_worker(head, chunk(EVENT), chunk(EVENT), LAST)
    assert not responder.started
