import pytest

from kvherd.core.routing.rates import PrefillRate, Turnover


def test_the_first_observation_replaces_the_guess_and_later_ones_move_it() -> None:
    rate = PrefillRate()
    rate.observe(400, 1.0)
    assert rate.tokens_per_s == 400
    rate.observe(800, 1.0)
    assert rate.tokens_per_s == pytest.approx(520)


def test_a_short_prefill_teaches_nothing() -> None:
    rate = PrefillRate()
    rate.observe(3, 1.0)
    rate.observe(1000, 0.0)
    assert (rate.tokens_per_s, rate.observations) == (1000.0, 0)


def test_the_more_comes_in_the_younger_what_is_pushed_out() -> None:
    turnover = Turnover()
    assert turnover.age_s(10_000, 0.0) == float("inf")
    turnover.stored(1000, 0.0)
    young_s = turnover.age_s(10_000, 0.0)
    turnover.stored(1000, 0.0)
    assert turnover.age_s(10_000, 0.0) == pytest.approx(young_s / 2)
    assert turnover.age_s(10_000, 60.0) == pytest.approx(young_s)
