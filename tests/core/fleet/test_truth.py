import pytest

from kvherd.core.fleet.truth import Claim, Truth, Verdict, WrongAnswer

HIT = Claim(16, 16)


def test_only_answers_that_nothing_came_in_between_of_are_decided() -> None:
    truth = Truth()
    assert not truth.available
    assert truth.answered(HIT, 16) is Verdict.RIGHT
    assert truth.answered(HIT, 0, disturbed="overlap") is Verdict.UNDECIDED
    assert truth.answered(HIT, None) is Verdict.UNAVAILABLE
    assert (truth.decided, truth.undecided, truth.unavailable, truth.error_rate) == (1, 1, 1, 0.0)
    assert truth.undecided_by == {"overlap": 1}
    assert truth.available


@pytest.mark.parametrize(
    ("claim", "reported", "verdict"),
    [
        (Claim(32, 16), 47, Verdict.RIGHT),  # one-token pages, credited in blocks of 16
        (Claim(32, 16), 48, Verdict.WRONG),
        (Claim(32, 16), 31, Verdict.WRONG),
        (Claim(32, 16, exact=False), 48, Verdict.UNDECIDED),
        (Claim(32, 16, exact=False), 16, Verdict.WRONG),
        (Claim(0, 0), 0, Verdict.RIGHT),
        (Claim(0, 0), 5, Verdict.WRONG),
    ],
)
def test_a_claim_is_held_against_whole_blocks(claim: Claim, reported: int, verdict: Verdict) -> None:
    assert Truth().answered(claim, reported) is verdict


def test_the_error_rate_is_of_the_last_two_hundred() -> None:
    truth = Truth()
    for reported in [0] * 100 + [16] * 200:
        truth.answered(HIT, reported)
    assert truth.error_rate == 0.0
    truth.answered(HIT, 0, at_s=5.0)
    assert truth.error_rate == 1 / 200
    assert (truth.wrong, truth.last_wrong) == (101, WrongAnswer(16, 0, 5.0))


def test_a_third_wrong_answer_is_one_too_many_and_a_rebuild_empties_the_window() -> None:
    truth = Truth()
    for reported in [0, 0, *[16] * 198]:
        truth.answered(HIT, reported)
    assert not truth.rebuild_due(0.0), "2 of 200 are 1 %"
    truth.answered(HIT, 0)
    assert not truth.rebuild_due(0.0), "and the first of them has left the window"
    truth.answered(HIT, 0)
    truth.answered(HIT, 0)
    assert truth.rebuild_due(0.0)
    truth.rebuilt(0.0)
    assert (truth.error_rate, truth.rebuilds) == (0.0, 1)


def test_an_entry_is_rebuilt_at_most_once_a_minute() -> None:
    truth = Truth()
    for _ in range(3):
        truth.answered(HIT, 0)
    truth.rebuilt(10.0)
    for _ in range(3):
        truth.answered(HIT, 0)
    assert not truth.rebuild_due(69.9)
    assert truth.rebuild_due(70.0)
