"""All bodies together take no more memory than they may, whoever sends them."""

import asyncio
import json
from dataclasses import dataclass, field

import pytest

from kvherd.core.errors import KvherdError
from kvherd.ports.worker import Responder
from kvherd.services.gateway.relay.edge import DataRequest, Message, RelayLimits
from kvherd.services.gateway.relay.memory import make_room
from kvherd.services.gateway.relay.server import RelayServer

MB = 2**20
LIMITS = RelayLimits(bodies_bytes=8 * MB, tick_s=0.01, linger_s=0.5)
HEAD = b"POST /v1/x HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n"


@dataclass
class Held:
    reading: int
    read: int = 0
    refusals: list[str] = field(default_factory=list)

    @property
    def held_bytes(self) -> tuple[int, int]:
        return self.reading, self.read

    def refuse(self, error: KvherdError) -> None:
        self.refusals.append(str(error))


def test_the_largest_that_are_being_read_make_room_and_no_more_than_must() -> None:
    small, large, middle, read = Held(1 * MB), Held(9 * MB), Held(5 * MB), Held(0, 4 * MB)
    make_room([small, large, middle, read], 12 * MB)
    assert [len(one.refusals) for one in (small, large, middle, read)] == [0, 1, 0, 0]
    assert large.refusals == ["the bodies that are held here take 12 MiB already, the limit; try again later"]


def test_what_was_read_stays_however_much_it_is() -> None:
    read, reading = Held(0, 99 * MB), Held(1)
    make_room([read, reading], 12 * MB)
    assert (read.refusals, len(reading.refusals)) == ([], 1)
    make_room([read, Held(0)], 12 * MB)
    assert read.refusals == []


@pytest.mark.net
@pytest.mark.parametrize("chunked", [False, True])
async def test_bodies_beyond_the_bound_are_refused_with_503_and_who_comes_then_is_served(*, chunked: bool) -> None:
    async def answer(request: DataRequest, responder: Responder) -> None:
        responder.start(200, [(b"content-length", b"2")])
        responder.write(b"ok")
        responder.end()

    async def no_app(_: Message, *__: object) -> None:
        raise AssertionError("nobody asks for it")

    begin = (
        b"POST /v1/x HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n900000\r\n"
        if chunked
        else HEAD % (9 * MB)
    )
    async with RelayServer(answer, no_app, limits=LIMITS) as relay, asyncio.timeout(30):
        slow = [await asyncio.open_connection("127.0.0.1", relay.port) for _ in range(4)]
        for _, writer in slow:
            writer.write(begin + bytes(3 * MB))  # and no end
        head = await _first([reader for reader, _ in slow])
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 5\r\n" in head.lower()
        assert json.loads(head.partition(b"\r\n\r\n")[2])["error"]["code"] == "bodies_full"
        reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
        writer.write(HEAD % 2 + b"hi")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        for each in (writer, *(one for _, one in slow)):
            each.transport.abort()


async def _first(readers: list[asyncio.StreamReader]) -> bytes:
    """The first answer that any of them gives."""
    tasks = [asyncio.ensure_future(reader.read()) for reader in readers]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for task in tasks:
            task.cancel()
