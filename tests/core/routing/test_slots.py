"""How long a request waits for a slot: what must hold of any count, and what answers teach."""

import math
import random
from heapq import heappop, heappush

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvherd.core.routing.slots import UNTAUGHT_S, SlotTime, slot_wait_s

COUNTS = st.integers(0, 100_000)


@given(COUNTS, COUNTS, st.floats(0.0, 1e6))
def test_a_wait_is_none_while_a_slot_is_free_and_never_less_for_who_comes_later(
    ahead: int, slots: int, slot_s: float
) -> None:
    wait_s = slot_wait_s(ahead, slots, slot_s)
    assert math.isfinite(wait_s)
    assert wait_s >= 0.0
    assert slot_wait_s(ahead + 1, slots, slot_s) >= wait_s
    if ahead < slots or slots == 0:
        assert wait_s == 0.0
    elif slot_s > 1e-9:
        assert wait_s > 0.0


def test_the_first_in_line_waits_for_one_of_all_slots_to_end() -> None:
    assert [slot_wait_s(ahead, 4, 8.0) for ahead in (3, 4, 5, 8)] == [0.0, 2.0, 4.0, 10.0]


@given(st.lists(st.tuples(st.floats(-1.0, 1e4), st.integers(0, 200), st.integers(0, 64)), max_size=20))
def test_what_is_learned_is_a_time_whatever_came(answers: list[tuple[float, int, int]]) -> None:
    one = SlotTime()
    for seconds, ahead, slots in answers:
        one.observe(seconds, ahead, slots)
    assert math.isfinite(one.seconds)
    assert one.seconds > 0.0
    full = [seconds for seconds, ahead, slots in answers if seconds > 0 and 0 < slots <= ahead + 1]
    assert one.unknown == (not full)
    assert not full or one.seconds <= max(full) * 1.001


def test_until_something_is_learned_it_is_as_at_its_peers() -> None:
    peers, one, other = SlotTime(), SlotTime(), SlotTime()
    one.peers = other.peers = peers
    assert (one.seconds, one.unknown) == (UNTAUGHT_S, True)
    other.observe(2.0, 3, 4)
    assert (one.seconds, one.unknown) == (2.0, False)
    one.observe(6.0, 3, 4)
    assert (one.seconds, other.seconds) == (6.0, 2.0)


def test_an_answer_that_was_made_among_few_says_no_more_than_how_long_it_takes_at_least() -> None:
    peers, one = SlotTime(), SlotTime()
    one.peers = peers
    for _ in range(99):
        one.observe(0.2, 0, 32)
    assert (one.seconds, one.unknown) == (UNTAUGHT_S, True), "all slots in use would make it slower"
    for _ in range(99):
        one.observe(60.0, 3, 32)
    assert one.seconds == pytest.approx(60.0, rel=0.01)
    one.observe(8.0, 31, 32)
    assert (one.seconds, one.unknown) == (8.0, False)


@pytest.mark.parametrize("standing", [0, 3, 12])
def test_a_worker_that_always_has_a_line_teaches_how_long_its_slots_are_kept(standing: int) -> None:
    """Of answers that end at chance, after 10 s in the mean, seen with their wait."""
    dice, slots, one = random.Random(3), 8, SlotTime()
    learned, ends = [], [0.0] * slots
    for turn in range(4_000):
        sent_s = now_s = heappop(ends)
        waited_s = slot_wait_s(slots + standing - 1, slots, 10.0) if standing else 0.0
        ended_s = now_s + dice.expovariate(0.1)
        heappush(ends, ended_s)
        one.observe(ended_s - sent_s + waited_s, slots - 1 + standing, slots)
        if turn > 100:
            learned.append(one.seconds)
    assert sum(learned) / len(learned) == pytest.approx(10.0, rel=0.1)
