"""Calls over our own HTTP/2, before a real gRPC server and before servers that do what a test says."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import pytest

from kvherd.adapters.grpc_stream import WINDOW_BYTES, WireStream
from kvherd.adapters.grpc_wire import MOST_MESSAGE_BYTES
from kvherd.adapters.grpc_wires import GrpcWires
from kvherd.core.errors import FrameInvalid
from kvherd.testing.grpc_engine import FakeGrpcEngine
from kvherd.testing.patience import until
from kvherd.wire import http2

pytestmark = pytest.mark.net
PATH = "/any.Service/"
OK_HEADERS = b"\x88"  # :status 200, from the static table
TRAILERS_OK = b"\0\x0bgrpc-status\x010"

Script = Callable[["Peer"], Awaitable[None]]


@dataclass
class Heard:
    """Keeps what came."""

    messages: list[bytes] = field(default_factory=list)
    end: tuple[str, str] | None = None
    defect: Exception | None = None

    def message(self, data: bytes) -> None:
        assert self.end is None, "nothing follows the end"
        if self.defect is not None:
            raise self.defect
        self.messages.append(data)

    def ended(self, status: str, words: str) -> None:
        assert self.end is None, "a stream ends once"
        self.end = status, words

    async def over(self) -> tuple[str, str]:
        await until(lambda: self.end is not None)
        assert self.end is not None
        return self.end


@dataclass
class Peer:
    """The other end of one connection, frame by frame."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def frame(self, kind: int | None = None) -> tuple[int, int, int, bytes]:
        """The next frame, or the next of a kind: kind, flags, stream, payload."""
        while True:
            head = await self.reader.readexactly(9)
            payload = await self.reader.readexactly(int.from_bytes(head[:3], "big"))
            if kind in (None, head[3]):
                return head[3], head[4], int.from_bytes(head[5:], "big"), payload

    def send(self, kind: int, stream: int = 0, payload: bytes = b"", *, flags: int = 0) -> None:
        self.writer.write(http2.frame(kind, stream, payload, flags=flags))

    def answer(self, stream: int, *messages: bytes) -> None:
        self.send(http2.HEADERS, stream, OK_HEADERS, flags=http2.END_HEADERS)
        for data in messages:
            self.send(http2.DATA, stream, http2.message(data))

    def finish(self, stream: int) -> None:
        self.send(http2.HEADERS, stream, TRAILERS_OK, flags=http2.END_HEADERS | http2.END_STREAM)


@asynccontextmanager
async def scripted(script: Script) -> AsyncIterator[GrpcWires]:
    """Wires to a server that does this with each connection; its settings are sent already."""
    async with asyncio.TaskGroup() as group:

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            peer = Peer(reader, writer)
            assert await reader.readexactly(len(http2.PREFACE)) == http2.PREFACE
            writer.write(http2.settings({}))
            try:
                await script(peer)
                await reader.read()
            except (asyncio.IncompleteReadError, ConnectionError):
                pass
            finally:
                writer.close()

        tasks: list[asyncio.Task[None]] = []
        server = await asyncio.start_server(lambda r, w: tasks.append(group.create_task(serve(r, w))), "127.0.0.1", 0)
        wires = GrpcWires("127.0.0.1", server.sockets[0].getsockname()[1])
        try:
            yield wires
        finally:
            wires.close()
            server.close()
            for task in tasks:
                task.cancel()


@asynccontextmanager
async def real() -> AsyncIterator[tuple[FakeGrpcEngine, GrpcWires]]:
    async with FakeGrpcEngine() as engine:
        wires = GrpcWires("127.0.0.1", engine.port)
        try:
            yield engine, wires
        finally:
            wires.close()


async def call(wires: GrpcWires, data: bytes = b"asked", name: str = "Echo") -> tuple[WireStream, Heard]:
    heard = Heard()
    return await wires.call(PATH + name, data, heard), heard


# --- a real server -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 5, 16_379, 16_380, 70_000, 3_000_000])
async def test_a_request_and_its_answer_of_any_size_arrive_whole(size: int) -> None:
    data = bytes(index % 251 for index in range(size))
    async with real() as (_, wires):
        _, heard = await call(wires, data)
        assert await heard.over() == ("OK", "")
        assert heard.messages == [data]


async def test_many_calls_share_one_connection_and_none_disturbs_another() -> None:
    async with real() as (_, wires):
        heards = [(await call(wires, b"%d" % number * 3_000))[1] for number in range(200)]
        for number, heard in enumerate(heards):
            assert await heard.over() == ("OK", "")
            assert heard.messages == [b"%d" % number * 3_000]
        assert len(wires._wires) == 1


async def test_a_refusal_arrives_with_its_words() -> None:
    async def refuse(context: Any) -> None:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "not now: 100 % bésy")

    async with real() as (engine, wires):
        engine.calls["Refuse"] = refuse
        assert await (await call(wires, name="Refuse"))[1].over() == ("FAILED_PRECONDITION", "not now: 100 % bésy")
        assert (await (await call(wires, name="Nothing"))[1].over())[0] == "UNIMPLEMENTED"


async def test_an_engine_is_told_what_is_left_and_ends_a_call_that_nobody_ends_here() -> None:
    async with real() as (engine, wires):
        now_s = asyncio.get_running_loop().time()
        held, late = Heard(), Heard()
        await wires.call(PATH + "Hold", b"asked", held, ends_s=now_s + 600)
        await wires.call(PATH + "Hold", b"asked", late, ends_s=now_s - 1)
        assert (await late.over())[0] == "DEADLINE_EXCEEDED"
        await until(lambda: bool(engine.seen))
        left_s = next(left_s for _, _, left_s in engine.seen if left_s is not None and left_s > 1)
        assert 0 < 600 - left_s < 60
        assert held.end is None
        await call(wires)
        await until(lambda: "Echo" in [name for name, _, _ in engine.seen])
        assert [left_s for name, _, left_s in engine.seen if name == "Echo"] == [None]


async def test_cancelling_ends_the_call_at_the_engine_and_no_other() -> None:
    async with real() as (engine, wires):
        held, _ = await call(wires, name="Hold")
        _, other = await call(wires, name="Hold")
        await until(lambda: len(engine.seen) == 2)
        held.cancel()
        held.cancel()
        await until(lambda: engine.ended == ["Hold"])
        assert other.end is None
        _, echo = await call(wires)
        assert await echo.over() == ("OK", "")


async def test_a_stream_that_is_held_back_stops_its_engine_and_no_other() -> None:
    async with real() as (engine, wires):
        stream, heard = await call(wires, name="Flood")
        stream.hold()
        await until(lambda: sum(map(len, heard.messages)) > WINDOW_BYTES // 2)
        _, echo = await call(wires, b"x" * 500_000)
        assert await echo.over() == ("OK", "")
        stopped = len(heard.messages)
        assert stopped * 65_536 <= WINDOW_BYTES
        stream.release()
        await until(lambda: len(heard.messages) > stopped + 8)
        assert engine.sent > stopped


async def test_an_engine_that_dies_ends_its_calls_and_the_next_one_finds_its_successor() -> None:
    async with real() as (engine, wires):
        _, heard = await call(wires, name="Hold")
        await until(lambda: len(engine.seen) == 1)
        await engine.__aexit__(None, None, None)
        assert (await heard.over())[0] in ("UNAVAILABLE", "CANCELLED")
        await until(lambda: not any(wire.usable for wire in wires._wires))
        with pytest.raises(OSError, match="refused"):
            await call(wires)
        await engine.__aenter__()
        _, again = await call(wires)
        assert await again.over() == ("OK", "")


async def test_closing_ends_every_call_and_takes_no_more() -> None:
    async with real() as (_, wires):
        _, heard = await call(wires, name="Hold")
        wires.close()
        assert heard.end == ("UNAVAILABLE", "the connection was closed here")
        with pytest.raises(OSError, match="closed here"):
            await call(wires)


# --- servers that do what the test says -----------------------------------------------------------------------


async def test_messages_split_anywhere_and_many_in_a_frame_arrive_whole() -> None:
    async def script(peer: Peer) -> None:
        _, _, stream, _ = await peer.frame(http2.DATA)
        peer.answer(stream)
        body = b"".join(http2.message(b"%d" % number * number) for number in range(40))
        for at in range(0, len(body), 37):
            peer.send(http2.DATA, stream, body[at : at + 37])
            await peer.writer.drain()
        peer.send(http2.DATA, stream, b"\3" + http2.message(b"padded") + bytes(3), flags=http2.PADDED)
        peer.finish(stream)

    async with scripted(script) as wires:
        _, heard = await call(wires)
        assert await heard.over() == ("OK", "")
        assert heard.messages == [*(b"%d" % number * number for number in range(40)), b"padded"]


async def test_a_request_waits_for_both_windows_and_goes_on_with_either() -> None:
    async def script(peer: Peer) -> None:
        got = 0
        while got < 65_535:
            got += len((await peer.frame(http2.DATA))[3])
        assert got == 65_535, "not a byte above what was allowed"
        peer.send(http2.WINDOW_UPDATE, 0, (1 << 20).to_bytes(4, "big"))
        peer.writer.write(http2.settings({http2.FIRST_WINDOW: 100_000}))
        flags = 0
        while not flags & http2.END_STREAM:
            _, flags, stream, payload = await peer.frame(http2.DATA)
            got += len(payload)
            if got == 100_000:
                peer.send(http2.WINDOW_UPDATE, stream, (1 << 20).to_bytes(4, "big"))
        peer.answer(stream, b"%d" % got)
        peer.finish(stream)

    async with scripted(script) as wires:
        _, heard = await call(wires, bytes(200_000))
        assert await heard.over() == ("OK", "")
        assert heard.messages == [b"200005"]


async def test_a_connection_that_bounds_its_calls_gets_no_more_and_another_is_made() -> None:
    connections: list[Peer] = []

    async def script(peer: Peer) -> None:
        connections.append(peer)
        peer.writer.write(http2.settings({http2.MOST_STREAMS: 2}))
        while True:
            _, _, stream, _ = await peer.frame(http2.DATA)
            peer.answer(stream, b"%d" % len(connections))

    async with scripted(script) as wires:
        heards = []
        for _ in range(5):
            heards.append((await call(wires))[1])
            await until(lambda: heards[-1].messages != [])
        assert len(connections) == 3


async def test_going_away_ends_what_was_not_taken_and_lets_the_rest_finish() -> None:
    async def script(peer: Peer) -> None:
        _, _, first, _ = await peer.frame(http2.DATA)
        _, _, second, _ = await peer.frame(http2.DATA)
        assert second > first
        peer.send(http2.GOAWAY, 0, first.to_bytes(4, "big") + bytes(4) + b"too_old")
        peer.answer(first, b"still here")
        peer.finish(first)

    async with scripted(script) as wires:
        (_, taken), (_, not_taken) = await call(wires), await call(wires)
        assert await not_taken.over() == ("UNAVAILABLE", "it takes no new call on this connection: too_old")
        assert await taken.over() == ("OK", "")
        assert taken.messages == [b"still here"]


@pytest.mark.parametrize(
    ("code", "status"), [(7, "UNAVAILABLE"), (8, "CANCELLED"), (11, "RESOURCE_EXHAUSTED"), (2, "INTERNAL")]
)
async def test_a_reset_ends_its_call_alone(code: int, status: str) -> None:
    async def script(peer: Peer) -> None:
        _, _, first, _ = await peer.frame(http2.DATA)
        _, _, second, _ = await peer.frame(http2.DATA)
        peer.send(http2.RST_STREAM, first, code.to_bytes(4, "big"))
        peer.answer(second, b"fine")
        peer.finish(second)

    async with scripted(script) as wires:
        (_, reset), (_, other) = await call(wires), await call(wires)
        assert (await reset.over())[0] == status
        assert await other.over() == ("OK", "")


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (b"\xff\xff\xff\0\0\0\0\0\1", "a frame of"),
        (http2.frame(http2.CONTINUATION, 1, b"x"), "did not begin"),
        (http2.frame(http2.HEADERS, 1, b"\x88") + http2.frame(http2.DATA, 1, b"x"), "interrupted"),
        (http2.frame(http2.HEADERS, 1, b"\xff\xff\xff\xff\xff", flags=http2.END_HEADERS), ""),
        (http2.frame(http2.SETTINGS, 0, b"12345"), "SETTINGS of 5 bytes"),
        (http2.frame(http2.RST_STREAM, 1, b"1"), "one number"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "a frame of"),
    ],
)
async def test_bytes_that_are_no_http2_end_the_connection_in_words_and_the_next_call_has_a_new_one(
    broken: bytes, says: str
) -> None:
    turns: list[bytes] = [broken]

    async def script(peer: Peer) -> None:
        _, _, stream, _ = await peer.frame(http2.DATA)
        if turns:
            peer.writer.write(turns.pop())
        else:
            peer.answer(stream, b"fine")
            peer.finish(stream)

    async with scripted(script) as wires:
        _, heard = await call(wires)
        status, words = await heard.over()
        assert status == "INTERNAL"
        assert says in words
        _, again = await call(wires)
        assert await again.over() == ("OK", "")


async def test_a_message_that_cannot_be_taken_ends_its_call_alone() -> None:
    too_large = b"\0" + (MOST_MESSAGE_BYTES + 1).to_bytes(4, "big")

    async def script(peer: Peer) -> None:
        for data in (b"\1\0\0\0\1x", too_large):
            _, _, stream, _ = await peer.frame(http2.DATA)
            peer.answer(stream)
            peer.send(http2.DATA, stream, data)
            await peer.frame(http2.RST_STREAM)
        for _ in range(3):
            _, _, stream, _ = await peer.frame(http2.DATA)
            peer.answer(stream, b"fine")
            peer.finish(stream)

    async with scripted(script) as wires:
        for says in ("compressed", "at most"):
            status, words = await (await call(wires))[1].over()
            assert (status, says in words) == ("INTERNAL", True)
        for defect in (FrameInvalid("gRPC", "not for me"), RuntimeError("a defect"), None):
            heard = Heard(defect=defect)
            await wires.call(PATH, b"", heard)
            assert (await heard.over())[0] == ("OK" if defect is None else "INTERNAL")


async def test_pings_are_answered_and_what_is_unknown_is_passed_over() -> None:
    async def script(peer: Peer) -> None:
        _, _, stream, _ = await peer.frame(http2.DATA)
        peer.send(http2.PING, 0, b"01234567")
        peer.send(0xFA, 0, b"of a later version")
        peer.send(http2.DATA, 4711, b"of a call that is long over")
        _, flags, _, payload = await peer.frame(http2.PING)
        peer.answer(stream, payload, bytes([flags]))
        peer.finish(stream)

    async with scripted(script) as wires:
        _, heard = await call(wires)
        assert await heard.over() == ("OK", "")
        assert heard.messages == [b"01234567", b"\1"]


async def test_an_answer_that_is_no_grpc_s_is_told_by_its_status() -> None:
    async def script(peer: Peer) -> None:
        _, _, stream, _ = await peer.frame(http2.DATA)
        peer.send(http2.HEADERS, stream, b"\x08\x03503", flags=http2.END_HEADERS)

    async with scripted(script) as wires:
        _, heard = await call(wires)
        assert await heard.over() == ("UNAVAILABLE", "it answered HTTP 503, which is no gRPC")


async def test_nobody_there_is_told_with_the_reason() -> None:
    wires = GrpcWires("127.0.0.1", 1)
    with pytest.raises(OSError, match="refused"):
        await call(wires)
