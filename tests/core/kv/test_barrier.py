"""After an obeyed flush nothing that it wiped out is believed again, whichever way its engine tells of it."""

from dataclasses import dataclass

import pytest
from hypothesis import find, given, settings
from hypothesis import strategies as st

from kvherd.core.ids import EngineHash, Rank
from kvherd.core.kv.barrier import Current, FlushBarrier, Outdated, Unsure
from kvherd.core.kv.events import BlocksRemoved, BlocksStored, CacheCleared, KvEvent, KvEventBatch

ZERO, ONE = Rank(0), Rank(1)


def stored(number: int) -> BlocksStored:
    return BlocksStored((EngineHash(number),), None, (number,), 1)


def batch(stamp_s: float, *events: KvEvent, rank: Rank = ZERO) -> KvEventBatch:
    return KvEventBatch(0, stamp_s, rank, events)


def flushed(*, ordered_s: float = 10.0, answered_s: float = 10.0, skew_s: float = 2.0) -> FlushBarrier:
    barrier = FlushBarrier(skew_s)
    assert barrier.flushed([ZERO], ordered_s=ordered_s, answered_s=answered_s) == {ZERO}
    return barrier


def test_without_a_flush_everything_passes_as_it_is() -> None:
    told = batch(1.0, stored(1), CacheCleared(), stored(2))
    assert FlushBarrier().judge(told, now_s=1.0) == Current(told.events)


def test_what_was_on_its_way_is_dropped_until_the_clear_that_comes_first_in_the_next_step_s_batch() -> None:
    """vLLM and SGLang."""
    barrier = flushed()
    assert barrier.judge(batch(9.9, stored(1)), now_s=10.1) == Outdated()
    assert barrier.judge(batch(10.5, CacheCleared(), stored(2)), now_s=10.5) == Current((CacheCleared(), stored(2)))
    assert barrier.judge(batch(10.6, stored(3)), now_s=10.6) == Current((stored(3),))


def test_a_clear_that_came_before_the_answer_is_not_made_twice() -> None:
    """kvherd's engine publishes it at once; what was stored since is held."""
    barrier = FlushBarrier()
    barrier.judge(batch(10.1, CacheCleared()), now_s=10.1)
    assert barrier.flushed([ZERO, ONE], ordered_s=10.0, answered_s=10.2) == {ONE}
    assert not barrier.holds_back(ZERO)
    assert barrier.judge(batch(10.1, stored(1)), now_s=10.3) == Current((stored(1),))


def test_a_clear_of_before_the_order_counts_for_nothing() -> None:
    barrier = FlushBarrier()
    barrier.judge(batch(9.0, CacheCleared()), now_s=9.0)
    assert barrier.flushed([ZERO], ordered_s=10.0, answered_s=10.2) == {ZERO}


def test_the_clear_of_one_flush_is_not_taken_for_that_of_the_next() -> None:
    """1. A flush is answered. 2. Its clear is on its way, with a store. 3. The next flush is answered. 4. That batch
    arrives."""
    barrier = flushed()
    assert barrier.flushed([ZERO], ordered_s=20.0, answered_s=20.1) == {ZERO}
    assert barrier.judge(batch(19.9, CacheCleared(), stored(1)), now_s=20.2) == Outdated()
    assert barrier.owes
    assert barrier.judge(batch(20.3, CacheCleared(), stored(2)), now_s=20.3) == Current((CacheCleared(), stored(2)))
    late = flushed()
    late.flushed([ZERO], ordered_s=20.0, answered_s=20.1)
    assert late.judge(batch(30.0, CacheCleared(), stored(3)), now_s=30.0) == Current((CacheCleared(), stored(3)))


def test_a_clear_beyond_those_owed_is_the_next_flush_s_own() -> None:
    barrier = flushed()
    barrier.judge(batch(20.1, CacheCleared(), CacheCleared()), now_s=20.1)
    assert barrier.flushed([ZERO], ordered_s=20.0, answered_s=20.2) == set()


def test_of_a_batch_with_clears_only_what_follows_the_last_holds() -> None:
    barrier = flushed()
    told = batch(10.0, CacheCleared(), stored(1), CacheCleared(), stored(2))
    assert barrier.judge(told, now_s=10.0) == Current((CacheCleared(), stored(2)))


def test_a_batch_stamped_later_than_clocks_can_differ_is_of_after_the_flush() -> None:
    barrier = flushed()
    assert barrier.judge(batch(12.1, stored(1)), now_s=12.2) == Current((stored(1),), anew=True)


def test_a_later_batch_after_dropped_ones_leaves_what_is_held_unknown() -> None:
    barrier = flushed()
    barrier.judge(batch(11.0, stored(1)), now_s=11.0)
    assert barrier.judge(batch(12.1, stored(2)), now_s=12.1) == Unsure()
    assert not barrier.holds_back(ZERO)


def test_a_snapshot_that_was_not_taken_counts_as_dropped() -> None:
    barrier = flushed()
    assert barrier.holds_back(ZERO)
    barrier.drop(ZERO)
    assert barrier.judge(batch(12.1, stored(2)), now_s=12.1) == Unsure()


def test_a_snapshot_holds_once_its_last_batch_is_stamped_later_than_clocks_can_differ() -> None:
    barrier = flushed()
    barrier.drop(ZERO)
    assert (barrier.judge_snapshot(ZERO, 12.0), barrier.owes) == (False, True)
    assert (barrier.judge_snapshot(ZERO, 12.1), barrier.owes) == (True, False)
    assert barrier.judge(batch(11.0, stored(1)), now_s=12.2) == Current((stored(1),))
    assert FlushBarrier().judge_snapshot(ZERO, 0.0)


def test_ranks_pass_one_by_one() -> None:
    barrier = FlushBarrier()
    barrier.flushed([ZERO, ONE], ordered_s=1.0, answered_s=1.0)
    barrier.judge(batch(1.0, CacheCleared(), rank=ONE), now_s=1.0)
    assert (barrier.holds_back(ZERO), barrier.holds_back(ONE)) == (True, False)


def doubted(*, given_up_s: float = 10.0) -> FlushBarrier:
    barrier = FlushBarrier(skew_s=2.0, settle_s=1.0)
    assert barrier.doubted([ZERO], ordered_s=10.0, given_up_s=given_up_s) == {ZERO}
    return barrier


def test_a_rank_in_doubt_holds_what_it_tells_after_a_clear() -> None:
    barrier = doubted()
    assert barrier.owes
    assert barrier.judge(batch(11.0, stored(1)), now_s=11.0) == Outdated()
    assert barrier.judge(batch(11.5, CacheCleared(), stored(2)), now_s=11.5) == Current((CacheCleared(), stored(2)))
    assert not barrier.owes


def test_an_engine_that_stood_still_finds_the_order_after_its_first_step() -> None:
    """1. A flush is given up. 2. A minute later the engine goes on with a step of before. 3. Then it obeys."""
    barrier = doubted()
    assert barrier.judge(batch(70.0, stored(1)), now_s=70.0) == Outdated()
    assert barrier.judge(batch(70.1, CacheCleared(), stored(2)), now_s=70.1) == Current((CacheCleared(), stored(2)))


def test_an_engine_that_steps_on_without_a_clear_did_not_obey_and_what_it_holds_is_told_again() -> None:
    barrier = doubted()
    assert barrier.judge(batch(70.0, stored(1)), now_s=70.0) == Outdated()
    assert barrier.judge(batch(71.1, stored(2)), now_s=71.1) == Unsure()
    assert not barrier.holds_back(ZERO)
    assert barrier.judge_snapshot(ZERO, 71.1)


def test_a_snapshot_of_a_rank_in_doubt_holds_once_the_engine_has_stepped_for_a_while() -> None:
    barrier = doubted()
    assert not barrier.judge_snapshot(ZERO, 11.9)
    assert not barrier.judge_snapshot(ZERO, 70.0)
    assert barrier.judge_snapshot(ZERO, 71.1)
    assert not barrier.owes


def test_answers_to_prompts_that_are_cached_whole_tell_that_an_engine_steps_on() -> None:
    barrier = doubted()
    assert not barrier.answered(sent_s=9.0, now_s=70.0), "it was sent before the flush was given up"
    assert not barrier.answered(sent_s=69.0, now_s=70.0)
    assert not barrier.answered(sent_s=70.5, now_s=71.0)
    assert (barrier.in_doubt, barrier.owes) == (True, True)
    assert barrier.answered(sent_s=71.0, now_s=71.1)
    assert (barrier.in_doubt, barrier.owes) == (False, False)
    assert barrier.judge_snapshot(ZERO, 11.0)
    assert barrier.judge(batch(11.0, stored(1)), now_s=72.0) == Current((stored(1),))
    assert not barrier.answered(sent_s=80.0, now_s=90.0)


def test_once_a_clear_has_told_that_it_obeyed_answers_tell_nothing_more() -> None:
    barrier = doubted()
    barrier.judge(batch(11.0, CacheCleared(), stored(1)), now_s=11.0)
    assert not barrier.in_doubt
    assert not barrier.answered(sent_s=20.0, now_s=21.0)
    assert not barrier.answered(sent_s=30.0, now_s=31.0)


def test_answers_say_nothing_where_no_flush_is_in_doubt() -> None:
    barrier = flushed()
    assert not barrier.in_doubt
    assert not barrier.answered(sent_s=20.0, now_s=21.0)
    assert not barrier.answered(sent_s=30.0, now_s=31.0)
    assert barrier.holds_back(ZERO)


def test_an_answered_flush_ends_the_doubt_about_the_one_before() -> None:
    barrier = doubted()
    barrier.flushed([ZERO], ordered_s=20.0, answered_s=20.0)
    assert barrier.judge(batch(22.1, stored(1)), now_s=22.1) == Current((stored(1),), anew=True)


def test_a_clear_since_the_order_says_that_it_was_obeyed() -> None:
    barrier = FlushBarrier()
    barrier.judge(batch(10.5, CacheCleared()), now_s=10.5)
    assert barrier.doubted([ZERO], ordered_s=10.0, given_up_s=12.0) == set()
    assert barrier.judge(batch(12.0, stored(1)), now_s=12.0) == Current((stored(1),))


@given(
    steps_s=st.lists(st.floats(10.1, 30.0), min_size=1, max_size=12, unique=True).map(sorted),
    obeyed_after_s=st.floats(0.0, 1.0),
    ahead_s=st.floats(0.0, 2.0),
)
def test_a_rank_is_not_believed_while_its_engine_may_find_an_order_that_was_given_up(
    steps_s: list[float], obeyed_after_s: float, ahead_s: float
) -> None:
    """The engine goes on with the first of `steps_s`, finds the order so long after it, and tells it with a step."""
    barrier = doubted()
    obeyed_s = steps_s[0] + obeyed_after_s
    told = False
    for step_s in steps_s:
        clears = step_s >= obeyed_s and not told
        told = told or clears
        events = (CacheCleared(), stored(1)) if clears else (stored(1),)
        verdict = barrier.judge(batch(step_s + ahead_s, *events), now_s=step_s)
        if not told:
            assert verdict == Outdated()
        elif clears:
            assert verdict == Current(events)


# --- any history -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class History:
    """Batches in the engine's order, one a second; block n is stored by batch n. The flush comes before batch
    `obeyed`; by the time of its answer we have read `read`, when it was ordered `read_before`.
    """

    batches: list[KvEventBatch]
    obeyed: int
    read_before: int
    read: int

    @property
    def answered_s(self) -> float:
        return float(max(self.obeyed, self.read))


@st.composite
def histories(draw: st.DrawFn, tells: str) -> History:
    count = draw(st.integers(1, 12))
    obeyed = draw(st.integers(0, count))
    ahead_s = draw(st.floats(0, 2))
    removed = draw(st.sets(st.integers(0, count - 1)))
    batches = []
    for number in range(count):
        events: list[KvEvent] = [stored(number)]
        if number and number - 1 in removed:
            events.append(BlocksRemoved((EngineHash(number - 1),)))
        if tells == "first in the next batch" and number == obeyed:
            events.insert(0, CacheCleared())
        batches.append(batch(number + 0.5 + ahead_s, *events))
    if tells == "at once":
        batches.insert(obeyed, batch(obeyed + ahead_s, CacheCleared()))
    read_before = draw(st.integers(0, obeyed))
    return History(batches, obeyed, read_before, draw(st.integers(read_before, len(batches))))


def apply(held: set[int], events: tuple[KvEvent, ...]) -> None:
    for event in events:
        match event:
            case BlocksStored():
                held.update(event.block_hashes)
            case BlocksRemoved():
                held.difference_update(event.block_hashes)
            case CacheCleared():
                held.clear()


class Reader:
    """Who follows a history through a barrier, beside what the engine really holds."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.barrier = FlushBarrier(2.0)
        self.held: set[int] = set()
        self.truth: set[int] = set()
        self.sure = True

    def read_all(self) -> None:
        for number, one in enumerate(self.history.batches):
            self._between_batches(number)
            self._judge(number, one)
            apply(self.truth, one.events)
            if number >= self.history.read:
                assert not {block for block in self.held if block < self.history.obeyed}, "wiped out, and believed"
        self._between_batches(len(self.history.batches))

    def _between_batches(self, number: int) -> None:
        if number == self.history.obeyed:
            self.truth.clear()
        if number == self.history.read:
            ordered_s, answered_s = float(self.history.read_before), self.history.answered_s
            if self.barrier.flushed([ZERO], ordered_s=ordered_s, answered_s=answered_s):
                self.held.clear()

    def _judge(self, number: int, one: KvEventBatch) -> None:
        match self.barrier.judge(one, now_s=float(number)):
            case Current(events, anew):
                if anew:
                    self.held.clear()
                apply(self.held, events)
            case Outdated():
                pass
            case Unsure():
                self.sure = False


@pytest.mark.parametrize("tells", ["first in the next batch", "at once", "never"])
def test_nothing_of_before_a_flush_is_believed_after_it_and_in_the_end_all_is_right_or_known_not_to_be(
    tells: str,
) -> None:
    @given(histories(tells))
    def holds(history: History) -> None:
        reader = Reader(history)
        reader.read_all()
        behind = reader.barrier.holds_back(ZERO)
        if behind:
            assert not reader.held
        if tells == "never":
            assert reader.held <= reader.truth or not reader.sure
        else:
            assert reader.sure
            assert reader.held == reader.truth or behind

    holds()


def test_the_histories_reach_every_verdict() -> None:
    for sure, behind, held in ((True, True, False), (True, False, True), (False, False, False)):

        def is_met(history: History, wanted: tuple[bool, bool, bool] = (sure, behind, held)) -> bool:
            reader = Reader(history)
            reader.read_all()
            return (reader.sure, reader.barrier.holds_back(ZERO), bool(reader.held)) == wanted

        find(histories("never"), is_met, settings=settings(max_examples=100_000, derandomize=True, database=None))
