"""Reads that are gathered, on virtual time: what waits, how long, and what never does."""

import asyncio
from dataclasses import dataclass, field
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvherd.adapters.gathered_reads import GatheredReads, Gathering
from kvherd.adapters.grpc_stream import WireStream
from kvherd.adapters.grpc_wire import GrpcWire
from kvherd.testing.virtual_time import virtual_time
from kvherd.wire import http2

MS = 0.001
OK_HEADERS = b"\x88"  # :status 200, from the static table
TRAILERS_OK = b"\0\x0bgrpc-status\x010"
NEVER_MS = 10**6


class Line(asyncio.Transport):
    """A connection without a network: what arrives while nobody reads is given in one when somebody does again."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self.reads = 0
        self._protocol = protocol
        self._waiting = b""
        self._paused = self._closing = False

    def arrive(self, data: bytes) -> None:
        self._waiting += data
        self._give()

    def break_off(self) -> None:
        self._closing = True
        self._protocol.connection_lost(ConnectionResetError("reset"))

    def pause_reading(self) -> None:
        assert not self._closing, "a transport that closes refuses that"
        assert not self._paused
        self._paused = True

    def resume_reading(self) -> None:
        assert not self._closing, "a transport that closes refuses that"
        assert self._paused
        self._paused = False
        asyncio.get_running_loop().call_soon(self._give)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        return

    def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        self._closing = True
        asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)

    def is_closing(self) -> bool:
        return self._closing

    def _give(self) -> None:
        if self._waiting and not self._paused and not self._closing:
            data, self._waiting = self._waiting, b""
            self.reads += 1
            self._protocol.data_received(data)


@dataclass
class Heard:
    """What one call was told, and when."""

    messages: list[tuple[float, bytes]] = field(default_factory=list)
    end: tuple[float, str] | None = None

    def message(self, data: bytes) -> None:
        assert self.end is None, "nothing follows the end"
        self.messages.append((now_ms(), data))

    def ended(self, status: str, words: str) -> None:
        assert self.end is None, "a stream ends once"
        self.end = now_ms(), status


class Calls:
    """Calls under way on one connection, whose answers have begun."""

    def __init__(self, count: int, gathering: Gathering = Gathering()) -> None:  # noqa: B008 - it is a value
        self.wire = GrpcWire("engine:1", scheme="http", gathering=gathering)
        self.line = Line(cast("asyncio.Protocol", self.wire))
        self.wire.connection_made(self.line)
        self.heard = [Heard() for _ in range(count)]
        self.streams: list[WireStream] = [self.wire.call("/any", b"", heard) for heard in self.heard]

    def say(self, call: int, data: bytes) -> None:
        self.line.arrive(http2.frame(http2.DATA, self.streams[call].number, http2.message(data)))

    def finish(self, call: int) -> None:
        flags = http2.END_HEADERS | http2.END_STREAM
        self.line.arrive(http2.frame(http2.HEADERS, self.streams[call].number, OK_HEADERS + TRAILERS_OK, flags=flags))


def now_ms() -> float:
    return round(asyncio.get_running_loop().time() * 1000, 6)


async def until_ms(at: float) -> None:
    await asyncio.sleep(max(0.0, at / 1000 - asyncio.get_running_loop().time()))


@pytest.mark.parametrize("count", [1, 7])
async def test_few_streams_are_read_at_once_always(count: int) -> None:
    calls = Calls(count)
    for tick in range(40):
        await until_ms(tick / 10)
        calls.say(tick % count, b"token")
        assert calls.heard[tick % count].messages[-1] == (tick / 10, b"token")
    assert calls.line.reads == 40


async def test_what_many_streams_say_within_a_millisecond_is_read_in_one() -> None:
    calls = Calls(64)
    for call in range(64):
        await until_ms(100 + call / 64)
        calls.say(call, b"token")
    await until_ms(200)
    times = [at for heard in calls.heard for at, _ in heard.messages]
    assert times[0] == 100, "the first of a step does not wait"
    assert set(times[1:]) == {101}
    assert calls.line.reads == 2


async def test_after_a_longer_silence_nothing_waits() -> None:
    calls = Calls(8)
    for step in range(5):
        await until_ms(25 * step)
        calls.say(3, b"token")
    assert [at for at, _ in calls.heard[3].messages] == [0, 25, 50, 75, 100]


@given(arrivals=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 15)), min_size=1, max_size=80))
def test_no_message_waits_longer_than_the_rest_and_their_order_is_kept(arrivals: list[tuple[int, int]]) -> None:
    async def main() -> None:
        calls = Calls(16)
        said: list[tuple[float, int, bytes]] = []
        for place, (tenth_ms, call) in enumerate(sorted(arrivals)):
            await until_ms(tenth_ms / 10)
            said.append((tenth_ms / 10, call, b"%d" % place))
            calls.say(call, b"%d" % place)
        await until_ms(NEVER_MS)
        for call, heard in enumerate(calls.heard):
            mine = [(at, data) for at, which, data in said if which == call]
            assert [data for _, data in heard.messages] == [data for _, data in mine]
            for (heard_ms, _), (said_ms, _) in zip(heard.messages, mine, strict=True):
                assert said_ms <= heard_ms <= said_ms + 1 + 1e-6

    virtual_time(main())


async def test_the_end_of_a_stream_waits_no_longer_than_a_message_and_follows_its_messages() -> None:
    calls = Calls(8)
    calls.say(0, b"one")
    await until_ms(0.25)
    calls.say(1, b"last")
    calls.finish(1)
    await until_ms(NEVER_MS)
    assert calls.heard[1].messages == [(1, b"last")]
    assert calls.heard[1].end == (1, "OK")


async def test_a_connection_that_is_lost_in_a_rest_ends_its_calls_at_once_and_is_not_read_again() -> None:
    calls = Calls(8)
    calls.say(0, b"one")
    await until_ms(0.5)
    calls.line.break_off()
    assert {heard.end for heard in calls.heard} == {(0.5, "UNAVAILABLE")}
    await until_ms(NEVER_MS)


async def test_closing_in_a_rest_ends_every_call_at_once() -> None:
    calls = Calls(8)
    calls.say(0, b"one")
    calls.wire.close()
    assert {heard.end for heard in calls.heard} == {(0, "UNAVAILABLE")}
    await until_ms(NEVER_MS)


async def test_what_cannot_be_understood_ends_the_connection_and_nothing_rests() -> None:
    calls = Calls(8)
    calls.line.arrive(b"\xff\xff\xff" + bytes(20))
    assert {heard.end for heard in calls.heard} == {(0, "INTERNAL")}
    await until_ms(NEVER_MS)


async def test_calls_that_end_in_a_rest_leave_the_others_read_as_they_come() -> None:
    calls = Calls(8)
    calls.say(0, b"one")
    for stream in calls.streams[1:]:
        stream.cancel()
    await until_ms(0.5)
    calls.say(0, b"two")
    await until_ms(1.5)
    calls.say(0, b"three")
    await until_ms(1.6)
    calls.say(0, b"four")
    assert calls.heard[0].messages == [(0, b"one"), (1, b"two"), (1.5, b"three"), (1.6, b"four")]


async def test_how_long_and_from_how_many_streams_is_the_caller_s_to_say() -> None:
    calls = Calls(2, Gathering(from_streams=2, rest_s=5 * MS))
    calls.say(0, b"one")
    await until_ms(1)
    calls.say(1, b"two")
    await until_ms(NEVER_MS)
    assert calls.heard[1].messages == [(5, b"two")]


async def test_reads_that_were_stopped_do_not_go_on() -> None:
    line = Line(asyncio.Protocol())
    reads = GatheredReads(line, Gathering())
    reads.stop()
    reads.after(8)
    reads.after(8)
    reads.stop()
    await until_ms(NEVER_MS)
    assert line._paused
