"""Faults on real sockets, over gRPC and directly: within 5 s the index is true, or the worker has no credit."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

import grpc
import grpc.aio
import pytest
import zmq
from smg_grpc_proto.generated import common_pb2 as pb

from kvherd.adapters.grpc_kv_feed import METHODS, GrpcKvFeed
from kvherd.adapters.zmq_kv_feed import ZmqFrameFeed
from kvherd.core.ids import Rank, WorkerId
from kvherd.core.kv.events import CacheCleared
from kvherd.core.kv.hashing import PrefixHasher
from kvherd.core.kv.index import PrefixIndex
from kvherd.services.gateway.following.follow import Followers, FollowOptions
from kvherd.services.kv_relay.direct import DirectKvFeed
from kvherd.services.kv_relay.event_streams import EventStreams
from kvherd.services.kv_relay.grpc_edge import Context, rpc
from kvherd.services.kv_relay.relay import KvRelay, RelayOptions
from kvherd.testing.cache_truth import CacheTruth, assert_true, assert_true_or_quarantined, removed, stored
from kvherd.testing.forwarder import Forwarder
from kvherd.testing.patience import until
from kvherd.testing.publisher import FakePublisher, without

pytestmark = pytest.mark.net
ANN, ZERO, ONE = WorkerId("ann"), Rank(0), Rank(1)
FOLLOW = FollowOptions(grace_s=1.0, first_pause_s=0.01, most_pause_s=0.1, long_pause_s=0.2)
RELAY = RelayOptions(probe_s=0.2, replay_silence_s=0.3, doubt_s=0.5)
NOT_MSGPACK = b"\xc1 no msgpack"


@dataclass(frozen=True)
class Way:
    """How a gateway comes to an engine's events."""

    bridged: bool
    replay: bool = True


OVER_GRPC, DIRECT = Way(bridged=True), Way(bridged=False)
both = pytest.mark.parametrize("way", [OVER_GRPC, DIRECT], ids=["grpc", "direct"])
both_without_replay = pytest.mark.parametrize("way", [Way(True, False), Way(False, False)], ids=["grpc", "direct"])


@dataclass
class Stage:
    """Publishers, the wires to them, and who follows them."""

    publishers: tuple[FakePublisher, ...]
    wires: list[Forwarder]
    followers: Followers
    feed: GrpcKvFeed | DirectKvFeed

    @property
    def truths(self) -> dict[Rank, CacheTruth]:
        return {one.rank: one.truth for one in self.publishers}

    async def is_true(self, within_s: float = 10.0) -> None:
        await assert_true(self.followers, ANN, self.truths, within_s=within_s)

    async def keeps_its_promise(self) -> None:
        await assert_true_or_quarantined(self.followers, ANN, self.truths)

    async def loses_credit(self) -> None:
        async with asyncio.timeout(5):
            await until(lambda: not self.followers.credit(ANN), within_s=5)

    def cut(self) -> None:
        for wire in self.wires:
            wire.cut()

    def mend(self) -> None:
        for wire in self.wires:
            wire.mend()


class Service:
    """`SubscribeKvEvents` of a relay, as a bridge serves it."""

    def __init__(self, relay: KvRelay) -> None:
        self.streams = EventStreams(relay)

    @rpc
    async def subscribe(self, request: pb.SubscribeKvEventsRequest, context: Context) -> None:
        await self.streams.serve(request.start_sequence_number, context)


@asynccontextmanager
async def bridge(feeds: dict[Rank, ZmqFrameFeed], options: RelayOptions) -> AsyncIterator[int]:
    async with KvRelay(feeds, options=options) as relay, serving(relay) as port:
        yield port


@asynccontextmanager
async def serving(relay: KvRelay) -> AsyncIterator[int]:
    service = Service(relay)
    server = grpc.aio.server()
    _, name, call = METHODS[0].split("/")
    handler = grpc.unary_stream_rpc_method_handler(
        service.subscribe,
        request_deserializer=pb.SubscribeKvEventsRequest.FromString,
        response_serializer=pb.KvEventBatch.SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, {call: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        service.streams.close()
        await server.stop(0)


@asynccontextmanager
async def followed(
    way: Way, *publishers: FakePublisher, options: RelayOptions = RELAY, wired: bool = False
) -> AsyncIterator[Stage]:
    """Follow running publishers; `wired`: over ports that can be cut."""
    async with AsyncExitStack() as stack:
        wires: list[Forwarder] = []

        def reach(endpoint: str) -> str:
            if not wired:
                return endpoint
            wires.append(stack.enter_context(Forwarder(urlsplit(endpoint).port or 0)))
            return f"tcp://127.0.0.1:{wires[-1].port}"

        places = {
            one.rank: (reach(one.events_endpoint), reach(one.replay_endpoint) if way.replay else None)
            for one in publishers
        }

        def frames() -> dict[Rank, ZmqFrameFeed]:
            return {rank: ZmqFrameFeed(events, replay) for rank, (events, replay) in places.items()}

        feed: GrpcKvFeed | DirectKvFeed
        if way.bridged:
            feed = GrpcKvFeed(f"127.0.0.1:{await stack.enter_async_context(bridge(frames(), options))}")
        else:
            feed = DirectKvFeed(frames, options=options)
        followers = await stack.enter_async_context(Followers(PrefixIndex(PrefixHasher(b"k")), options=FOLLOW))
        followers.add(ANN, feed, model="m")
        yield Stage(publishers, wires, followers, feed)


async def heard(stage: Stage, publisher: FakePublisher) -> None:
    """Publish until a subscriber without replay has heard it: before it is connected, all is dropped."""
    number = 1_000
    while not stage.followers.index.worker_blocks(ANN):
        number += 1
        await publisher.publish(CacheCleared(), stored(number))
        await asyncio.sleep(0.01)
    await stage.is_true()


# --- restarts and lost connections -----------------------------------------------------------------------------


@both
@pytest.mark.parametrize("silent", [0, 1, 2, 3, 4, 20])
async def test_a_restart_while_nobody_could_see_it_is_seen_afterwards(way: Way, silent: int) -> None:
    """1. Three batches of one life are known. 2. The wire is cut. 3. The engine restarts, and gets as far as before,
    less or more. 4. The wire is mended."""
    async with FakePublisher() as publisher, followed(way, publisher, wired=True) as stage:
        for number in (1, 2, 3):
            await publisher.publish(stored(number * 10, blocks=2))
        await stage.is_true()
        stage.cut()
        await publisher.restart()
        for number in range(silent):
            await publisher.publish(stored(500 + number))
        stage.mend()
        await stage.is_true()
        await publisher.publish(stored(900))
        await stage.is_true()


@both
async def test_an_engine_that_is_cut_off_loses_its_credit_until_it_is_back(way: Way) -> None:
    async with FakePublisher() as publisher, followed(way, publisher, wired=True) as stage:
        await publisher.publish(stored(1, blocks=3))
        await stage.is_true()
        stage.cut()
        await publisher.publish(removed(2), stored(7))
        await stage.loses_credit()
        await until(lambda: "connection" in stage.followers.view(ANN).reason, within_s=5)
        stage.mend()
        await stage.is_true()


@both
async def test_a_wire_that_passes_nothing_on_costs_the_credit_though_no_connection_breaks(way: Way) -> None:
    async with FakePublisher() as publisher, followed(way, publisher, wired=True) as stage:
        await publisher.publish(stored(1, blocks=3))
        await stage.is_true()
        for wire in stage.wires:
            wire.freeze()
        await publisher.publish(CacheCleared())
        await stage.loses_credit()
        stage.mend()
        await stage.is_true()


@both
async def test_live_events_that_stop_while_replays_go_on_are_found_by_asking(way: Way) -> None:
    async with FakePublisher() as publisher, followed(way, publisher, wired=True) as stage:
        await publisher.publish(stored(1, blocks=3))
        await stage.is_true()
        stage.wires[0].freeze()
        await publisher.publish(removed(2), stored(7))
        await stage.is_true()


@both
async def test_a_restart_that_repeats_the_very_same_events_is_a_new_life(way: Way) -> None:
    async with FakePublisher() as publisher, followed(way, publisher) as stage:
        await publisher.publish(stored(1, blocks=3))
        await publisher.publish(stored(50))
        await stage.is_true()
        epoch = stage.followers.view(ANN).epoch
        await publisher.restart()
        await publisher.publish(stored(1, blocks=3), lost=True)
        await publisher.publish(stored(50), lost=True)
        await publisher.publish(removed(50))
        await stage.is_true()
        assert stage.followers.view(ANN).epoch != epoch


@both
async def test_of_two_ranks_that_publish_in_turn_one_restarts(way: Way) -> None:
    async with FakePublisher() as zero, FakePublisher(rank=ONE) as one, followed(way, zero, one) as stage:
        for number in range(10, 60, 10):
            await zero.publish(stored(number))
            await one.publish(stored(number + 1))
        await stage.is_true()
        await one.restart()
        for number in range(60, 90, 10):
            await zero.publish(stored(number), removed(number - 30))
            await one.publish(stored(number + 1))
        await stage.is_true()


# --- gaps and replays ------------------------------------------------------------------------------------------


async def gap(publisher: FakePublisher, lost: int = 6) -> None:
    """Batches are lost that store and remove, and one comes that shows it."""
    for number in range(lost):
        await publisher.publish(stored(100 + 10 * number), lost=True)
    await publisher.publish(removed(100), lost=True)
    await publisher.publish(stored(900))


@both
async def test_a_replay_that_loses_the_middle_for_good_leaves_what_came_since(way: Way) -> None:
    async with FakePublisher() as publisher, followed(way, publisher) as stage:
        await publisher.publish(stored(1, blocks=3))
        await stage.is_true()
        publisher.answers = without(3)
        await gap(publisher)
        await stage.keeps_its_promise()
        publisher.answers = list
        await publisher.publish(CacheCleared(), stored(7))
        await stage.is_true()


@both
async def test_a_replay_that_loses_the_end_but_not_its_marker_is_asked_again(way: Way) -> None:
    async with FakePublisher() as publisher, followed(way, publisher) as stage:
        await publisher.publish(stored(1, blocks=3))
        await stage.is_true()
        publisher.answers = lambda frames: frames[:2]
        await gap(publisher)
        await publisher.publish(removed(900), lost=True)
        await stage.is_true()


@both
async def test_a_replay_without_its_end_marker_costs_the_credit_of_a_quiet_engine(way: Way) -> None:
    async with FakePublisher() as publisher, followed(way, publisher) as stage:
        await publisher.publish(stored(1, blocks=3))
        await stage.is_true()
        publisher.ends = False
        await gap(publisher)
        await stage.keeps_its_promise()
        await stage.loses_credit()
        publisher.ends = True
        await stage.is_true()


@both
@pytest.mark.parametrize("frame_s", [0.05, 0.4])
async def test_a_slow_replay_costs_the_credit_while_it_lasts_and_no_more(way: Way, frame_s: float) -> None:
    async with FakePublisher() as publisher, followed(way, publisher) as stage:
        await publisher.publish(stored(1, blocks=3))
        await stage.is_true()
        publisher.frame_s = frame_s
        await gap(publisher, lost=12)
        await stage.keeps_its_promise()
        publisher.frame_s = 0.0
        await publisher.publish(CacheCleared(), stored(7))
        await stage.is_true()


@both
async def test_a_restart_in_the_middle_of_a_replay_mixes_nothing(way: Way) -> None:
    async with FakePublisher() as publisher, followed(way, publisher) as stage:
        await publisher.publish(stored(1, blocks=3))
        await stage.is_true()
        publisher.stops_after = 3
        await gap(publisher)
        async with asyncio.timeout(5):
            await publisher.stopped.wait()
        publisher.stops_after = None
        await publisher.restart()
        for number in range(5):
            await publisher.publish(stored(500 + 10 * number))
        await stage.is_true()


@both
async def test_a_replay_that_reaches_back_too_little_leaves_what_came_since(way: Way) -> None:
    async with FakePublisher() as publisher, followed(way, publisher) as stage:
        await publisher.publish(stored(1, blocks=3))
        await stage.is_true()
        publisher.kept = 3
        await gap(publisher)
        await stage.keeps_its_promise()
        await until(lambda: stage.followers.incomplete(ANN), within_s=5)
        await publisher.publish(CacheCleared(), stored(7))
        await stage.is_true()


@both
async def test_a_replay_of_broken_frames_counts_for_nothing(way: Way) -> None:
    async with FakePublisher() as publisher, followed(way, publisher) as stage:
        await publisher.publish(stored(1, blocks=3))
        await stage.is_true()
        publisher.cut_frames = True
        await gap(publisher)
        await stage.keeps_its_promise()
        publisher.cut_frames = False
        await publisher.publish(CacheCleared(), stored(7))
        await stage.is_true()


@both
async def test_an_old_engine_s_arrays_and_replays_without_topic_are_followed_alike(way: Way) -> None:
    async with FakePublisher() as publisher:
        publisher.old = True
        await publisher.publish(stored(1, blocks=3))
        async with followed(way, publisher) as stage:
            await gap(publisher)
            await stage.is_true()
            await publisher.restart()
            await publisher.publish(stored(50), CacheCleared(), stored(60))
            await stage.is_true()


@both_without_replay
async def test_a_gap_without_replay_leaves_what_came_since(way: Way) -> None:
    async with FakePublisher() as publisher, followed(way, publisher) as stage:
        await heard(stage, publisher)
        await publisher.publish(stored(1, blocks=3))
        await stage.is_true()
        await gap(publisher)
        await stage.keeps_its_promise()
        await until(lambda: stage.followers.incomplete(ANN), within_s=5)
        await publisher.publish(CacheCleared(), stored(7))
        await stage.is_true()


@both_without_replay
async def test_without_replay_a_cut_costs_everything_known(way: Way) -> None:
    async with FakePublisher() as publisher, followed(way, publisher, wired=True) as stage:
        await heard(stage, publisher)
        stage.cut()
        await stage.loses_credit()
        stage.mend()
        while not stage.followers.credit(ANN):
            await publisher.publish(removed(1_001))
            await asyncio.sleep(0.02)
        await stage.keeps_its_promise()


# --- publishers that are not one -------------------------------------------------------------------------------


@both
async def test_a_replay_of_another_publisher_is_not_believed(way: Way) -> None:
    async with FakePublisher() as right, FakePublisher(rank=ONE) as wrong:
        for number in range(5):
            await wrong.publish(stored(10 + number))
        right.replay_endpoint = wrong.replay_endpoint
        async with followed(way, right) as stage:
            for number in range(20):
                await right.publish(stored(100 * number))
                await asyncio.sleep(0.05)
            await stage.loses_credit()
            assert "not of the publisher" in stage.followers.view(ANN).reason


@pytest.mark.parametrize("bridged", [True, False], ids=["grpc", "direct"])
async def test_two_publishers_that_connect_at_once_cost_the_credit_until_one_is_gone(*, bridged: bool) -> None:
    async with ZmqFrameFeed("tcp://127.0.0.1:*", bind_events=True) as probe:
        endpoint = probe._sub.get_string(zmq.LAST_ENDPOINT)
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(FakePublisher(events_endpoint=endpoint, connects=True))
        feeds = {ZERO: ZmqFrameFeed(endpoint, first.replay_endpoint, bind_events=True)}
        feed: GrpcKvFeed | DirectKvFeed
        if bridged:
            feed = GrpcKvFeed(f"127.0.0.1:{await stack.enter_async_context(bridge(feeds, RELAY))}")
        else:
            feed = DirectKvFeed(lambda: feeds, options=RELAY)
        followers = await stack.enter_async_context(Followers(PrefixIndex(PrefixHasher(b"k")), options=FOLLOW))
        followers.add(ANN, feed, model="m")
        stage = Stage((first,), [], followers, feed)
        await first.publish(stored(1, blocks=3))
        await stage.is_true()
        async with FakePublisher(events_endpoint=endpoint, connects=True) as second:
            await second.publish(stored(50))
            await second.publish(stored(60))
            await stage.loses_credit()
            await until(lambda: "2 publishers" in followers.view(ANN).reason, within_s=5)
        await first.publish(stored(7))
        await stage.is_true()


@both
async def test_a_batch_of_another_rank_on_the_same_socket_quarantines_the_worker(way: Way) -> None:
    async with FakePublisher() as publisher, followed(way, publisher) as stage:
        await publisher.publish(stored(1, blocks=3))
        await stage.is_true()
        publisher.rank = ONE
        await publisher.publish(stored(50))
        publisher.rank = ZERO
        await until(lambda: "a batch of rank 1" in stage.followers.view(ANN).reason, within_s=5)
        await stage.keeps_its_promise()


# --- what batches say ------------------------------------------------------------------------------------------


@both
async def test_duplicate_stores_and_double_removals_are_counted(way: Way) -> None:
    async with FakePublisher() as publisher, followed(way, publisher) as stage:
        await publisher.publish(stored(1, blocks=3), stored(2, 1, blocks=2), stored(2, 1))
        await publisher.publish(removed(3), removed(2, 2))
        await stage.is_true()
        await publisher.publish(removed(1), removed(1), removed(1), stored(9), stored(1))
        await stage.is_true()
        await publisher.publish(removed(2, 3), removed(77))
        await stage.is_true()


@both
async def test_a_clear_that_comes_late_after_a_flush_keeps_out_what_was_on_its_way(way: Way) -> None:
    async with FakePublisher() as publisher, followed(way, publisher) as stage:
        await publisher.publish(stored(1, blocks=3))
        await stage.is_true()
        stage.followers.flushed(ANN)
        await publisher.publish(stored(20), removed(1))
        publisher.truth.copies.clear()
        await stage.keeps_its_promise()
        assert not stage.followers.index.worker_blocks(ANN)
        await publisher.publish(CacheCleared(), stored(30))
        await stage.is_true()


@both
async def test_bytes_that_are_not_msgpack_leave_what_came_since(way: Way) -> None:
    async with FakePublisher() as publisher, followed(way, publisher) as stage:
        await publisher.publish(stored(1, blocks=3))
        await stage.is_true()
        await publisher.publish(payload=NOT_MSGPACK)
        await publisher.publish(stored(7))
        await stage.keeps_its_promise()
        await publisher.publish(CacheCleared(), stored(8))
        await stage.is_true()


@both
@pytest.mark.parametrize("jump", [2**32, 2**62, 2**64 - 3], ids=["2^32", "2^62", "the last"])
async def test_numbers_that_jump_end_the_life_however_far(way: Way, jump: int) -> None:
    async with FakePublisher() as publisher, followed(way, publisher) as stage:
        await publisher.publish(stored(1, blocks=3))
        await stage.is_true()
        publisher.count_from(jump)
        await publisher.publish(stored(7))
        await stage.keeps_its_promise()
        await publisher.publish(CacheCleared(), stored(8))
        await stage.is_true()


@both
async def test_a_batch_of_a_hundred_thousand_blocks_is_known_whole(way: Way) -> None:
    options = RelayOptions(probe_s=2.0, replay_silence_s=2.0, doubt_s=2.0, history_tokens=8_000_000)
    async with FakePublisher() as publisher, followed(way, publisher, options=options) as stage:
        await publisher.publish(stored(1))
        await stage.is_true()
        await publisher.publish(stored(1_000_000, blocks=100_000))
        await stage.is_true(within_s=90)


# --- who follows -----------------------------------------------------------------------------------------------


@both
async def test_a_worker_that_is_removed_under_load_is_forgotten_and_can_come_back(way: Way) -> None:
    async with FakePublisher() as publisher, followed(way, publisher) as stage, asyncio.TaskGroup() as group:
        await publisher.publish(stored(1))
        await stage.is_true()
        publishing = group.create_task(_publish_for_ever(publisher))
        await until(lambda: stage.followers.index.worker_blocks(ANN) > 3, within_s=5)
        stage.followers.remove(ANN)
        assert len(stage.followers.index) == 0
        await asyncio.sleep(0.05)
        assert len(stage.followers.index) == 0
        stage.followers.add(ANN, stage.feed, model="m")
        await until(lambda: stage.followers.credit(ANN), within_s=5)
        publishing.cancel()
        await asyncio.wait([publishing])
        await stage.is_true()


async def _publish_for_ever(publisher: FakePublisher) -> None:
    number = 10
    while True:
        number += 1
        await publisher.publish(stored(number), removed(number - 5))
        await asyncio.sleep(0.001)


async def test_more_than_a_socket_holds_is_found_by_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvherd.adapters.zmq_kv_feed.QUEUED_FRAMES", 50)
    async with FakePublisher() as publisher, followed(DIRECT, publisher) as stage:
        await publisher.publish(stored(1))
        await stage.is_true()
        for number in range(8_000):
            await publisher.publish(stored(10 + number))
        await stage.is_true(within_s=30)


@both
async def test_a_subscriber_in_a_storm_of_faults_ends_up_right(way: Way) -> None:
    """Everything at once, again and again, with traffic all the while."""
    async with FakePublisher() as publisher, followed(way, publisher, wired=True) as stage:
        number = 10
        for turn in range(12):
            for _ in range(30):
                number += 1
                await publisher.publish(stored(number), removed(number - 20), lost=number % 7 == 0)
            if turn % 3 == 0:
                stage.cut()
                stage.mend()
            if turn % 4 == 1:
                await publisher.restart()
            publisher.answers = without(number % 50) if turn % 5 == 2 else list
        publisher.answers = list
        await publisher.publish(CacheCleared(), stored(7))
        await stage.is_true()


# --- resumes ---------------------------------------------------------------------------------------------------


async def told(channel: grpc.aio.Channel, start: int, epoch: str = "0" * 32) -> str | list[int]:
    """What a bare number is answered: the status of a refusal, or the number of the first batch."""
    call = channel.unary_stream(
        METHODS[0],
        request_serializer=pb.SubscribeKvEventsRequest.SerializeToString,
        response_deserializer=pb.KvEventBatch.FromString,
    )(pb.SubscribeKvEventsRequest(start_sequence_number=start), metadata=(("kvherd-epoch", epoch),))
    try:
        async with asyncio.timeout(5):
            if await call.initial_metadata():
                return [(await call.read()).sequence_number]
            code: grpc.StatusCode = await call.code()
            return str(code.name)
    finally:
        call.cancel()


async def test_a_number_resumes_where_it_can_and_is_refused_before_any_header_where_it_cannot() -> None:
    """One batch too old, in the future, an engine's own number, another epoch; and then the engine restarts."""
    small = RelayOptions(probe_s=0.2, replay_silence_s=0.3, doubt_s=0.5, history_tokens=100)
    async with FakePublisher() as publisher:
        feeds = {ZERO: ZmqFrameFeed(publisher.events_endpoint, publisher.replay_endpoint)}
        async with KvRelay(feeds, options=small) as relay, serving(relay) as port:
            for number in range(9):
                await publisher.publish(stored(10 + number))
            await until(lambda: relay.blocks(ZERO) == 9, within_s=5)
            epoch, history = relay.epoch, relay._life.histories[ZERO]
            oldest, last = history._floor, history.last
            assert last - 8 < oldest < last, "some are kept, and not all"
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                assert await told(channel, oldest, epoch) == [oldest + 1]
                for wrong in (oldest - 1, last + 1, 9, 2**63):
                    assert await told(channel, wrong, epoch) == "OUT_OF_RANGE"
                assert await told(channel, oldest) == "OUT_OF_RANGE"
                await publisher.restart()
                await until(lambda: relay.epoch != epoch, within_s=5)
                assert await told(channel, last, epoch) == "OUT_OF_RANGE"
