from hypothesis import given
from hypothesis import strategies as st

from kvherd.core.fleet.breaker import Breaker, BreakerConfig, BreakerState

CONFIG = BreakerConfig(failure_ratio=0.5, min_requests=4, window_s=10.0, open_s=2.0, max_open_s=8.0)


def opened_at(now_s: float, dice: float = 1.0) -> Breaker:
    breaker = Breaker(CONFIG)
    for _ in range(4):
        breaker.begin(now_s)
        breaker.failed(now_s, dice)
    assert breaker.state(now_s) is BreakerState.OPEN
    return breaker


def test_too_few_requests_prove_nothing() -> None:
    breaker = Breaker(CONFIG)
    for _ in range(3):
        breaker.failed(0.0, 1.0)
    assert breaker.state(0.0) is BreakerState.CLOSED


def test_half_of_the_window_failed_opens_it() -> None:
    breaker = Breaker(CONFIG)
    for now_s in (0.0, 1.0):
        breaker.succeeded(now_s)
        breaker.failed(now_s, 1.0)
    assert breaker.state(1.0) is BreakerState.OPEN
    assert not breaker.admits(1.0)


def test_failures_older_than_the_window_are_forgotten() -> None:
    breaker = Breaker(CONFIG)
    for _ in range(3):
        breaker.failed(0.0, 1.0)
    breaker.failed(11.0, 1.0)
    assert breaker.state(11.0) is BreakerState.CLOSED


def test_half_open_admits_one_try_at_a_time() -> None:
    breaker = opened_at(0.0)
    assert not breaker.admits(1.9)
    assert breaker.state(2.0) is BreakerState.HALF_OPEN
    assert breaker.admits(2.0)
    breaker.begin(2.0)
    assert not breaker.admits(2.0)
    breaker.succeeded(2.1)
    assert breaker.state(2.1) is BreakerState.CLOSED


def test_a_try_whose_client_left_lets_another_try() -> None:
    breaker = opened_at(0.0)
    breaker.begin(2.0)
    breaker.abandoned()
    assert breaker.admits(2.0)


def test_open_time_doubles_up_to_its_bound() -> None:
    breaker = opened_at(0.0)
    now_s, waits = 2.0, []
    for _ in range(4):
        breaker.begin(now_s)
        breaker.failed(now_s, 1.0)
        began_s = now_s
        while not breaker.admits(now_s):
            now_s += 0.5
        waits.append(now_s - began_s)
    assert waits == [4.0, 8.0, 8.0, 8.0]


def test_requests_of_before_say_nothing_of_now() -> None:
    breaker = opened_at(0.0)
    breaker.succeeded(0.5)
    breaker.failed(0.5, 1.0)
    assert breaker.state(0.5) is BreakerState.OPEN
    assert breaker.admits(2.0)


def test_closing_forgets_the_back_off() -> None:
    breaker = opened_at(0.0)
    breaker.begin(2.0)
    breaker.succeeded(2.0)
    for _ in range(4):
        breaker.failed(3.0, 1.0)
    assert breaker.admits(5.0)


@given(st.floats(0, 1))
def test_jitter_keeps_between_half_and_all_of_the_open_time(dice: float) -> None:
    breaker = opened_at(0.0, dice)
    assert not breaker.admits(0.99)
    assert breaker.admits(2.0)


@given(st.lists(st.sampled_from(["begin", "ok", "fail", "left", "wait"]), max_size=60))
def test_whatever_happens_it_admits_again_in_bounded_time(story: list[str]) -> None:
    breaker, now_s, trying = Breaker(CONFIG), 0.0, 0
    for step in story:
        if step == "begin" and breaker.admits(now_s):
            breaker.begin(now_s)
            trying += 1
        elif step == "wait":
            now_s += 1.0
        elif trying and step in {"ok", "fail", "left"}:
            trying -= 1
            if step == "ok":
                breaker.succeeded(now_s)
            elif step == "fail":
                breaker.failed(now_s, 0.5)
            else:
                breaker.abandoned()
    for _ in range(trying):
        breaker.abandoned()
    assert breaker.admits(now_s + CONFIG.max_open_s)
