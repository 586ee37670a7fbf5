import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvherd.core.fleet.retry_budget import WINDOW_S, RetryBudget


def spent(budget: RetryBudget, wanted: int, now_s: float) -> int:
    """How many of them were admitted."""
    return sum(budget.spend(now_s) for _ in range(wanted))


def test_an_engine_that_dies_with_many_under_way_costs_a_busy_gateway_nothing() -> None:
    """1. Four hundred requests a second are served. 2. An engine dies with sixty of them under way, of 40 clients."""
    budget = RetryBudget()
    for tick in range(10 * 400):
        budget.earn(1_000.0 + tick / 400)
    assert spent(budget, 60, 1_009.99) == 60
    assert spent(budget, 2_000, 1_009.99) == 800 + 100 - 60, "and no more than the ratio of them, and the reserve"


def test_a_quiet_gateway_may_retry_a_burst_and_then_what_it_is_asked() -> None:
    budget = RetryBudget()
    for _ in range(1_000):
        budget.earn(500.5)
    assert spent(budget, 1_000, 500.9) == 300
    assert spent(budget, 1, 509.9) == 0
    assert spent(budget, 1_000, 510.0) == 100, "a window later all is forgotten"


def test_requests_that_came_long_ago_count_for_as_long_as_they_are_under_way() -> None:
    """1. Fifteen hundred wait, and none came lately. 2. One of four engines dies."""
    budget = RetryBudget()
    budget.earn(500.5)
    assert sum(budget.spend(600.0, 1_500) for _ in range(375)) == 375
    assert not budget.spend(600.0, 100), "none of those that came, and the reserve is spent"


@pytest.mark.parametrize(("passed_s", "left"), [(seconds, max(0, 10 - seconds)) for seconds in range(12)])
def test_what_was_earned_leaves_second_by_second(passed_s: int, left: int) -> None:
    budget = RetryBudget(ratio=0.5, per_second=0.0)
    for half in range(2 * WINDOW_S):
        budget.earn(half / 2)
    assert spent(budget, 100, 9.9 + passed_s) == left


def test_a_budget_without_a_reserve_admits_nothing_before_a_request_came() -> None:
    assert not RetryBudget(per_second=0.0).spend(0.0)


HISTORIES = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.0, 0.0, 0.3, 0.999, 1.0, 4.5, 9.0, 10.0, 11.0, 10_000.0]),
        st.sampled_from([-3.0, 0.0, 0.0, 0.0]),  # a request that took long to be read is told late
        st.integers(0, 8),
        st.integers(0, 8),
    ),
    max_size=60,
)


@given(HISTORIES, st.sampled_from([0.1, 0.2, 0.5, 1.0]), st.sampled_from([0.0, 0.1, 1.0]), st.floats(0.0, 1e6))
def test_of_any_history_it_admits_what_the_window_allows_and_no_less(
    history: list[tuple[float, float, int, int]], ratio: float, per_second: float, began_s: float
) -> None:
    budget = RetryBudget(ratio=ratio, per_second=per_second)
    now_s, latest = began_s, 0
    requests: list[int] = []
    retries: list[int] = []
    for passed_s, late_s, asked, wanted in history:
        now_s += passed_s
        for _ in range(asked):
            told_s = max(0.0, now_s + late_s)
            latest = max(latest, int(told_s))
            budget.earn(told_s)
            requests.append(latest)
        for _ in range(wanted):
            latest = max(latest, int(now_s))
            lately = latest - WINDOW_S
            earned = ratio * sum(second > lately for second in requests) + per_second * WINDOW_S
            used = sum(second > lately for second in retries) + 1
            admitted = budget.spend(now_s)
            if used != pytest.approx(earned):
                assert admitted == (used < earned)
            if admitted:
                retries.append(latest)
