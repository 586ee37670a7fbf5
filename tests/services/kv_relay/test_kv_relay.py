"""The relay between a real publisher's sockets and subscribers."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import zmq

from kvherd.adapters.zmq_kv_feed import ZmqFrameFeed
from kvherd.core.ids import EngineHash, Epoch, Rank, WorkerId
from kvherd.core.kv.events import BlocksRemoved, BlocksStored, CacheCleared, KvEventBatch, SnapshotChunk
from kvherd.core.kv.hashing import PrefixHasher
from kvherd.core.kv.index import Holder, PrefixIndex
from kvherd.core.kv.stream import EpochEnded, ResumeOutOfRange, StreamBroken, StreamUntranslatable, SubscriberTooSlow
from kvherd.services.kv_relay.relay import KvRelay, RelayOptions
from kvherd.testing.publisher import FakePublisher, without

pytestmark = pytest.mark.net
RANK = Rank(0)
FAST = RelayOptions(probe_s=0.05, replay_silence_s=0.3)


def block(number: int, parent: int | None = None) -> BlocksStored:
    return BlocksStored((EngineHash(number),), None if parent is None else EngineHash(parent), (number, 1), 2)


def gone(number: int) -> BlocksRemoved:
    return BlocksRemoved((EngineHash(number),))


async def until(condition: Callable[[], bool], what: str, within_s: float = 5.0) -> None:
    try:
        async with asyncio.timeout(within_s):
            while not condition():  # noqa: ASYNC110 (what is waited for has no event)
                await asyncio.sleep(0.005)
    except TimeoutError:
        pytest.fail(f"not within {within_s:g} s: {what}")


def relay_of(*publishers: FakePublisher, options: RelayOptions = FAST, replay: bool = True) -> KvRelay:
    return KvRelay(
        {one.rank: ZmqFrameFeed(one.events_endpoint, one.replay_endpoint if replay else None) for one in publishers},
        options=options,
    )


class Reader:
    """A subscriber that applies what it gets to an index, as the gateway does."""

    def __init__(self, relay: KvRelay, *, cursors: dict[Rank, int] | None = None, epoch: Epoch | None = None) -> None:
        self.index = PrefixIndex(PrefixHasher(b"k"))
        self.index.enrol(WorkerId("w"), model="m")
        self.subscription = relay.subscribe(cursors=cursors, epoch=epoch)
        self.items: list[KvEventBatch | SnapshotChunk] = []
        self.cursors: dict[Rank, int] = {}

    async def read(self) -> None:
        async for item in self.subscription:
            self.items.append(item)
            batch = item.batch if isinstance(item, SnapshotChunk) else item
            self.cursors[batch.rank] = batch.sequence
            self.index.apply(Holder(WorkerId("w"), batch.rank), batch)

    def holds(self, *numbers: int, rank: Rank = RANK) -> bool:
        return set(self.index.contents(Holder(WorkerId("w"), rank))) == set(numbers)


@asynccontextmanager
async def reading(reader: Reader) -> AsyncIterator[asyncio.Task[None]]:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(reader.read())
        yield task
        task.cancel()


async def known(relay: KvRelay, blocks: int, rank: Rank = RANK) -> None:
    await until(lambda: relay.blocks(rank) == blocks, f"the relay knows {blocks} blocks")


async def ends(stream: Awaitable[object], error: type[Exception]) -> None:
    async with asyncio.timeout(5):
        with pytest.raises(error):
            await stream


async def test_what_was_published_before_and_after_arrives_once_and_in_order() -> None:
    async with FakePublisher() as publisher:
        await publisher.publish(block(1))
        async with relay_of(publisher) as relay:
            await known(relay, 1)
            reader = Reader(relay)
            async with reading(reader):
                await publisher.publish(block(2, 1))
                await publisher.publish(block(3, 2), gone(1))
                await until(lambda: reader.holds(2, 3), "the reader holds 2 and 3")
            numbers = [one.batch.sequence if isinstance(one, SnapshotChunk) else one.sequence for one in reader.items]
            assert numbers == list(range(numbers[0], numbers[0] + 3))
            assert numbers[0] % 2**32 == 1


async def test_a_gap_is_filled_by_replay() -> None:
    async with FakePublisher() as publisher, relay_of(publisher) as relay:
        await publisher.publish(block(1))
        await known(relay, 1)
        epoch = relay.epoch
        await publisher.publish(block(2), lost=True)
        await publisher.publish(gone(1), lost=True)
        await publisher.publish(block(3))
        await known(relay, 2)
        assert relay.epoch == epoch


async def test_a_lost_last_batch_is_found_without_a_later_one() -> None:
    async with FakePublisher() as publisher, relay_of(publisher) as relay:
        await publisher.publish(block(1))
        await known(relay, 1)
        await publisher.publish(block(2), lost=True)
        await known(relay, 2)


async def test_a_replay_that_loses_the_middle_is_asked_again() -> None:
    async with FakePublisher() as publisher, relay_of(publisher) as relay:
        await publisher.publish(block(1))
        await known(relay, 1)
        epoch, whole = relay.epoch, publisher.answers
        for number in range(2, 9):
            await publisher.publish(block(number), lost=True)

        def loses_once(frames: list[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
            publisher.answers = whole
            return without(4)(frames)

        publisher.answers = loses_once
        await publisher.publish(block(9))
        await known(relay, 9)
        assert relay.epoch == epoch


async def test_a_replay_without_its_end_still_fills_the_gap() -> None:
    async with FakePublisher() as publisher, relay_of(publisher) as relay:
        await publisher.publish(block(1))
        await known(relay, 1)
        publisher.ends = False
        await publisher.publish(block(2), lost=True)
        await publisher.publish(block(3))
        await known(relay, 3)


async def test_a_gap_that_cannot_be_filled_ends_the_epoch_and_leaves_only_what_came_since() -> None:
    async with FakePublisher() as publisher, relay_of(publisher) as relay:
        await publisher.publish(block(1))
        await known(relay, 1)
        stream = asyncio.ensure_future(Reader(relay).read())
        publisher.answers = without(1)
        await publisher.publish(block(2), lost=True)
        await publisher.publish(block(3))
        await ends(stream, EpochEnded)
        await known(relay, 1)
        again = Reader(relay)
        async with reading(again):
            await until(lambda: again.holds(3), "only what was stored after the gap")
            first = again.items[0]
            assert isinstance(first, SnapshotChunk)
            assert first.unknown_before == 2


@pytest.mark.parametrize("first_number", [0, 2, 3, 4, 50])
async def test_a_restarted_publisher_begins_a_new_epoch_with_its_own_blocks_only(first_number: int) -> None:
    """1. Three batches of one life are known. 2. The publisher is gone and another comes to the same endpoints, whose
    numbers are below, equal to, next to or beyond the old ones when the relay sees it again."""
    publisher = FakePublisher()
    async with publisher, relay_of(publisher) as relay:
        for number in (1, 2, 3):
            await publisher.publish(block(number))
        await known(relay, 3)
        epoch = relay.epoch
        reader = Reader(relay)
        stream = asyncio.ensure_future(reader.read())
        await publisher.__aexit__(None, None, None)
        await publisher.__aenter__()
        for _ in range(first_number):
            await publisher.publish(lost=True)
        await publisher.publish(block(7))
        await ends(stream, EpochEnded)
        await known(relay, 1)
        assert relay.epoch != epoch
        again = Reader(relay)
        async with reading(again):
            await until(lambda: again.holds(7), "7")


async def test_a_publisher_that_keeps_one_batch_for_replays_is_one_life_as_long_as_none_is_lost() -> None:
    calm = RelayOptions(probe_s=1.0, replay_silence_s=2.0)
    async with FakePublisher() as publisher, relay_of(publisher, options=calm) as relay:

        async def publish(number: int) -> None:
            await publisher.publish(block(number))
            await until(lambda: relay.ranks[0].engine_sequence == number - 1, f"batch {number}")

        publisher.kept = 1
        for number in (1, 2, 3):
            await publish(number)
        epoch, blocks = relay.epoch, relay.blocks(RANK)
        for number in range(4, 24):
            await publish(number)
        assert relay.epoch == epoch
        assert relay.blocks(RANK) == blocks + 20


async def test_a_reconnection_to_the_same_publisher_is_no_new_epoch() -> None:
    async with FakePublisher() as publisher, relay_of(publisher) as relay:
        await publisher.publish(block(1))
        await known(relay, 1)
        epoch = relay.epoch
        await publisher.hang_up()
        await publisher.publish(block(2), lost=True)
        await known(relay, 2)
        assert relay.epoch == epoch


async def test_nobody_new_is_told_what_may_be_a_dead_engine_s() -> None:
    slow_to_take_back = RelayOptions(probe_s=0.05, replay_silence_s=0.3, doubt_s=60)
    async with FakePublisher() as publisher, relay_of(publisher, options=slow_to_take_back) as relay:
        await publisher.publish(block(1))
        await known(relay, 1)
        told, epoch = aiter(relay.subscribe()), relay.epoch
        assert isinstance(await anext(told), SnapshotChunk)
        await publisher.__aexit__(None, None, None)
        await until(lambda: not relay._proved(), "the relay has noticed")
        late = asyncio.ensure_future(anext(aiter(relay.subscribe())))
        assert relay.epoch == epoch, "who was told before keeps it for a while"
        await publisher.__aenter__()
        await ends(late, EpochEnded)
        await ends(anext(told), EpochEnded)
        assert isinstance(await anext(aiter(relay.subscribe())), SnapshotChunk)
        assert relay.blocks(RANK) == 0


async def test_an_engine_without_replay_starts_over_at_a_gap() -> None:
    async with FakePublisher() as publisher, relay_of(publisher, replay=False) as relay:
        reached = False
        number = 0
        while not reached:  # a publisher drops what it sends before its first subscriber is known
            number += 1
            await publisher.publish(block(number))
            await asyncio.sleep(0.01)
            reached = relay.blocks(RANK) > 0
        epoch = relay.epoch
        await publisher.publish(block(100), lost=True)
        await publisher.publish(block(101))
        await until(lambda: relay.epoch != epoch and relay.blocks(RANK) == 1, "a new epoch with 101 alone")


async def test_a_resume_gets_what_it_missed_and_no_more() -> None:
    async with FakePublisher() as publisher, relay_of(publisher) as relay:
        await publisher.publish(block(1))
        await known(relay, 1)
        first = Reader(relay)
        async with reading(first):
            await until(lambda: first.holds(1), "1")
        await publisher.publish(block(2))
        await known(relay, 2)
        second = Reader(relay, cursors=first.cursors, epoch=relay.epoch)
        async with reading(second):
            await until(lambda: second.holds(2), "2 alone")
            assert len(second.items) == 1


async def test_resumes_that_cannot_be_honoured_are_refused_before_they_begin() -> None:
    small = RelayOptions(probe_s=0.05, replay_silence_s=0.3, history_tokens=30)
    async with FakePublisher() as publisher, relay_of(publisher, options=small) as relay:
        for number in range(1, 9):
            await publisher.publish(block(number))
        await known(relay, 8)
        first = Reader(relay)
        async with reading(first):
            await until(lambda: first.holds(*range(1, 9)), "all")
        last = first.cursors[RANK]
        relay.subscribe(start_sequence_number=last)
        for number in (last - 7, last + 1, 5, 2**63):
            with pytest.raises(ResumeOutOfRange):
                relay.subscribe(start_sequence_number=number)
        with pytest.raises(ResumeOutOfRange, match="is over"):
            relay.subscribe(cursors={RANK: last}, epoch=Epoch("0" * 32))
        with pytest.raises(ResumeOutOfRange, match="no rank 3"):
            relay.subscribe(cursors={Rank(3): last})


async def test_one_number_cannot_resume_two_ranks() -> None:
    async with FakePublisher() as zero, FakePublisher(rank=Rank(1)) as one, relay_of(zero, one) as relay:
        await zero.publish(block(1))
        await one.publish(block(2))
        await known(relay, 1)
        await known(relay, 1, Rank(1))
        reader = Reader(relay)
        async with reading(reader):
            await until(lambda: reader.holds(1) and reader.holds(2, rank=Rank(1)), "both")
        with pytest.raises(ResumeOutOfRange, match="several ranks"):
            relay.subscribe(start_sequence_number=reader.cursors[RANK])
        relay.subscribe(cursors=reader.cursors, epoch=relay.epoch)


async def test_one_rank_that_restarts_leaves_the_other_rank_known() -> None:
    zero = FakePublisher()
    async with zero, FakePublisher(rank=Rank(1)) as one, relay_of(zero, one) as relay:
        await zero.publish(block(1))
        await one.publish(block(2))
        await known(relay, 1)
        await known(relay, 1, Rank(1))
        epoch = relay.epoch
        await zero.__aexit__(None, None, None)
        await zero.__aenter__()
        await until(lambda: relay.epoch != epoch and relay.blocks(RANK) == 0, "rank 0 is empty")
        reader = Reader(relay)
        async with reading(reader):
            await until(lambda: reader.holds() and reader.holds(2, rank=Rank(1)), "rank 1 alone")


async def test_a_subscriber_that_does_not_read_is_cut_off_and_the_others_are_not_slowed() -> None:
    small = RelayOptions(probe_s=0.05, history_tokens=200)
    async with FakePublisher() as publisher, relay_of(publisher, options=small) as relay:
        slow, quick = Reader(relay), Reader(relay)
        items = aiter(slow.subscription)
        await anext(items)
        async with reading(quick):
            for number in range(1, 101):
                await publisher.publish(block(number))
            await until(lambda: quick.holds(*range(1, 101)), "all hundred")
        with pytest.raises(SubscriberTooSlow):
            await anext(items)
        again = Reader(relay)
        async with reading(again):
            await until(lambda: again.holds(*range(1, 101)), "all hundred by snapshot")


async def test_any_number_of_subscribers_costs_the_engine_one_connection() -> None:
    calm = RelayOptions(probe_s=1.0, replay_silence_s=2.0)
    async with FakePublisher() as publisher, relay_of(publisher, options=calm) as relay:
        await publisher.publish(block(1))
        await known(relay, 1)
        asked = publisher.replays_asked
        readers = [Reader(relay) for _ in range(100)]
        async with AsyncExitStack() as stack:
            for reader in readers:
                await stack.enter_async_context(reading(reader))
            await publisher.publish(block(2))
            await until(lambda: all(reader.holds(1, 2) for reader in readers), "all hundred know it")
        assert publisher.replays_asked - asked < 50, "one reader asks, and not each for itself"


async def test_a_subscriber_that_has_everything_waits() -> None:
    async with FakePublisher() as publisher, relay_of(publisher) as relay:
        await publisher.publish(block(1))
        await known(relay, 1)
        reader = Reader(relay)
        async with reading(reader):
            await until(lambda: reader.holds(1), "1")
            asked = publisher.replays_asked
            await until(lambda: publisher.replays_asked > asked + 3, "the relay probed for a while")
            assert len(reader.items) == 1


async def test_what_cannot_be_translated_ends_the_stream_with_the_reason() -> None:
    async with FakePublisher() as publisher, relay_of(publisher) as relay:
        await publisher.publish(block(1))
        await known(relay, 1)
        stream = asyncio.ensure_future(Reader(relay).read())
        await asyncio.sleep(0)
        await publisher.publish(payload=b"\x93\xcb?\xf0\x00\x00\x00\x00\x00\x00\x91\x81\xa4type\xaaBlockMoved\x00")
        with pytest.raises(StreamUntranslatable, match="BlockMoved"):
            await asyncio.wait_for(stream, 5)
        await publisher.publish(block(2))
        await known(relay, 1)


async def test_bytes_that_are_not_msgpack_end_the_epoch_and_are_counted() -> None:
    async with FakePublisher() as publisher, relay_of(publisher) as relay:
        await publisher.publish(block(1))
        await known(relay, 1)
        stream = asyncio.ensure_future(Reader(relay).read())
        await asyncio.sleep(0)
        await publisher.publish(payload=b"\xc1 no msgpack")
        await ends(stream, EpochEnded)
        assert relay.counts["bad_batches"] == 1


async def test_a_clear_empties_what_late_subscribers_are_told() -> None:
    async with FakePublisher() as publisher, relay_of(publisher) as relay:
        await publisher.publish(block(1))
        await known(relay, 1)
        await publisher.publish(CacheCleared(), block(2))
        await until(lambda: relay.blocks(RANK) == 1, "cleared")
        reader = Reader(relay)
        async with reading(reader):
            await until(lambda: reader.holds(2), "2 alone")


async def test_a_hundred_thousand_blocks_in_one_batch_arrive_in_pieces() -> None:
    hashes = tuple(EngineHash(number) for number in range(1, 100_001))
    huge = BlocksStored(hashes, None, tuple(range(200_000)), 2)
    async with FakePublisher() as publisher, relay_of(publisher) as relay:
        reader = Reader(relay)
        async with reading(reader):
            await publisher.publish(huge)
            await until(lambda: reader.holds(*hashes), "all", within_s=20)
            assert len(reader.items) > 5


async def test_a_relay_that_stops_ends_its_streams() -> None:
    async with FakePublisher() as publisher:
        async with relay_of(publisher) as relay:
            stream = asyncio.ensure_future(Reader(relay).read())
            await asyncio.sleep(0)
        await ends(stream, StreamBroken)


async def test_a_publisher_that_connects_finds_a_relay_that_listens() -> None:
    async with ZmqFrameFeed("tcp://127.0.0.1:*", bind_events=True) as probe:
        endpoint = probe._sub.get_string(zmq.LAST_ENDPOINT)
    async with FakePublisher(events_endpoint=endpoint, connects=True) as publisher:
        feed = ZmqFrameFeed(endpoint, publisher.replay_endpoint, bind_events=True)
        async with KvRelay({RANK: feed}, options=FAST) as relay:
            await publisher.publish(block(1))
            await known(relay, 1)


async def test_a_rank_whose_process_was_replaced_starts_a_new_epoch_though_its_sockets_say_nothing() -> None:
    async with FakePublisher() as publisher, relay_of(publisher) as relay:
        await publisher.publish(block(1))
        await known(relay, 1)
        epoch = relay.epoch
        relay.rank_started(RANK)
        await until(lambda: relay.epoch != epoch and relay.blocks(RANK) == 1, "the same blocks in a new epoch")


async def test_a_message_of_another_form_is_counted_and_passed_over() -> None:
    async with FakePublisher() as publisher:
        feed = ZmqFrameFeed(publisher.events_endpoint, publisher.replay_endpoint)
        async with KvRelay({RANK: feed}, options=FAST) as relay:
            await publisher.publish(block(1))
            await known(relay, 1)
            await publisher._pub.send_multipart([b"kv-events", b"short", b"x"])
            await until(lambda: feed.bad_frames == 1, "it was counted")
            await publisher.publish(block(2))
            await known(relay, 2)
