import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvherd.core.ids import RequestId
from kvherd.core.routing.backlog import Backlog

A, B = RequestId("a"), RequestId("b")


def test_work_is_done_in_order_at_the_learned_rate() -> None:
    backlog = Backlog()
    assert backlog.add(A, 1000, rate=100.0, now_s=0.0) == 1000
    assert backlog.add(B, 500, rate=100.0, now_s=4.0) == 1100
    assert backlog.seconds(rate=100.0, now_s=6.0) == pytest.approx(9.0)
    backlog.end(A, rate=100.0, now_s=6.0)
    assert backlog.seconds(rate=100.0, now_s=6.0) == pytest.approx(5.0)
    assert backlog.seconds(rate=100.0, now_s=60.0) == 0.0


def test_an_end_that_was_never_promised_changes_nothing() -> None:
    backlog = Backlog()
    backlog.add(A, 100, rate=100.0, now_s=0.0)
    backlog.end(B, rate=100.0, now_s=0.0)
    assert backlog.seconds(rate=100.0, now_s=0.0) == 1.0


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 500), st.floats(0, 2), st.booleans())))
def test_it_is_never_negative_and_ends_with_its_requests(story: list[tuple[str, int, float, bool]]) -> None:
    backlog, now_s = Backlog(), 0.0
    for number, (name, tokens, passed_s, ends) in enumerate(story):
        now_s += passed_s
        backlog.add(RequestId(f"{name}{number}"), tokens, rate=100.0, now_s=now_s)
        if ends:
            backlog.end(RequestId(f"{name}{number}"), rate=100.0, now_s=now_s)
        assert 0.0 <= backlog.seconds(rate=100.0, now_s=now_s) <= 5.0 * (number + 1)
    for number, (name, *_) in enumerate(story):
        backlog.end(RequestId(f"{name}{number}"), rate=100.0, now_s=now_s)
    assert backlog.seconds(rate=100.0, now_s=now_s) == 0.0
