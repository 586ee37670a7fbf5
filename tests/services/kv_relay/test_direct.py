"""An engine's own sockets followed without a bridge: what its events say is known, and nothing else."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from kvherd.adapters.zmq_kv_feed import ZmqFrameFeed
from kvherd.core.ids import EngineHash, Rank, WorkerId
from kvherd.core.kv.events import BlocksRemoved, BlocksStored, CacheCleared
from kvherd.core.kv.hashing import PrefixHasher, prefix_chain
from kvherd.core.kv.index import Holder, PrefixIndex
from kvherd.services.gateway.following.follow import Followers, FollowOptions
from kvherd.services.kv_relay.direct import DirectKvFeed
from kvherd.services.kv_relay.relay import RelayOptions
from kvherd.testing.publisher import FakePublisher

pytestmark = pytest.mark.net
RANK, OTHER, ANN, KEY = Rank(0), Rank(1), WorkerId("http://ann:1"), b"k"
QUICK = FollowOptions(grace_s=0.3, first_pause_s=0.01, most_pause_s=0.05, long_pause_s=0.1)
RELAY = RelayOptions(probe_s=0.05, replay_silence_s=0.2)


def block(number: int, parent: int | None = None) -> BlocksStored:
    return BlocksStored((EngineHash(number),), None if parent is None else EngineHash(parent), (number, 1, 1), 3)


@dataclass
class Followed:
    publishers: dict[Rank, FakePublisher]
    followers: Followers
    index: PrefixIndex

    async def holds(self, *numbers: int, rank: Rank = RANK) -> None:
        """The index is what the engine's rank holds, and believed."""
        async with asyncio.timeout(5):
            while not (self.followers.credit(ANN) and set(self.index.contents(Holder(ANN, rank))) == set(numbers)):  # noqa: ASYNC110 (what is waited for has no event)
                await asyncio.sleep(0.005)


@asynccontextmanager
async def followed(*publishers: FakePublisher) -> AsyncIterator[Followed]:
    """Follow publishers that are running already, one a rank."""
    ranks = {Rank(number): one for number, one in enumerate(publishers)}
    index = PrefixIndex(PrefixHasher(KEY))
    feed = DirectKvFeed(
        lambda: {rank: ZmqFrameFeed(one.events_endpoint, one.replay_endpoint) for rank, one in ranks.items()},
        options=RELAY,
    )
    async with Followers(index, options=QUICK) as followers:
        followers.add(ANN, feed, model="m")
        yield Followed(ranks, followers, index)


async def test_what_was_published_before_and_after_is_known() -> None:
    async with FakePublisher() as publisher:
        await publisher.publish(block(1))
        async with followed(publisher) as it:
            await publisher.publish(block(2, 1))
            await it.holds(1, 2)
            chain = prefix_chain([1, 1, 1, 2, 1, 1, 3, 1, 1], block_size=3, model="m", key=KEY)
            assert it.followers.match(chain) == {Holder(ANN, RANK): 2}
            await publisher.publish(BlocksRemoved((EngineHash(2),)), lost=True)
            await it.holds(1)


async def test_a_restarted_engine_is_known_by_its_new_blocks_only() -> None:
    async with FakePublisher() as publisher, followed(publisher) as it:
        await publisher.publish(block(1), block(2))
        await it.holds(1, 2)
        before = it.followers.view(ANN).epoch
        await publisher.__aexit__(None, None, None)
        await publisher.__aenter__()
        await publisher.publish(block(3))
        await it.holds(3)
        assert it.followers.view(ANN).epoch != before


async def test_a_rank_that_restarts_leaves_the_other_known() -> None:
    async with FakePublisher() as publisher, FakePublisher(rank=OTHER) as other, followed(publisher, other) as it:
        await publisher.publish(block(1))
        await other.publish(block(2))
        await it.holds(1)
        await it.holds(2, rank=OTHER)
        await other.__aexit__(None, None, None)
        await other.__aenter__()
        await other.publish(block(3))
        await it.holds(3, rank=OTHER)
        await it.holds(1)


async def test_an_engine_that_comes_later_is_followed_when_it_does() -> None:
    async with FakePublisher() as publisher:
        pass
    async with followed(publisher) as it, publisher:
        await publisher.publish(CacheCleared(), block(7))
        await it.holds(7)


async def test_what_is_out_of_the_replay_s_reach_is_said_to_be_unknown() -> None:
    async with FakePublisher() as publisher:
        publisher.kept = 1
        await publisher.publish(block(1))
        await publisher.publish(block(2))
        feed = DirectKvFeed(
            lambda: {RANK: ZmqFrameFeed(publisher.events_endpoint, publisher.replay_endpoint)}, options=RELAY
        )
        index = PrefixIndex(PrefixHasher(KEY))
        async with Followers(index, options=QUICK) as followers:
            followers.add(ANN, feed, model="m")
            it = Followed({RANK: publisher}, followers, index)
            await it.holds(2)
            assert followers.incomplete(ANN)


async def test_an_endpoint_that_cannot_be_listened_on_quarantines_the_worker_and_says_why() -> None:
    async with FakePublisher() as publisher, Followers(PrefixIndex(PrefixHasher(KEY)), options=QUICK) as followers:
        taken = publisher.events_endpoint
        followers.add(ANN, DirectKvFeed(lambda: {RANK: ZmqFrameFeed(taken, bind_events=True)}), model="m")
        async with asyncio.timeout(5):
            while followers.view(ANN).state != "quarantined":  # noqa: ASYNC110 (a state has no event)
                await asyncio.sleep(0.005)
        assert taken in followers.view(ANN).reason


async def test_a_worker_that_is_back_is_told_again_from_its_replay() -> None:
    async with FakePublisher() as publisher, followed(publisher) as it:
        await publisher.publish(block(1))
        await it.holds(1)
        it.followers.returned(ANN)
        assert not it.followers.credit(ANN)
        await it.holds(1)
