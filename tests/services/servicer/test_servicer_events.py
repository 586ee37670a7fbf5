"""SubscribeKvEvents: accepted at once, refused before any header, and ended for a reason."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated.sglang_scheduler_pb2_grpc import SglangSchedulerStub

from kvherd.core.ids import EngineHash, Epoch, Rank
from kvherd.core.kv.events import BlocksStored, CacheCleared, KvEventBatch, SnapshotChunk
from kvherd.core.kv.stream import (
    EpochEnded,
    EventsUnsupported,
    ResumeOutOfRange,
    StreamUntranslatable,
    SubscriberTooSlow,
)
from kvherd.testing.patience import until

pytestmark = pytest.mark.net

Opened = Callable[..., AbstractAsyncContextManager[Any]]
FROM_ZERO = common_pb2.SubscribeKvEventsRequest()
HEADERS_FRAME = 1


def _stored(sequence: int) -> KvEventBatch:
    event = BlocksStored((EngineHash(2**64 - 1),), None, (1, 2, 3, 4), 4)
    return KvEventBatch(sequence, 12.5, Rank(1), (event,))


async def test_an_accepted_subscription_gets_its_headers_at_once_with_the_epoch(doors: Opened) -> None:
    async with doors() as at:
        call = at.stub.SubscribeKvEvents(FROM_ZERO)
        async with asyncio.timeout(10):
            metadata = dict(await call.initial_metadata())
        assert metadata["kvherd-epoch"] == at.events.epoch
        assert at.events.asked == [(0, {}, None)]
        call.cancel()


async def test_batches_and_snapshots_come_as_they_are_published(doors: Opened) -> None:
    async with doors() as at:
        call = at.stub.SubscribeKvEvents(FROM_ZERO)
        await at.events.items.put(SnapshotChunk(0, 1, 3, KvEventBatch(41, 1.0, Rank(1), (CacheCleared(),))))
        await at.events.items.put(_stored(42))
        chunk, batch = await call.read(), await call.read()
        call.cancel()
    assert (chunk.sequence_number, chunk.snapshot.count, chunk.snapshot.unknown_before) == (41, 1, 3)
    assert (batch.sequence_number, batch.dp_rank) == (42, 1)
    assert batch.events[0].stored.blocks[0].block_hash == -1
    assert list(batch.events[0].stored.blocks[0].token_ids) == [1, 2, 3, 4]


async def test_cursors_and_the_epoch_they_belong_to_are_passed_on(doors: Opened) -> None:
    metadata = (("kvherd-epoch", "a" * 32), ("kvherd-cursors", "0=7,1=9"))
    async with doors() as at:
        call = at.stub.SubscribeKvEvents(
            common_pb2.SubscribeKvEventsRequest(start_sequence_number=7), metadata=metadata
        )
        await call.initial_metadata()
        assert at.events.asked == [(7, {Rank(0): 7, Rank(1): 9}, Epoch("a" * 32))]
        call.cancel()


async def test_a_resume_that_cannot_be_honoured_is_refused_with_the_present_epoch(doors: Opened) -> None:
    async with doors() as at:
        at.events.refusal = ResumeOutOfRange("batch 5 is too old")
        call = at.stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(start_sequence_number=5))
        assert await call.code() is grpc.StatusCode.OUT_OF_RANGE
        assert "batch 5 is too old" in await call.details()
        assert dict(await call.trailing_metadata())["kvherd-epoch"] == at.events.epoch
        assert "kvherd-epoch" not in dict(await call.initial_metadata())


async def test_a_refusal_is_one_header_block_and_an_acceptance_has_one_before_the_end(doors: Opened) -> None:
    async with (
        doors() as at,
        _counting_proxy(at.config.port) as (port, frames),
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        stub = SglangSchedulerStub(channel)
        accepted = stub.SubscribeKvEvents(FROM_ZERO)
        await accepted.initial_metadata()
        await at.events.items.put(EpochEnded("restarted"))
        assert await accepted.code() is grpc.StatusCode.DATA_LOSS
        stream_ids = sorted(frames)
        assert [frames[stream] for stream in stream_ids] == [2]  # headers, then trailers
        at.events.refusal = ResumeOutOfRange("too old")
        refused = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(start_sequence_number=5))
        assert await refused.code() is grpc.StatusCode.OUT_OF_RANGE
        assert [frames[stream] for stream in sorted(frames)] == [2, 1]  # trailers only


@asynccontextmanager
async def _counting_proxy(target: int) -> AsyncIterator[tuple[int, dict[int, int]]]:
    """Pass bytes on, and count the HEADERS frames that the server sends on each HTTP/2 stream."""
    frames: dict[int, int] = {}

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            writer.write(data)
        writer.close()

    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readexactly(9)
                if head[3] == HEADERS_FRAME:
                    stream = int.from_bytes(head[5:9], "big")
                    frames[stream] = frames.get(stream, 0) + 1
                writer.write(head + await reader.readexactly(int.from_bytes(head[:3], "big")))
        except asyncio.IncompleteReadError:
            writer.close()

    open_connections: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.current_task()
        assert connection is not None
        open_connections.add(connection)
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", target)
        try:
            await asyncio.gather(copy(reader, up_writer), count(up_reader, writer), return_exceptions=True)
        finally:
            for each in (writer, up_writer):
                each.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1], frames
        for connection in open_connections:
            connection.cancel()
        await asyncio.wait(open_connections)


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (EpochEnded("the publisher restarted"), "DATA_LOSS"),
        (SubscriberTooSlow("100 blocks wait"), "RESOURCE_EXHAUSTED"),
        (StreamUntranslatable("sparse blocks"), "FAILED_PRECONDITION"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_stream_that_is_lost_ends_with_the_status_of_its_reason(
    doors: Opened, end: Exception, code: str
) -> None:
    async with doors() as at:
        call = at.stub.SubscribeKvEvents(FROM_ZERO)
        await at.events.items.put(_stored(1))
        await at.events.items.put(end)
        assert (await call.read()).sequence_number == 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode[code]
        assert caught.value.details() == str(end)


async def test_an_engine_without_events_says_so(doors: Opened) -> None:
    async with doors() as at:
        at.events.refusal = EventsUnsupported()
        call = at.stub.SubscribeKvEvents(FROM_ZERO)
        assert await call.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_cursors_that_are_none_are_refused(doors: Opened) -> None:
    async with doors() as at:
        call = at.stub.SubscribeKvEvents(FROM_ZERO, metadata=(("kvherd-cursors", "one"),))
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert at.events.asked == []


async def test_a_stopping_engine_ends_event_streams_as_unavailable(doors: Opened) -> None:
    async with asyncio.timeout(10):
        async with doors() as at:
            call = at.stub.SubscribeKvEvents(FROM_ZERO)
            await call.initial_metadata()
            ending = asyncio.ensure_future(call.code())
            await asyncio.sleep(0)
            await at.servicer.__aexit__(None, None, None)
            assert await ending is grpc.StatusCode.UNAVAILABLE
            assert await call.details() == "the engine is stopping"


async def test_a_subscriber_that_leaves_is_forgotten(doors: Opened) -> None:
    async with doors() as at:
        call = at.stub.SubscribeKvEvents(FROM_ZERO)
        await call.initial_metadata()
        streams = at.servicer._grpc.event_streams
        assert len(streams) == 1
        call.cancel()
        await until(lambda: len(streams) == 0)
