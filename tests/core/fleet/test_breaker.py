import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvherd.core.fleet.breaker import Breaker, BreakerConfig, BreakerState
from kvherd.core.ids import RequestId

ONE, OLD = RequestId("one"), RequestId("old")

CONFIG = BreakerConfig(failure_ratio=0.5, min_requests=4, window_s=10.0, open_s=2.0, max_open_s=8.0)


def opened_at(now_s: float, dice: float = 1.0) -> Breaker:
    breaker = Breaker(CONFIG)
    for _ in range(4):
        breaker.begin(ONE, now_s)
        breaker.failed(ONE, now_s, dice)
    assert breaker.state(now_s) is BreakerState.OPEN
    return breaker


def test_too_few_requests_prove_nothing() -> None:
    breaker = Breaker(CONFIG)
    for _ in range(3):
        breaker.failed(ONE, 0.0, 1.0)
    assert breaker.state(0.0) is BreakerState.CLOSED


def test_half_of_the_window_failed_opens_it() -> None:
    breaker = Breaker(CONFIG)
    for now_s in (0.0, 1.0):
        breaker.succeeded(ONE, now_s)
        breaker.failed(ONE, now_s, 1.0)
    assert breaker.state(1.0) is BreakerState.OPEN
    assert not breaker.admits(1.0)


def test_many_failures_in_a_row_open_it_however_many_succeeded_before() -> None:
    breaker = Breaker(CONFIG)
    for _ in range(1000):
        breaker.succeeded(ONE, 0.0)
    for _ in range(CONFIG.in_a_row - 1):
        breaker.failed(ONE, 0.0, 1.0)
    breaker.succeeded(ONE, 0.0)
    for _ in range(CONFIG.in_a_row - 1):
        breaker.failed(ONE, 0.0, 1.0)
    assert breaker.state(0.0) is BreakerState.CLOSED
    breaker.failed(ONE, 0.0, 1.0)
    assert breaker.state(0.0) is BreakerState.OPEN


def test_a_no_counts_only_of_the_one_that_tries() -> None:
    breaker = Breaker(CONFIG)
    for _ in range(20):
        breaker.refused(ONE, 0.0, 1.0)
    assert breaker.state(0.0) is BreakerState.CLOSED
    breaker = opened_at(0.0)
    breaker.begin(ONE, 2.0)
    breaker.refused(OLD, 2.1, 1.0)
    assert breaker.state(2.1) is BreakerState.HALF_OPEN
    breaker.refused(ONE, 2.1, 1.0)
    assert breaker.state(2.1) is BreakerState.OPEN


def test_failures_older_than_the_window_are_forgotten() -> None:
    breaker = Breaker(CONFIG)
    for _ in range(3):
        breaker.failed(ONE, 0.0, 1.0)
    breaker.failed(ONE, 11.0, 1.0)
    assert breaker.state(11.0) is BreakerState.CLOSED


def test_half_open_admits_one_try_at_a_time() -> None:
    breaker = opened_at(0.0)
    assert not breaker.admits(1.9)
    assert breaker.state(2.0) is BreakerState.HALF_OPEN
    assert breaker.admits(2.0)
    breaker.begin(ONE, 2.0)
    assert not breaker.admits(2.0)
    breaker.succeeded(ONE, 2.1)
    assert breaker.state(2.1) is BreakerState.CLOSED


def test_a_try_whose_client_left_lets_another_try() -> None:
    breaker = opened_at(0.0)
    breaker.begin(ONE, 2.0)
    breaker.abandoned(ONE)
    assert breaker.admits(2.0)


def test_open_time_doubles_up_to_its_bound() -> None:
    breaker = opened_at(0.0)
    now_s, waits = 2.0, []
    for _ in range(4):
        breaker.begin(ONE, now_s)
        breaker.failed(ONE, now_s, 1.0)
        began_s = now_s
        while not breaker.admits(now_s):
            now_s += 0.5
        waits.append(now_s - began_s)
    assert waits == [4.0, 8.0, 8.0, 8.0]


def test_requests_of_before_say_nothing_of_now() -> None:
    breaker = opened_at(0.0)
    breaker.succeeded(OLD, 0.5)
    breaker.failed(OLD, 0.5, 1.0)
    assert breaker.state(0.5) is BreakerState.OPEN
    assert breaker.admits(2.0)


@pytest.mark.parametrize("end", ["ok", "fail", "left"])
def test_the_end_of_a_request_of_before_is_not_taken_for_the_try_s(end: str) -> None:
    breaker = opened_at(0.0)
    breaker.begin(ONE, 2.0)
    if end == "ok":
        breaker.succeeded(OLD, 2.1)
    elif end == "fail":
        breaker.failed(OLD, 2.1, 1.0)
    else:
        breaker.abandoned(OLD)
    assert (breaker.state(2.1), breaker.admits(2.1)) == (BreakerState.HALF_OPEN, False)
    breaker.succeeded(ONE, 2.2)
    assert breaker.state(2.2) is BreakerState.CLOSED


def test_closing_forgets_the_back_off() -> None:
    breaker = opened_at(0.0)
    breaker.begin(ONE, 2.0)
    breaker.succeeded(ONE, 2.0)
    for _ in range(4):
        breaker.failed(ONE, 3.0, 1.0)
    assert breaker.admits(5.0)


@given(st.floats(0, 1))
def test_jitter_keeps_between_half_and_all_of_the_open_time(dice: float) -> None:
    breaker = opened_at(0.0, dice)
    assert not breaker.admits(0.99)
    assert breaker.admits(2.0)


@given(st.lists(st.sampled_from(["begin", "ok", "fail", "left", "wait"]), max_size=60))
def test_whatever_happens_one_tries_at_a_time_and_it_admits_again_in_bounded_time(story: list[str]) -> None:
    breaker, now_s = Breaker(CONFIG), 0.0
    under_way: list[RequestId] = []
    trying: RequestId | None = None
    for number, step in enumerate(story):
        if step == "begin" and breaker.admits(now_s):
            request = RequestId(str(number))
            if breaker.state(now_s) is BreakerState.HALF_OPEN:
                assert trying not in under_way, "two try at a time"
                trying = request
            breaker.begin(request, now_s)
            under_way.append(request)
        elif step == "wait":
            now_s += 1.0
        elif under_way and step in {"ok", "fail", "left"}:
            request = under_way.pop(number % len(under_way))
            if step == "ok":
                breaker.succeeded(request, now_s)
            elif step == "fail":
                breaker.failed(request, now_s, 0.5)
            else:
                breaker.abandoned(request)
    for request in under_way:
        breaker.abandoned(request)
    assert breaker.admits(now_s + CONFIG.max_open_s)
