"""What bounds late binding, and how long a prompt is."""

import pytest

from kvherd.core.errors import OptionInvalid
from kvherd.core.ids import WorkerId
from kvherd.core.routing.candidate import Ask, Candidate
from kvherd.core.routing.late import LateBounds, least_prefill_s
from kvherd.core.routing.policy import make_policy


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"backlog_s": -0.1}, "backlog_s: must be 0 to 3600"),
        ({"longest_s": float("nan")}, "longest_s: must be 0 to 3600"),
        ({"ageing": 0.0}, "ageing: must be 0.001 to 1000"),
    ],
)
def test_a_bound_that_cannot_be_is_named(wrong: dict[str, float], words: str) -> None:
    with pytest.raises(OptionInvalid, match=words):
        LateBounds(**wrong)


def test_no_backlog_is_off() -> None:
    assert LateBounds().on
    assert not LateBounds(backlog_s=0.0).on


def test_a_prompt_is_as_long_as_where_it_takes_least() -> None:
    policy, ask = make_policy("kv"), Ask("m", prompt_tokens=1_000)
    near = Candidate(WorkerId("near"), ("m",), matched_tokens=900, prefill_tokens_per_s=50.0)
    fast = Candidate(WorkerId("fast"), ("m",), prefill_tokens_per_s=1_000.0)
    assert least_prefill_s(policy.choose(ask, [near, fast], lambda: 0.0), 1_000) == 1.0
    assert least_prefill_s(policy.choose(ask, [near], lambda: 0.0), 1_000) == 2.0
    assert least_prefill_s(policy.choose(ask, [], lambda: 0.0), 1_000) == 0.0
