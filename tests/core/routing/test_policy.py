"""Which worker gets a request: what must hold for any fleet, and what a reader should see."""

import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvherd.core.errors import OptionInvalid
from kvherd.core.ids import WorkerId
from kvherd.core.routing.candidate import Ask, Candidate
from kvherd.core.routing.policy import POLICY_NAMES, Weights, make_policy

ASK = Ask("m", prompt_tokens=1000)


def worker(name: str, **known: object) -> Candidate:
    return Candidate(WorkerId(name), ("m",), **known)  # type: ignore[arg-type]


@st.composite
def fleets(draw: st.DrawFn) -> list[Candidate]:
    names = draw(st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=8))
    return [
        worker(
            name,
            unavailable=draw(st.sampled_from(["", "", "is down"])),
            in_flight=draw(st.integers(0, 5)),
            backlog_s=draw(st.floats(0, 10)),
            slot_wait_s=draw(st.sampled_from([0.0, 0.0, 0.5, 20.0])),
            matched_tokens=draw(st.integers(0, 1000)),
            evicted_tokens=draw(st.integers(0, 1000)),
            lru_age_s=draw(st.floats(0, 1000)),
            prefill_tokens_per_s=draw(st.floats(1, 1e5)),
        )
        for name in names
    ]


@given(st.sampled_from(POLICY_NAMES), fleets(), st.integers(0, 99))
def test_every_policy_takes_one_that_is_available_or_says_why_none_is(
    name: str, fleet: list[Candidate], seed: int
) -> None:
    explanation = make_policy(name).choose(ASK, fleet, random.Random(seed).random)
    available = [one for one in fleet if not one.unavailable]
    assert (explanation.chosen in available) if available else (explanation.chosen is None)
    told = [one.candidate for one in explanation.costed] + [one.candidate for one in explanation.ruled_out]
    assert Counter(one.worker for one in told) == Counter(one.worker for one in fleet)
    assert all(one.reason for one in explanation.ruled_out)


@given(fleets(), st.integers(0, 99))
def test_kv_never_takes_a_worker_that_costs_more_than_another(fleet: list[Candidate], seed: int) -> None:
    explanation = make_policy("kv").choose(ASK, fleet, random.Random(seed).random)
    costs = {one.candidate.worker: one.total_s for one in explanation.costed}
    if explanation.chosen is not None:
        assert costs[explanation.chosen.worker] == min(costs.values())


@given(fleets(), st.integers(1, 5))
def test_round_robin_gives_each_its_turn(fleet: list[Candidate], rounds: int) -> None:
    policy = make_policy("round_robin")
    available = [one for one in fleet if not one.unavailable]
    taken = [policy.choose(ASK, fleet, lambda: 0.0).chosen for _ in range(rounds * len(available))]
    assert Counter(one.worker for one in taken if one) == {one.worker: rounds for one in available}


@given(fleets(), st.text(min_size=1, max_size=8))
def test_consistent_hash_moves_only_the_asks_of_a_worker_that_left(fleet: list[Candidate], user: str) -> None:
    policy = make_policy("consistent_hash")
    ask = Ask("m", affinity=user)
    before = policy.choose(ask, fleet, lambda: 0.0).chosen
    for gone in fleet:
        after = policy.choose(ask, [one for one in fleet if one is not gone], lambda: 0.0).chosen
        assert before in (after, gone)


@given(fleets(), st.floats(0, 1, exclude_max=True))
def test_least_load_takes_the_least_loaded_when_no_prefill_waits(fleet: list[Candidate], dice: float) -> None:
    idle = [worker(one.worker, in_flight=one.in_flight) for one in fleet]
    chosen = make_policy("least_load").choose(ASK, idle, lambda: dice).chosen
    assert chosen is None or chosen.load == min(one.load for one in idle)


def test_kv_goes_where_the_prefix_is() -> None:
    fleet = [worker("cold"), worker("warm", matched_tokens=900, in_flight=3)]
    explanation = make_policy("kv").choose(ASK, fleet, lambda: 0.0)
    assert explanation.chosen == fleet[1]
    assert dict(explanation.costed[0].costs) == {"backlog": 0.0, "slots": 0.0, "uncached": 3.0, "evicted": 0.0}
    assert dict(explanation.costed[1].costs)["uncached"] == pytest.approx(0.3)


def test_kv_leaves_the_prefix_when_waiting_for_it_takes_longer() -> None:
    fleet = [worker("cold"), worker("warm", matched_tokens=900, backlog_s=2.8)]
    assert make_policy("kv").choose(ASK, fleet, lambda: 0.0).chosen == fleet[0]


@given(fleets(), st.floats(0.001, 1e6), st.integers(0, 99))
def test_with_an_equal_cache_a_full_worker_is_never_cheaper_than_one_with_a_free_slot(
    fleet: list[Candidate], wait_s: float, seed: int
) -> None:
    for name in ("kv", "prefix_tree"):
        for one in fleet:
            known = {key: getattr(one, key) for key in Candidate.__slots__ if key not in ("worker", "slot_wait_s")}
            free = Candidate(WorkerId("free"), **known)
            full = Candidate(WorkerId("full"), slot_wait_s=wait_s, **known)
            explained = make_policy(name).choose(ASK, [full, free], random.Random(seed).random)
            costs = {each.candidate.worker: each.total_s for each in explained.costed}
            assert all(math.isfinite(cost) and cost >= 0.0 for cost in costs.values())
            if costs:
                assert costs[free.worker] <= costs[full.worker]
                assert costs[full.worker] >= wait_s * 0.999, "nothing begins there before a slot is free"


def test_kv_leaves_the_prefix_when_a_slot_takes_longer_to_get_than_the_prefill() -> None:
    cold, warm = worker("cold"), worker("warm", matched_tokens=992, slot_wait_s=2.9)
    full = worker("warm", matched_tokens=992, slot_wait_s=3.1)
    policy = make_policy("kv")
    assert policy.choose(ASK, [cold, warm], lambda: 0.0).chosen is warm
    explained = policy.choose(ASK, [cold, full], lambda: 0.0)
    assert explained.chosen is cold
    assert dict(explained.costed[1].costs)["slots"] == 3.1


def test_what_is_computed_while_a_slot_is_waited_for_is_not_waited_for_again() -> None:
    explained = make_policy("kv").choose(ASK, [worker("full", backlog_s=2.0, slot_wait_s=3.0)], lambda: 0.0)
    assert dict(explained.costed[0].costs)["slots"] == 1.0
    explained = make_policy("kv").choose(ASK, [worker("full", backlog_s=4.0, slot_wait_s=3.0)], lambda: 0.0)
    assert dict(explained.costed[0].costs)["slots"] == 0.0


def test_kv_spares_blocks_that_are_in_use() -> None:
    fresh, stale = worker("fresh", evicted_tokens=500), worker("stale", evicted_tokens=500, lru_age_s=3000.0)
    assert make_policy("kv").choose(ASK, [fresh, stale], lambda: 0.0).chosen == stale
    indifferent = make_policy("kv", Weights(gamma=0.0)).choose(ASK, [fresh, stale], lambda: 0.0)
    assert indifferent.chosen == fresh


def test_power_of_two_takes_the_better_of_two() -> None:
    fleet = [worker("a", in_flight=9), worker("b", in_flight=1), worker("c", in_flight=5)]
    chosen = {make_policy("power_of_two").choose(ASK, fleet, random.Random(n).random).chosen for n in range(50)}
    assert chosen == {fleet[1], fleet[2]}


def test_an_explanation_says_why_a_worker_was_ruled_out() -> None:
    other = Candidate(WorkerId("other"), ("x", "y"))
    explanation = make_policy("kv").choose(ASK, [other, worker("down", unavailable="is down: refused")], lambda: 0.0)
    assert [one.reason for one in explanation.ruled_out] == ["serves x, y", "is down: refused"]


def test_an_unknown_policy_is_refused_with_those_there_are() -> None:
    with pytest.raises(OptionInvalid, match="'magic' is none of kv, prefix_tree, least_load"):
        make_policy("magic")
