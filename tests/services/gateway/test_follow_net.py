"""The whole way of a KV event: publisher, relay, gRPC, follower, index, over real sockets."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import grpc.aio
import pytest
from smg_grpc_proto.generated import common_pb2 as pb

from kvherd.adapters.grpc_kv_feed import METHODS, GrpcKvFeed
from kvherd.adapters.zmq_kv_feed import ZmqFrameFeed
from kvherd.core.ids import EngineHash, PrefixHash, Rank, WorkerId
from kvherd.core.kv.events import BlocksRemoved, BlocksStored, CacheCleared
from kvherd.core.kv.hashing import PrefixHasher, prefix_chain
from kvherd.core.kv.index import Holder, PrefixIndex
from kvherd.core.kv.reactions import FollowState
from kvherd.services.gateway.following.follow import Followers, FollowOptions
from kvherd.services.kv_relay.event_streams import EventStreams
from kvherd.services.kv_relay.grpc_edge import Context, rpc
from kvherd.services.kv_relay.relay import KvRelay, RelayOptions
from kvherd.testing.publisher import FakePublisher, without

pytestmark = pytest.mark.net
RANK, ANN, KEY = Rank(0), WorkerId("grpc://ann:1"), b"k"
ANN0 = Holder(ANN, RANK)
QUICK = FollowOptions(grace_s=0.3, first_pause_s=0.01, most_pause_s=0.05, long_pause_s=0.1)
SGLANG, VLLM = METHODS


def block(number: int, parent: int | None = None) -> BlocksStored:
    return BlocksStored((EngineHash(number),), None if parent is None else EngineHash(parent), (number, 1, 1), 3)


def chain(*numbers: int) -> list[PrefixHash]:
    return prefix_chain([token for one in numbers for token in (one, 1, 1)], block_size=3, model="m", key=KEY)


async def until(condition: Callable[[], bool], what: str, within_s: float = 5.0) -> None:
    try:
        async with asyncio.timeout(within_s):
            while not condition():  # noqa: ASYNC110 (what is waited for has no event)
                await asyncio.sleep(0.005)
    except TimeoutError:
        pytest.fail(f"not within {within_s:g} s: {what}")


class Service:
    """`SubscribeKvEvents` of a relay, as the servicer serves it."""

    def __init__(self, relay: KvRelay) -> None:
        self.streams = EventStreams(relay)
        self.calls = 0

    @rpc
    async def subscribe(self, request: pb.SubscribeKvEventsRequest, context: Context) -> None:
        self.calls += 1
        await self.streams.serve(request.start_sequence_number, context)


@asynccontextmanager
async def served(service: Service, method: str = SGLANG, port: int = 0) -> AsyncIterator[int]:
    server = grpc.aio.server()
    _, name, call = method.split("/")
    handler = grpc.unary_stream_rpc_method_handler(
        service.subscribe,
        request_deserializer=pb.SubscribeKvEventsRequest.FromString,
        response_serializer=pb.KvEventBatch.SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, {call: handler}),))
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield port
    finally:
        service.streams.close()
        await server.stop(0)


@dataclass
class Herd:
    publisher: FakePublisher
    relay: KvRelay
    service: Service
    port: int
    followers: Followers
    index: PrefixIndex

    async def holds(self, *numbers: int) -> None:
        """The index is what the engine holds, and believed."""
        await until(
            lambda: self.followers.credit(ANN) and set(self.index.contents(ANN0)) == set(numbers),
            f"the index holds {numbers}",
        )


@asynccontextmanager
async def herd(*, method: str = SGLANG, history_tokens: int = 100_000) -> AsyncIterator[Herd]:
    index = PrefixIndex(PrefixHasher(KEY))
    async with FakePublisher() as publisher:
        feed = ZmqFrameFeed(publisher.events_endpoint, publisher.replay_endpoint)
        options = RelayOptions(probe_s=0.05, replay_silence_s=0.2, history_tokens=history_tokens)
        async with KvRelay({RANK: feed}, options=options) as relay:
            service = Service(relay)
            async with served(service, method) as port, Followers(index, options=QUICK) as followers:
                followers.add(ANN, GrpcKvFeed(f"127.0.0.1:{port}"), model="m")
                yield Herd(publisher, relay, service, port, followers, index)


@pytest.mark.parametrize("method", METHODS)
async def test_what_an_engine_stores_and_removes_is_known_in_either_protocol(method: str) -> None:
    async with herd(method=method) as it:
        await it.publisher.publish(block(1), block(2, 1))
        await it.holds(1, 2)
        assert it.followers.match(chain(1, 2, 3)) == {ANN0: 2}
        await it.publisher.publish(BlocksRemoved((EngineHash(1),)))
        await it.holds(2)
        assert it.followers.match(chain(1, 2, 3)) == {}
        view = it.followers.view(ANN)
        assert (view.state, view.epoch) == ("live", it.relay.epoch)


async def test_a_gap_that_is_filled_is_never_seen() -> None:
    async with herd() as it:
        await it.publisher.publish(block(1))
        await it.holds(1)
        await it.publisher.publish(block(2), lost=True)
        await it.publisher.publish(block(3))
        await it.holds(1, 2, 3)
        assert it.service.calls == 1


async def test_a_gap_that_cannot_be_filled_leaves_only_what_is_sure() -> None:
    async with herd() as it:
        await it.publisher.publish(block(1))
        await it.holds(1)
        it.publisher.answers = without(1)
        await it.publisher.publish(block(2), lost=True)
        await it.publisher.publish(block(3))
        await it.holds(3)


@pytest.mark.parametrize("lost", [0, 1, 2, 3, 40])
async def test_after_a_restart_the_index_is_what_the_new_engine_holds(lost: int) -> None:
    async with herd() as it:
        await it.publisher.publish(block(1))
        await it.publisher.publish(block(2, 1))
        await it.holds(1, 2)
        await it.publisher.__aexit__(None, None, None)
        await it.publisher.__aenter__()
        for number in range(lost):
            await it.publisher.publish(block(100 + number), lost=True)
        await it.publisher.publish(block(7))
        await it.holds(7, *(100 + number for number in range(lost)))


async def test_a_server_that_comes_back_resumes_and_credit_is_not_lost_meanwhile() -> None:
    """1. The server goes away with its port. 2. An event happens. 3. The server is back in time: the follower resumes
    from its cursor and is not told again what it knew."""
    index = PrefixIndex(PrefixHasher(KEY))
    patient = FollowOptions(grace_s=60, first_pause_s=0.01, most_pause_s=0.05)
    async with FakePublisher() as publisher:
        feed = ZmqFrameFeed(publisher.events_endpoint, publisher.replay_endpoint)
        async with (
            KvRelay({RANK: feed}, options=RelayOptions(probe_s=0.05)) as relay,
            Followers(index, options=patient) as followers,
        ):
            first = Service(relay)
            async with served(first) as port:
                followers.add(ANN, GrpcKvFeed(f"127.0.0.1:{port}"), model="m")
                await publisher.publish(block(1))
                await until(lambda: followers.match(chain(1)) == {ANN0: 1}, "1 is known")
            await until(lambda: followers.view(ANN).reason != "", "the follower noticed")
            assert followers.credit(ANN)
            await publisher.publish(block(2, 1))
            async with served(Service(relay), port=port):
                await until(lambda: followers.match(chain(1, 2)) == {ANN0: 2}, "2 is known too")
                assert followers.view(ANN).epoch == relay.epoch


async def test_a_server_that_stays_away_costs_the_credit_after_the_grace() -> None:
    index = PrefixIndex(PrefixHasher(KEY))
    async with FakePublisher() as publisher:
        feed = ZmqFrameFeed(publisher.events_endpoint, publisher.replay_endpoint)
        async with KvRelay({RANK: feed}) as relay, Followers(index, options=QUICK) as followers:
            async with served(Service(relay)) as port:
                followers.add(ANN, GrpcKvFeed(f"127.0.0.1:{port}"), model="m")
                await publisher.publish(block(1))
                await until(lambda: followers.match(chain(1)) == {ANN0: 1}, "1 is known")
            await until(lambda: followers.state(ANN) is FollowState.QUARANTINED, "quarantined")
            assert followers.match(chain(1)) == {}
            async with served(Service(relay), port=port):
                await until(lambda: followers.match(chain(1)) == {ANN0: 1}, "proved by a resume")


async def test_a_follower_that_fell_behind_is_told_again() -> None:
    async with herd(history_tokens=50) as it:
        await it.publisher.publish(block(1))
        await it.holds(1)
        for number in range(2, 202):
            await it.publisher.publish(block(number))
        await it.holds(*range(1, 202))


async def test_a_server_without_events_is_unsupported() -> None:
    async with herd() as it, served(it.service, "/some.other/Thing") as port:
        it.followers.add(ANN, GrpcKvFeed(f"127.0.0.1:{port}"), model="m")
        await until(lambda: it.followers.state(ANN) is FollowState.UNSUPPORTED, "unsupported")


async def test_events_that_cannot_be_translated_quarantine_the_worker_and_say_why() -> None:
    async with herd() as it:
        await it.publisher.publish(block(1))
        await it.holds(1)
        await it.publisher.publish(payload=b"\x93\xcb?\xf0\x00\x00\x00\x00\x00\x00\x91\x81\xa4type\xaaBlockMoved\x00")
        await until(lambda: "BlockMoved" in it.followers.view(ANN).reason, "the reason is told")
        await it.publisher.publish(block(2))
        await it.holds(2)


async def test_a_removed_worker_is_forgotten_at_once_and_may_come_back() -> None:
    async with herd() as it:
        await it.publisher.publish(block(1))
        await it.holds(1)
        it.followers.remove(ANN)
        assert len(it.index) == 0
        assert it.followers.view(ANN).state == "unfollowed"
        it.followers.add(ANN, GrpcKvFeed(f"127.0.0.1:{it.port}"), model="m")
        await it.holds(1)


async def test_batches_from_before_a_flush_that_come_after_its_answer_are_kept_out() -> None:
    async with herd() as it:
        await it.publisher.publish(block(1))
        await it.holds(1)
        it.followers.flushed(ANN)
        assert it.followers.match(chain(1)) == {}
        await it.publisher.publish(block(2))
        await it.publisher.publish(CacheCleared(), block(3))
        await it.holds(3)


async def test_a_clear_that_came_before_the_answer_needs_no_barrier() -> None:
    async with herd() as it:
        await it.publisher.publish(block(1))
        await it.holds(1)
        ordered_s = asyncio.get_running_loop().time()
        await it.publisher.publish(CacheCleared(), block(2))
        await it.holds(2)
        it.followers.flushed(ANN, ordered_s=ordered_s)
        await it.publisher.publish(block(3))
        await it.holds(2, 3)


async def test_a_batch_of_a_hundred_thousand_blocks_arrives() -> None:
    hashes = tuple(EngineHash(number) for number in range(1, 100_001))
    async with herd(history_tokens=10_000_000) as it:
        await it.publisher.publish(BlocksStored(hashes, None, tuple(range(300_000)), 3))
        await until(lambda: it.index.blocks(ANN0) == 100_000, "all of them", within_s=20)
