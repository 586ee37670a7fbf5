"""How a follower takes what its stream does to it, in virtual time."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Self

import pytest

from kvherd.core.ids import EngineHash, Epoch, Rank, WorkerId
from kvherd.core.kv.events import BlocksStored, CacheCleared, KvEvent, KvEventBatch, SnapshotChunk, Tier
from kvherd.core.kv.hashing import PrefixHasher
from kvherd.core.kv.index import Holder, PrefixIndex
from kvherd.core.kv.reactions import FollowState
from kvherd.core.kv.stream import (
    EpochEnded,
    EventsUnsupported,
    KvStreamError,
    ResumeOutOfRange,
    StreamBroken,
    StreamForbidden,
    StreamUntranslatable,
    SubscriberTooSlow,
)
from kvherd.core.routing.candidate import KvKnowledge
from kvherd.ports.kv_feed import FeedItem, Subscribed
from kvherd.services.gateway.following.follow import Followers
from kvherd.testing.kv_feeds import OpenFeed

ANN, BOB, RANK = WorkerId("ann"), WorkerId("bob"), Rank(0)
ANN0 = Holder(ANN, RANK)
ONE, TWO = Epoch("1" * 32), Epoch("2" * 32)
Step = FeedItem | KvStreamError | Exception


class ScriptedFeed(OpenFeed):
    """A `KvFeed` that plays one script a subscription, the last one for ever; a script that is over waits."""

    def __init__(self, *scripts: list[Step]) -> None:
        self.scripts = list(scripts)
        self.asked: list[tuple[dict[Rank, int], Epoch | None, float]] = []
        self.open = 0

    async def subscribe(self, cursors: dict[Rank, int], epoch: Epoch | None) -> AsyncGenerator[FeedItem, None]:
        self.asked.append((cursors, epoch, asyncio.get_running_loop().time()))
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        self.open += 1
        try:
            for step in script:
                if isinstance(step, Exception):
                    raise step
                yield step
            await asyncio.Event().wait()
        finally:
            self.open -= 1


def block(number: int) -> BlocksStored:
    return BlocksStored((EngineHash(number),), None, (number, 1), 2)


def inner(number: int) -> BlocksStored:
    """A block that is not the first of a chain."""
    return replace(block(number), parent_hash=EngineHash(number + 100))


def batch(sequence: int, *events: KvEvent, rank: Rank = RANK, at_s: float = 0.0) -> KvEventBatch:
    return KvEventBatch(sequence, at_s, rank, events)


def snapshot(
    sequence: int, *events: KvEvent, index: int = 0, count: int = 1, unknown: int = 0, at_s: float = 0.0
) -> SnapshotChunk:
    first = (CacheCleared(), *events) if index == 0 else events
    return SnapshotChunk(index, count, unknown, batch(sequence, *first, at_s=at_s))


async def follow(feed: ScriptedFeed, check: Callable[[Followers], object], *, after_s: float = 0.01) -> None:
    """Follow `feed` and check what is known `after_s` seconds later."""
    index = PrefixIndex(PrefixHasher(b"k"))
    async with Followers(index, dice=lambda: 0.0, wall=lambda: 1_000.0) as followers:
        followers.add(ANN, feed, model="m")
        await asyncio.sleep(after_s)
        check(followers)
    assert feed.open == 0
    assert len(index) == 0


def knows(state: FollowState, *numbers: int) -> Callable[[Followers], None]:
    def check(followers: Followers) -> None:
        assert (followers.state(ANN), set(followers.index.contents(ANN0))) == (state, set(numbers))

    return check


async def test_a_snapshot_and_what_follows_it_are_known() -> None:
    feed = ScriptedFeed([Subscribed(ONE), snapshot(9, block(1)), batch(10, block(2))])
    await follow(feed, knows(FollowState.LIVE, 1, 2))
    assert feed.asked == [({}, None, 0.0)]


async def test_a_worker_in_the_middle_of_a_snapshot_has_no_credit_yet() -> None:
    feed = ScriptedFeed([Subscribed(ONE), snapshot(9, block(1), count=2)])
    await follow(feed, knows(FollowState.REPLAYING, 1))
    whole = ScriptedFeed([Subscribed(ONE), snapshot(9, block(1), count=2), snapshot(10, block(2), index=1, count=2)])
    await follow(whole, knows(FollowState.LIVE, 1, 2))


async def test_a_snapshot_that_is_broken_off_is_asked_for_from_zero() -> None:
    feed = ScriptedFeed(
        [Subscribed(ONE), snapshot(9, block(1), count=2), StreamBroken("cut")],
        [Subscribed(ONE), snapshot(20, block(5))],
    )
    await follow(feed, knows(FollowState.LIVE, 5), after_s=1)
    assert [asked[0] for asked in feed.asked] == [{}, {}]


async def test_a_broken_connection_is_resumed_from_its_cursor() -> None:
    feed = ScriptedFeed(
        [Subscribed(ONE), snapshot(9, block(1)), batch(10, block(2)), StreamBroken("cut")],
        [Subscribed(ONE), batch(11, block(3))],
    )
    await follow(feed, knows(FollowState.LIVE, 1, 2, 3), after_s=1)
    assert feed.asked == [({}, None, 0.0), ({RANK: 10}, ONE, 0.1)]


@pytest.mark.parametrize(("after_s", "state"), [(4.9, FollowState.LIVE), (5.1, FollowState.QUARANTINED)])
async def test_credit_outlives_a_connection_by_five_seconds(after_s: float, state: FollowState) -> None:
    feed = ScriptedFeed([Subscribed(ONE), snapshot(9, block(1)), StreamBroken("cut")], [StreamBroken("still")])
    await follow(feed, knows(state, 1), after_s=after_s)


async def test_what_was_quarantined_by_the_clock_is_believed_again_once_a_resume_proves_it() -> None:
    cut: list[Step] = [StreamBroken("still")]
    feed = ScriptedFeed([Subscribed(ONE), snapshot(9, block(1)), cut[0]], *[cut] * 14, [Subscribed(ONE)])
    await follow(feed, knows(FollowState.QUARANTINED, 1), after_s=8)
    feed = ScriptedFeed([Subscribed(ONE), snapshot(9, block(1)), cut[0]], *[cut] * 14, [Subscribed(ONE)])
    await follow(feed, knows(FollowState.LIVE, 1), after_s=60)


async def test_what_is_believed_on_trust_is_asked_about_twice_a_second_and_then_less_and_less() -> None:
    """An engine that died and is back within the grace must not be credited with what the dead one held for long."""
    cut: list[Step] = [StreamBroken("still")]
    feed = ScriptedFeed([Subscribed(ONE), snapshot(9, block(1)), *cut], cut)
    await follow(feed, knows(FollowState.QUARANTINED, 1), after_s=30)
    asked = [at_s for _, _, at_s in feed.asked]
    pauses = [later - sooner for sooner, later in itertools.pairwise(asked)]
    assert max(pause for pause, at_s in zip(pauses, asked, strict=False) if at_s < 5.0) < 0.51
    assert pauses[-1] == pytest.approx(5.0)


async def test_a_worker_that_is_back_from_the_dead_has_no_credit_for_what_it_held_before() -> None:
    cut: list[Step] = [StreamBroken("dead")]
    feed = ScriptedFeed(
        [Subscribed(ONE), snapshot(9, block(1)), *cut], *[cut] * 4, [], [Subscribed(TWO), snapshot(1, block(7))]
    )
    index = PrefixIndex(PrefixHasher(b"k"))
    async with Followers(index, dice=lambda: 0.0, wall=lambda: 1_000.0) as followers:
        followers.add(ANN, feed, model="m")
        await asyncio.sleep(1.5)
        assert followers.credit(ANN), "its connection alone was lost, as far as is known"
        followers.returned(ANN)
        assert not followers.credit(ANN)
        await asyncio.sleep(0.01)
        assert not followers.credit(ANN), "the new process has told nothing yet"
        followers.returned(ANN)
        await asyncio.sleep(0.01)
        knows(FollowState.LIVE, 7)(followers)
    assert feed.open == 0


async def test_what_was_seen_to_be_wrong_is_told_again_from_zero_at_once() -> None:
    feed = ScriptedFeed(
        [Subscribed(ONE), snapshot(9, block(1)), batch(10, block(2))], [Subscribed(ONE), snapshot(11, block(2))]
    )
    index = PrefixIndex(PrefixHasher(b"k"))
    async with Followers(index, dice=lambda: 0.0, wall=lambda: 1_000.0) as followers:
        followers.add(ANN, feed, model="m")
        await asyncio.sleep(1)
        followers.rebuild(ANN, "3 of 3 were wrong")
        knows(FollowState.SUBSCRIBING)(followers)
        assert followers.view(ANN).reason == "3 of 3 were wrong"
        await asyncio.sleep(0)
        await asyncio.sleep(0.001)
        knows(FollowState.LIVE, 2)(followers)
        assert followers.view(ANN).reason == ""
    assert feed.asked == [({}, None, 0.0), ({}, None, 1.0)]


async def test_a_source_is_left_before_it_is_entered_again() -> None:
    class OneAtATime(ScriptedFeed):
        inside = entered = 0

        async def __aenter__(self) -> Self:
            assert self.inside == 0
            await asyncio.sleep(0.1)
            self.inside += 1
            self.entered += 1
            return self

        async def __aexit__(
            self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
        ) -> None:
            await asyncio.sleep(0.1)
            self.inside -= 1

    feed = OneAtATime([Subscribed(ONE), snapshot(9, block(1))])
    async with Followers(PrefixIndex(PrefixHasher(b"k")), dice=lambda: 0.0, wall=lambda: 1_000.0) as followers:
        followers.add(ANN, feed, model="m")
        for pause_s in (0.05, 0.1, 1.0, 0.05, 1.0):  # while it is entered, just entered, live, left, and live again
            await asyncio.sleep(pause_s)
            followers.rebuild(ANN, "wrong")
        await asyncio.sleep(1)
        assert (followers.state(ANN), feed.inside) == (FollowState.LIVE, 1)
        followers.returned(ANN)
        entered = feed.entered
        await asyncio.sleep(1)
        assert (followers.state(ANN), feed.entered) == (FollowState.LIVE, entered), "a worker that is back is not left"


async def test_an_epoch_that_has_just_begun_may_turn_out_to_lack_something() -> None:
    cut: list[Step] = [Subscribed(ONE), snapshot(9, block(1)), StreamBroken("cut")]
    feed = ScriptedFeed(cut, [Subscribed(ONE)])
    async with Followers(PrefixIndex(PrefixHasher(b"k")), dice=lambda: 0.0, wall=lambda: 1_000.0) as followers:
        followers.add(ANN, feed, model="m")
        await asyncio.sleep(1.9)
        assert followers.standings[ANN].settling
        await asyncio.sleep(0.2)
        assert (len(feed.asked), followers.standings[ANN].settling) == (2, False), "a resume begins no epoch"


async def test_the_lag_is_from_the_engine_s_stamp_to_here() -> None:
    def check(followers: Followers) -> None:
        view = followers.view(ANN)
        assert (view.lag_s, view.worst_lag_s) == (0.25, 2.0)
        assert followers.lag_s(ANN) == 0.25

    stamped: list[Step] = [snapshot(9, block(1)), batch(10, block(2), at_s=998.0), batch(11, block(3), at_s=999.75)]
    await follow(ScriptedFeed([Subscribed(ONE), *stamped]), check)
    await follow(ScriptedFeed([Subscribed(ONE)]), lambda followers: followers.lag_s(ANN))


async def test_what_happens_to_an_entry_is_told_to_whoever_watches_it() -> None:
    cut: list[Step] = [StreamBroken("cut")]
    feed = ScriptedFeed([Subscribed(ONE), snapshot(9, block(1))])
    async with Followers(PrefixIndex(PrefixHasher(b"k")), dice=lambda: 0.0, wall=lambda: 1_000.0) as followers:
        followers.add(ANN, feed, model="m")
        await asyncio.sleep(1)
        quiet = followers.watch(ANN)
        followers.unwatch(ANN, quiet)
        flushed = followers.watch(ANN)
        followers.flushed(ANN)
        followers.unwatch(ANN, flushed)
        gone = followers.watch(ANN)
        followers.remove(ANN)
        followers.unwatch(ANN, gone)
        assert (quiet.disturbed, flushed.disturbed, gone.disturbed) == ("", "cleared", "cleared")
        followers.add(BOB, ScriptedFeed([Subscribed(ONE), snapshot(9, block(1)), *cut], cut), model="m")
        await asyncio.sleep(1)
        assert followers.watch(BOB).disturbed == "connection lost"


async def test_a_resume_in_another_epoch_forgets_everything_first() -> None:
    feed = ScriptedFeed(
        [Subscribed(ONE), snapshot(9, block(1)), StreamBroken("cut")], [Subscribed(TWO), snapshot(50, block(7))]
    )
    await follow(feed, knows(FollowState.LIVE, 7), after_s=1)


@pytest.mark.parametrize("end", [EpochEnded("restart"), SubscriberTooSlow("slow"), ResumeOutOfRange("old", TWO)])
async def test_a_lost_state_is_dropped_and_told_again_at_once(end: KvStreamError) -> None:
    feed = ScriptedFeed([Subscribed(ONE), snapshot(9, block(1)), end], [Subscribed(TWO), snapshot(50, block(7))])
    await follow(feed, knows(FollowState.LIVE, 7))
    assert feed.asked[1] == ({}, None, 0.0)


async def test_starting_over_without_progress_backs_off() -> None:
    feed = ScriptedFeed([ResumeOutOfRange("always")])
    await follow(feed, knows(FollowState.SUBSCRIBING), after_s=60)
    assert 10 < len(feed.asked) < 25


@pytest.mark.parametrize("end", [StreamUntranslatable("what"), StreamForbidden("key")])
async def test_what_only_an_operator_can_mend_is_quarantined_and_tried_seldom(end: KvStreamError) -> None:
    feed = ScriptedFeed([Subscribed(ONE), snapshot(9, block(1)), end], [end])
    await follow(feed, knows(FollowState.QUARANTINED), after_s=100)
    assert len(feed.asked) == 4


async def test_a_worker_without_events_is_unsupported_and_says_why() -> None:
    def check(followers: Followers) -> None:
        knows(FollowState.UNSUPPORTED)(followers)
        assert followers.standings[ANN].knowledge is KvKnowledge.UNTOLD
        assert followers.view(ANN).reason == "no events here"

    await follow(ScriptedFeed([EventsUnsupported("no events here")]), check)


async def test_a_gap_takes_the_credit_at_once_and_is_resumed_from() -> None:
    first: list[Step] = [Subscribed(None), batch(1, block(1)), batch(3, block(3))]
    await follow(ScriptedFeed(first), knows(FollowState.REPLAYING, 1))
    feed = ScriptedFeed(first, [Subscribed(None), batch(2, block(2)), batch(3, block(3))])
    await follow(feed, knows(FollowState.LIVE, 1, 2, 3), after_s=1)
    assert feed.asked[1][0] == {RANK: 1}


async def test_a_gap_that_the_server_does_not_fill_starts_over() -> None:
    feed = ScriptedFeed(
        [Subscribed(None), batch(1, block(1)), batch(3, block(3))],
        [Subscribed(None), batch(3, block(3))],
        [Subscribed(None), batch(3, block(3)), batch(4, block(4))],
    )
    await follow(feed, knows(FollowState.LIVE, 3, 4), after_s=5)
    assert [asked[0] for asked in feed.asked] == [{}, {RANK: 1}, {}]


async def test_a_repeated_batch_is_left_out_and_another_under_its_number_starts_over() -> None:
    twice = batch(1, block(1))
    await follow(ScriptedFeed([Subscribed(None), twice, twice]), knows(FollowState.LIVE, 1))
    feed = ScriptedFeed([Subscribed(None), twice, batch(1, block(8))], [Subscribed(None), batch(1, block(8))])
    await follow(feed, knows(FollowState.LIVE, 8), after_s=1)


async def test_a_server_that_never_accepts_is_given_up_after_a_while() -> None:
    feed = ScriptedFeed([])
    await follow(feed, lambda followers: followers.view(ANN).reason.index("no answer within 10 s"), after_s=11)


async def test_a_defect_met_in_one_stream_costs_that_worker_its_credit_and_no_more() -> None:
    feed = ScriptedFeed([Subscribed(ONE), snapshot(9, block(1)), RuntimeError("a defect")], [StreamBroken("x")])
    await follow(feed, knows(FollowState.QUARANTINED))


async def test_a_worker_added_again_starts_over_with_its_new_feed() -> None:
    index = PrefixIndex(PrefixHasher(b"k"))
    first = ScriptedFeed([Subscribed(ONE), snapshot(9, block(1))])
    second = ScriptedFeed([Subscribed(TWO), snapshot(9, block(2))])
    async with Followers(index) as followers:
        followers.add(ANN, first, model="m")
        await asyncio.sleep(0.01)
        followers.add(ANN, second, model="m")
        assert set(index.contents(ANN0)) == set()
        await asyncio.sleep(0.01)
        assert set(index.contents(ANN0)) == {2}
        assert (first.open, second.open) == (0, 1)
        followers.remove(ANN)
        followers.remove(ANN)
        assert followers.view(ANN).state == "unfollowed"


# --- flushes ----------------------------------------------------------------------------------------------


class QueuedFeed(OpenFeed):
    """A `KvFeed` that says what is put into it."""

    def __init__(self) -> None:
        self.items: asyncio.Queue[Step] = asyncio.Queue()

    async def subscribe(self, cursors: dict[Rank, int], epoch: Epoch | None) -> AsyncGenerator[FeedItem, None]:
        while True:
            item = await self.items.get()
            if isinstance(item, Exception):
                raise item
            yield item

    async def say(self, *items: Step) -> None:
        for item in items:
            self.items.put_nowait(item)
        with suppress(TimeoutError):
            await asyncio.sleep(0.01)


async def test_old_batches_after_a_flush_are_kept_out_until_its_clear() -> None:
    """1. A flush is answered. 2. A batch from before it arrives. 3. Its clear arrives, with a store behind it."""
    index, feed = PrefixIndex(PrefixHasher(b"k")), QueuedFeed()
    async with Followers(index, wall=lambda: 1_000.0) as followers:
        followers.add(ANN, feed, model="m")
        await feed.say(Subscribed(ONE), snapshot(9, block(1)))
        followers.flushed(ANN)
        assert not index.contents(ANN0)
        await feed.say(batch(10, block(2), at_s=999.0))
        assert not index.contents(ANN0)
        await feed.say(batch(11, block(3), CacheCleared(), block(4), at_s=999.5), batch(12, block(5), at_s=999.6))
        assert set(index.contents(ANN0)) == {4, 5}


async def test_a_batch_stamped_well_after_the_answer_passes_without_a_clear() -> None:
    index, feed = PrefixIndex(PrefixHasher(b"k")), QueuedFeed()
    async with Followers(index, wall=lambda: 1_000.0) as followers:
        followers.add(ANN, feed, model="m")
        await feed.say(Subscribed(ONE), snapshot(9, block(1)))
        followers.flushed(ANN)
        await feed.say(batch(10, block(2), at_s=1_003.0))
        assert set(index.contents(ANN0)) == {2}


async def test_if_anything_was_dropped_before_such_a_batch_all_is_told_again() -> None:
    index, feed = PrefixIndex(PrefixHasher(b"k")), QueuedFeed()
    async with Followers(index, wall=lambda: 1_000.0) as followers:
        followers.add(ANN, feed, model="m")
        await feed.say(Subscribed(ONE), snapshot(9, block(1)))
        followers.flushed(ANN)
        await feed.say(batch(10, block(2), at_s=1_001.0), batch(11, block(3), at_s=1_003.0))
        await feed.say(Subscribed(ONE), snapshot(11, block(2), block(3)))
        assert (followers.state(ANN), set(index.contents(ANN0))) == (FollowState.LIVE, {2, 3})


async def test_a_clear_that_came_while_the_flush_was_being_answered_needs_no_barrier() -> None:
    index, feed = PrefixIndex(PrefixHasher(b"k")), QueuedFeed()
    async with Followers(index, wall=lambda: 1_000.0) as followers:
        followers.add(ANN, feed, model="m")
        await feed.say(Subscribed(ONE), snapshot(9, block(1)))
        ordered_s = asyncio.get_running_loop().time()
        await feed.say(batch(10, CacheCleared()), batch(11, block(2)))
        followers.flushed(ANN, ordered_s=ordered_s)
        assert set(index.contents(ANN0)) == {2}
        await feed.say(batch(12, block(3)))
        assert set(index.contents(ANN0)) == {2, 3}


async def test_a_worker_is_incomplete_from_a_late_beginning_until_its_next_clear() -> None:
    index, feed = PrefixIndex(PrefixHasher(b"k")), QueuedFeed()
    async with Followers(index) as followers:
        assert not followers.incomplete(ANN)
        followers.add(ANN, feed, model="m")
        await feed.say(Subscribed(ONE), snapshot(9, inner(1), unknown=7), batch(10, inner(1)))
        assert followers.incomplete(ANN)
        assert index.contents(ANN0) == {1: {Tier.DEVICE: 1}}, "told twice, and perhaps held once"
        await feed.say(batch(11, CacheCleared(), inner(2)), batch(12, inner(2)))
        assert not followers.incomplete(ANN)
        assert index.contents(ANN0) == {2: {Tier.DEVICE: 2}}


async def test_one_incomplete_rank_makes_a_worker_incomplete() -> None:
    index, feed = PrefixIndex(PrefixHasher(b"k")), QueuedFeed()
    async with Followers(index) as followers:
        followers.add(ANN, feed, model="m")
        other = SnapshotChunk(0, 1, 2, batch(5, CacheCleared(), block(1), rank=Rank(1)))
        await feed.say(Subscribed(ONE), snapshot(9, block(1)), other)
        assert followers.incomplete(ANN)
        await feed.say(batch(10, CacheCleared()))
        assert followers.incomplete(ANN)
        await feed.say(batch(6, CacheCleared(), rank=Rank(1)))
        assert not followers.incomplete(ANN)


async def test_a_new_epoch_decides_anew_whether_a_worker_is_incomplete() -> None:
    index, feed = PrefixIndex(PrefixHasher(b"k")), QueuedFeed()
    async with Followers(index) as followers:
        followers.add(ANN, feed, model="m")
        await feed.say(Subscribed(ONE), snapshot(9, inner(1), unknown=7), EpochEnded("restart"))
        await feed.say(Subscribed(TWO), snapshot(50, inner(1)), batch(51, inner(1)))
        assert not followers.incomplete(ANN)
        assert index.contents(ANN0) == {1: {Tier.DEVICE: 2}}


async def test_an_obeyed_flush_makes_a_worker_complete_once_its_barrier_is_passed() -> None:
    index, feed = PrefixIndex(PrefixHasher(b"k")), QueuedFeed()
    async with Followers(index, wall=lambda: 1_000.0) as followers:
        followers.add(ANN, feed, model="m")
        await feed.say(Subscribed(ONE), snapshot(9, inner(1), unknown=7))
        followers.flushed(ANN)
        assert followers.incomplete(ANN)
        await feed.say(batch(10, inner(2), inner(2), at_s=1_003.0))
        assert not followers.incomplete(ANN)
        assert index.contents(ANN0) == {2: {Tier.DEVICE: 2}}


async def test_a_snapshot_behind_a_barrier_is_not_believed() -> None:
    index, feed = PrefixIndex(PrefixHasher(b"k")), QueuedFeed()
    async with Followers(index, wall=lambda: 1_000.0) as followers:
        followers.add(ANN, feed, model="m")
        await feed.say(Subscribed(ONE), snapshot(9, block(1)))
        followers.flushed(ANN)
        await feed.say(SubscriberTooSlow("x"), Subscribed(ONE), snapshot(9, block(1)))
        assert not index.contents(ANN0)
        await feed.say(batch(10, CacheCleared(), block(2)))
        assert set(index.contents(ANN0)) == {2}


async def test_a_snapshot_with_a_batch_of_after_the_flush_in_it_is_believed() -> None:
    """1. A flush is answered. 2. The stream breaks, and its clear is lost with it. 3. A snapshot tells what is held."""
    index, feed = PrefixIndex(PrefixHasher(b"k")), QueuedFeed()
    async with Followers(index, wall=lambda: 1_000.0) as followers:
        followers.add(ANN, feed, model="m")
        await feed.say(Subscribed(ONE), snapshot(9, block(1)))
        followers.flushed(ANN)
        await feed.say(SubscriberTooSlow("x"), Subscribed(ONE), snapshot(9, block(1), at_s=1_002.0))
        assert (followers.incomplete(ANN), set(index.contents(ANN0))) == (True, set())
        latest = [snapshot(11, block(2), count=2, at_s=1_002.1), snapshot(12, block(3), index=1, count=2, at_s=1_002.1)]
        await feed.say(SubscriberTooSlow("x"), Subscribed(ONE), *latest)
        assert (followers.incomplete(ANN), set(index.contents(ANN0))) == (False, {2, 3})
        await feed.say(batch(13, block(4), at_s=1_002.2))
        assert set(index.contents(ANN0)) == {2, 3, 4}


async def test_of_a_foreign_snapshot_nobody_knows_when_its_batches_were_stamped() -> None:
    index, feed = PrefixIndex(PrefixHasher(b"k")), QueuedFeed()
    async with Followers(index, wall=lambda: 1_000.0) as followers:
        followers.add(ANN, feed, model="m")
        await feed.say(Subscribed(None), snapshot(9, block(1)))
        followers.flushed(ANN)
        await feed.say(SubscriberTooSlow("x"), Subscribed(None), snapshot(9, block(1), at_s=1_003.0))
        assert not index.contents(ANN0)


async def test_a_snapshot_of_nothing_behind_a_barrier_leaves_nothing_unknown() -> None:
    index, feed = PrefixIndex(PrefixHasher(b"k")), QueuedFeed()
    async with Followers(index, wall=lambda: 1_000.0) as followers:
        followers.add(ANN, feed, model="m")
        await feed.say(Subscribed(ONE), snapshot(9, block(1)))
        followers.flushed(ANN)
        await feed.say(SubscriberTooSlow("x"), Subscribed(ONE), snapshot(9))
        assert not followers.incomplete(ANN)
        await feed.say(SubscriberTooSlow("x"), Subscribed(ONE), snapshot(9, unknown=3))
        assert followers.incomplete(ANN)


async def test_a_worker_that_may_obey_a_flush_unheard_has_no_credit_until_its_events_tell() -> None:
    """1. A flush was sent and not answered. 2. An old batch comes. 3. The engine obeys, and tells it with its step."""
    index, feed = PrefixIndex(PrefixHasher(b"k")), QueuedFeed()
    async with Followers(index, wall=lambda: 1_000.0) as followers:
        followers.add(ANN, feed, model="m")
        await feed.say(Subscribed(ONE), snapshot(9, block(1)))
        watch = followers.watch(ANN)
        followers.doubted(ANN, ordered_s=asyncio.get_running_loop().time())
        followers.doubted(WorkerId("a stranger"), ordered_s=0.0)
        assert (followers.incomplete(ANN), watch.disturbed) == (True, "cleared")
        await feed.say(batch(10, block(2), at_s=1_060.0))
        assert not index.contents(ANN0)
        await feed.say(batch(11, CacheCleared(), block(3), at_s=1_060.5))
        assert (followers.incomplete(ANN), set(index.contents(ANN0))) == (False, {3})


@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_worker_that_answers_on_without_events_did_not_obey_and_is_told_again(ranks: int) -> None:
    """Prompts that are cached whole have no events. Of several ranks an answer tells of one only."""
    index, feed = PrefixIndex(PrefixHasher(b"k")), QueuedFeed()
    clock = asyncio.get_running_loop().time
    async with Followers(index, wall=clock) as followers:
        followers.add(ANN, feed, model="m")
        states = [SnapshotChunk(0, 1, 0, batch(9, CacheCleared(), block(1), rank=Rank(rank))) for rank in range(ranks)]
        await feed.say(Subscribed(ONE), *states)
        followers.doubted(ANN, ordered_s=clock())
        for _ in range(3):
            await asyncio.sleep(1.0)
            watch = followers.watch(ANN)
            await asyncio.sleep(0.1)
            followers.unwatch(ANN, watch)
            followers.answered(ANN, watch)
        assert not index.contents(ANN0)
        followers.answered(WorkerId("a stranger"), watch)
        if ranks == 1:
            await feed.say(Subscribed(ONE), *states)
            assert (followers.state(ANN), set(index.contents(ANN0))) == (FollowState.LIVE, {1})
        assert followers.incomplete(ANN) is (ranks > 1)


async def test_a_worker_that_went_on_and_did_not_obey_is_told_again_whole() -> None:
    index, feed = PrefixIndex(PrefixHasher(b"k")), QueuedFeed()
    async with Followers(index, wall=lambda: 1_000.0) as followers:
        followers.add(ANN, feed, model="m")
        await feed.say(Subscribed(ONE), snapshot(9, block(1)))
        followers.doubted(ANN, ordered_s=asyncio.get_running_loop().time())
        await feed.say(batch(10, block(2), at_s=1_060.0), batch(11, block(3), at_s=1_061.1))
        await feed.say(Subscribed(ONE), snapshot(11, block(1), block(2), block(3), at_s=1_061.1))
        assert (followers.state(ANN), set(index.contents(ANN0))) == (FollowState.LIVE, {1, 2, 3})
        assert not followers.incomplete(ANN)


async def test_routing_is_told_what_is_known_quarantined_or_not_told() -> None:
    index, feed = PrefixIndex(PrefixHasher(b"k")), QueuedFeed()
    async with Followers(index) as followers:
        assert ANN not in followers.standings
        followers.add(ANN, feed, model="m")
        assert followers.standings[ANN].knowledge is KvKnowledge.QUARANTINED
        await feed.say(Subscribed(ONE), snapshot(9, block(1)))
        assert followers.standings[ANN].knowledge is KvKnowledge.KNOWN
        followers.flushed(WorkerId("a stranger"))


class BreakingFeed(ScriptedFeed):
    """A `KvFeed` that has a defect, which is found as it is left."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        raise RuntimeError("a defect")


async def test_a_feed_that_fails_unforeseen_as_it_is_left_keeps_nobody() -> None:
    feed = BreakingFeed([Subscribed(ONE)])
    async with asyncio.timeout(600.0):
        await follow(feed, lambda followers: followers.remove(ANN))
    assert len(feed.asked) == 1
