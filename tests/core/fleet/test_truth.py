from kvherd.core.fleet.retry_budget import RetryBudget
from kvherd.core.fleet.truth import Truth


def test_only_answers_that_overlapped_no_other_are_decided() -> None:
    truth = Truth()
    assert not truth.available
    truth.answered(predicted=16, reported=16, overlapped=False)
    truth.answered(predicted=16, reported=0, overlapped=True)
    truth.answered(predicted=16, reported=None, overlapped=False)
    assert (truth.decided, truth.undecided, truth.unreported, truth.error_rate) == (1, 1, 1, 0.0)
    assert truth.available


def test_the_error_rate_is_of_the_last_two_hundred() -> None:
    truth = Truth()
    for reported in [0] * 100 + [16] * 200:
        truth.answered(predicted=16, reported=reported, overlapped=False)
    assert truth.error_rate == 0.0
    truth.answered(predicted=16, reported=0, overlapped=False)
    assert truth.error_rate == 1 / 200


def test_retries_are_bounded_and_earned_back() -> None:
    budget = RetryBudget(ratio=0.5, reserve=2.0)
    assert [budget.spend() for _ in range(3)] == [True, True, False]
    budget.earn()
    assert not budget.spend()
    budget.earn()
    assert budget.spend()
