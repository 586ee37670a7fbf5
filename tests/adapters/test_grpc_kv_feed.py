"""KV events over our own HTTP/2, from servers of the field's own gRPC: held back, refused late, full of nonsense."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager

import grpc
import grpc.aio
import pytest
from smg_grpc_proto.generated import common_pb2 as pb

from kvherd.adapters.grpc_kv_feed import METHODS, GrpcKvFeed
from kvherd.core.kv.events import KvEventBatch
from kvherd.core.kv.stream import EventsUnsupported, ResumeOutOfRange, StreamBroken
from kvherd.ports.kv_feed import Subscribed
from kvherd.services.kv_relay.grpc_edge import Context

pytestmark = pytest.mark.net
LARGE = pb.KvEventBatch(events=[pb.KvCacheEvent(removed=pb.KvBlocksRemoved(block_hashes=range(2**62, 2**62 + 50_000)))])
MANY = 200


@asynccontextmanager
async def served(answer: Callable[[Context], Awaitable[None]]) -> AsyncIterator[GrpcKvFeed]:
    """A server that knows the call by its second name only."""

    async def subscribe(_: bytes, context: Context) -> None:
        await answer(context)

    _, service, call = METHODS[1].split("/")
    server = grpc.aio.server()
    handlers = {call: grpc.unary_stream_rpc_method_handler(subscribe)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield GrpcKvFeed(f"127.0.0.1:{port}")
    finally:
        await server.stop(0)


async def test_a_reader_that_does_not_read_holds_the_server_back_and_then_gets_everything_in_order() -> None:
    sent = 0

    async def flood(context: Context) -> None:
        nonlocal sent
        for number in range(1, MANY + 1):
            LARGE.sequence_number = number
            await context.write(LARGE.SerializeToString())
            sent = number
        await asyncio.Event().wait()

    async with served(flood) as feed, aclosing(feed.subscribe({}, None)) as items:
        assert await anext(items) == Subscribed(None)
        seen = -1
        while seen != sent or not sent:  # until a write hangs
            seen = sent
            await asyncio.sleep(1.0)
        assert sent < MANY, "all of it waits here, and nothing bounds that"
        numbers: list[int] = []
        while len(numbers) < MANY:
            item = await anext(items)
            assert isinstance(item, KvEventBatch)
            numbers.append(item.sequence)
        assert numbers == list(range(1, MANY + 1))


async def test_a_refusal_just_after_headers_that_tell_nothing_is_a_refusal() -> None:
    async def refuse(context: Context) -> None:
        await context.send_initial_metadata(())
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no events here")

    async with served(refuse) as feed:
        with pytest.raises(EventsUnsupported):
            await anext(feed.subscribe({}, None))


async def test_a_server_that_takes_the_call_and_says_nothing_is_given_up_and_told_so() -> None:
    left = asyncio.Event()

    async def say_nothing(_: Context) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            left.set()

    async with served(say_nothing) as feed:
        feed._accept_s = 0.5
        with pytest.raises(StreamBroken, match=r"it took the call and said nothing for 0\.5 s"):
            await anext(feed.subscribe({}, None))
        async with asyncio.timeout(10):
            await left.wait()


async def test_a_refusal_without_headers_tells_the_present_epoch() -> None:
    async def refuse(context: Context) -> None:
        context.set_trailing_metadata((("kvherd-epoch", "e" * 32),))
        await context.abort(grpc.StatusCode.OUT_OF_RANGE, "too old")

    async with served(refuse) as feed:
        with pytest.raises(ResumeOutOfRange) as refused:
            await anext(feed.subscribe({}, None))
    assert (refused.value.epoch, refused.value.reason) == ("e" * 32, "too old")


async def test_bytes_that_are_no_message_break_the_stream() -> None:
    async def babble(context: Context) -> None:
        await context.write(b"\xff\xff no protobuf")

    async with served(babble) as feed, aclosing(feed.subscribe({}, None)) as items:
        assert await anext(items) == Subscribed(None)
        with pytest.raises(StreamBroken, match="a message that is none"):
            await anext(items)


async def test_nobody_there_is_a_broken_stream() -> None:
    with pytest.raises(StreamBroken, match="UNAVAILABLE"):
        await anext(GrpcKvFeed("127.0.0.1:1").subscribe({}, None))
