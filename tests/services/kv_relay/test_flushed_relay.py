"""A flush that went through a bridge, as every subscriber sees it, whenever the engine publishes its own clear."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from kvherd.adapters.zmq_kv_feed import ZmqFrameFeed
from kvherd.core.ids import EngineHash, Rank
from kvherd.core.kv.events import BlocksStored, CacheCleared, KvEvent, SnapshotChunk
from kvherd.core.kv.live_state import LiveState
from kvherd.core.kv.stream import EpochEnded
from kvherd.services.kv_relay.relay import KvRelay, RelayOptions
from kvherd.testing.patience import until
from kvherd.testing.publisher import FakePublisher
from kvherd.wire.vllm_kv import encode_batch

pytestmark = pytest.mark.net
FAST = RelayOptions(probe_s=0.05, replay_silence_s=0.3)
ZERO, ONE = Rank(0), Rank(1)


def block(number: int) -> BlocksStored:
    return BlocksStored((EngineHash(number),), None, (number, 1), 2)


@dataclass
class Reader:
    relay: KvRelay
    state: dict[Rank, LiveState] = field(default_factory=lambda: {ZERO: LiveState(), ONE: LiveState()})
    lost: Exception | None = None

    async def read(self) -> None:
        try:
            async for item in self.relay.subscribe():
                batch = item.batch if isinstance(item, SnapshotChunk) else item
                self.state[batch.rank].apply(batch.events)
        except EpochEnded as error:
            self.lost = error

    def held(self, rank: Rank = ZERO) -> list[int]:
        pieces = self.state[rank].retell(10_000)
        return sorted(int(one) for piece in pieces for event in piece for one in event.block_hashes)


@asynccontextmanager
async def followed(*publishers: FakePublisher) -> AsyncIterator[tuple[KvRelay, Reader]]:
    feeds = {one.rank: ZmqFrameFeed(one.events_endpoint, one.replay_endpoint) for one in publishers}
    async with KvRelay(feeds, options=FAST) as relay, asyncio.TaskGroup() as group:
        reader = Reader(relay)
        reading = group.create_task(reader.read())
        yield relay, reader
        reading.cancel()


def now() -> float:
    return asyncio.get_running_loop().time()


async def publish(publisher: FakePublisher, stamp_s: float, *events: KvEvent) -> None:
    await publisher.publish(payload=encode_batch(stamp_s, events, publisher.rank))


async def test_subscribers_know_at_once_although_the_engine_says_it_with_its_next_step_only() -> None:
    """As vLLM does:

    1. blocks 1 and 2 are held, and the engine obeys a flush;
    2. a batch that it published before the flush arrives: block 3 was wiped out with the others;
    3. its next step publishes the clear, and after it, in one batch, what that step stored.
    """
    async with FakePublisher() as engine, followed(engine) as (relay, reader):
        await engine.publish(block(1), block(2))
        await until(lambda: reader.held() == [1, 2])
        ordered_s, before_s = now(), time.time()
        relay.flushed(ordered_s)
        await until(lambda: reader.held() == [])
        await publish(engine, before_s, block(3))
        await engine.publish(CacheCleared(), block(4))
        await until(lambda: reader.held() == [4])
        assert relay.blocks(ZERO) == 1
        assert reader.lost is None
        late = Reader(relay)
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(late.read())
            await until(lambda: late.held() == [4])
            reading.cancel()


async def test_an_engine_that_says_it_at_once_and_before_its_answer_keeps_what_it_stored_since() -> None:
    """As kvherd's engine does when its events are faster than its answer."""
    async with FakePublisher() as engine, followed(engine) as (relay, reader):
        await engine.publish(block(1))
        await until(lambda: reader.held() == [1])
        ordered_s = now()
        await engine.publish(CacheCleared())
        await engine.publish(block(2))
        await until(lambda: reader.held() == [2])
        relay.flushed(ordered_s)
        await engine.publish(block(3))
        await until(lambda: reader.held() == [2, 3])
        assert reader.lost is None


async def test_an_engine_whose_clear_comes_after_its_answer_by_itself_keeps_what_it_stores_then() -> None:
    """As SGLang and kvherd's engine do when the answer is faster."""
    async with FakePublisher() as engine, followed(engine) as (relay, reader):
        await engine.publish(block(1))
        await until(lambda: reader.held() == [1])
        relay.flushed(now())
        await engine.publish(CacheCleared())
        await engine.publish(block(2))
        await until(lambda: reader.held() == [2])
        assert reader.lost is None


async def test_an_engine_that_never_says_it_is_believed_again_once_its_clock_is_past_the_answer() -> None:
    async with FakePublisher() as engine, followed(engine) as (relay, reader):
        await engine.publish(block(1))
        await until(lambda: reader.held() == [1])
        relay.flushed(now())
        await publish(engine, time.time() + 3, block(2))
        await until(lambda: reader.held() == [2])
        assert reader.lost is None


async def test_events_that_may_have_been_after_the_flush_and_were_dropped_start_everybody_over() -> None:
    async with FakePublisher() as engine, followed(engine) as (relay, reader):
        await engine.publish(block(1))
        await until(lambda: reader.held() == [1])
        epoch = relay.epoch
        relay.flushed(now())
        await publish(engine, time.time() + 1, block(2))
        await publish(engine, time.time() + 3, block(3))
        await until(lambda: reader.lost is not None)
        assert "events around a flush were dropped" in str(reader.lost)
        assert relay.epoch != epoch
        first = await anext(aiter(relay.subscribe()))
        assert isinstance(first, SnapshotChunk)
        assert first.unknown_before > 0


async def test_a_flush_that_nobody_will_hear_of_leaves_what_was_held_unknown() -> None:
    async with FakePublisher() as engine, followed(engine) as (relay, reader):
        await engine.publish(block(1))
        await until(lambda: reader.held() == [1])
        relay.doubted()
        await until(lambda: reader.lost is not None)
        assert "a flush was not answered" in str(reader.lost)
        first = await anext(aiter(relay.subscribe()))
        assert isinstance(first, SnapshotChunk)
        assert (first.unknown_before > 0, relay.blocks(ZERO)) == (True, 0)
        await engine.publish(CacheCleared(), block(2))
        await until(lambda: relay.blocks(ZERO) == 1)


async def test_every_rank_is_told_and_passes_by_itself() -> None:
    async with FakePublisher() as zero, FakePublisher(rank=ONE) as one, followed(zero, one) as (relay, reader):
        await zero.publish(block(1))
        await one.publish(block(2))
        await until(lambda: (reader.held(ZERO), reader.held(ONE)) == ([1], [2]))
        relay.flushed(now())
        await until(lambda: (reader.held(ZERO), reader.held(ONE)) == ([], []))
        await one.publish(CacheCleared(), block(3))
        await until(lambda: (reader.held(ZERO), reader.held(ONE)) == ([], [3]))
