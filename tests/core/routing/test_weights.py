"""Workers that count as faster or slower than they are."""

import random
from collections import Counter

import pytest

from kvherd.core.ids import WorkerId
from kvherd.core.routing.candidate import Ask, Candidate
from kvherd.core.routing.policy import POLICY_NAMES, make_policy

HEAVY, LIGHT = WorkerId("http://heavy"), WorkerId("http://light")


def shares(policy: str, *, turns: int = 3000, weight: float = 3.0) -> Counter[str]:
    """Who serves how many of so many asks, with nothing to tell the two apart but their weight."""
    dice, chosen, made = random.Random(7).random, Counter[str](), make_policy(policy)
    for turn in range(turns):
        explained = made.choose(
            Ask("m", prompt_tokens=0, affinity=f"user {turn}"),
            [Candidate(HEAVY, ("m",), weight=weight), Candidate(LIGHT, ("m",))],
            dice,
        )
        assert explained.chosen is not None
        chosen[explained.chosen.worker] += 1
    return chosen


@pytest.mark.parametrize("policy", [name for name in POLICY_NAMES if name != "power_of_two"])
def test_a_worker_of_three_times_the_weight_gets_three_times_as_much(policy: str) -> None:
    assert shares(policy)[HEAVY] / 3000 == pytest.approx(0.75, abs=0.05)


def test_turns_by_weight_are_evenly_spread() -> None:
    made = make_policy("round_robin")
    pair = [Candidate(HEAVY, ("m",), weight=2.0), Candidate(LIGHT, ("m",))]
    turns = [made.choose(Ask("m"), pair, lambda: 0.0).chosen for _ in range(6)]
    assert [one.worker for one in turns if one] == [HEAVY, LIGHT, HEAVY, HEAVY, LIGHT, HEAVY]


def test_a_cost_counts_for_less_where_the_weight_is_more() -> None:
    made = make_policy("kv")
    slow = Candidate(HEAVY, ("m",), backlog_s=1.5, weight=2.0)
    explained = made.choose(Ask("m"), [slow, Candidate(LIGHT, ("m",), backlog_s=1.0)], lambda: 0.0)
    assert explained.chosen is slow
