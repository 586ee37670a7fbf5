import pytest

from kvherd.core.routing.rates import PrefillRate, Turnover


def test_the_first_observation_replaces_what_is_usual_and_later_ones_move_it() -> None:
    rate = PrefillRate()
    assert rate.at(0.0) == 1000.0
    assert rate.observe(400, 1.0, now_s=0.0)
    assert rate.at(0.0) == 400.0
    assert rate.observe(800, 1.0, now_s=0.0)
    assert rate.at(0.0) == pytest.approx(520)


def test_a_short_prefill_teaches_nothing() -> None:
    rate = PrefillRate()
    assert not rate.observe(3, 1.0, now_s=0.0)
    assert not rate.observe(1000, 0.0, now_s=0.0)
    assert rate.at(0.0) == 1000.0


def test_what_was_learned_fades_towards_what_is_usual() -> None:
    rate = PrefillRate(usual=1000.0, half_life_s=60.0)
    rate.observe(200, 1.0, now_s=0.0)
    assert rate.at(60.0) == pytest.approx(600.0)
    assert rate.at(6000.0) == pytest.approx(1000.0)


def test_the_more_comes_in_the_younger_what_is_pushed_out() -> None:
    turnover = Turnover()
    assert turnover.age_s(10_000, 0.0) == float("inf")
    turnover.stored(1000, 0.0)
    young_s = turnover.age_s(10_000, 0.0)
    turnover.stored(1000, 0.0)
    assert turnover.age_s(10_000, 0.0) == pytest.approx(young_s / 2)
    assert turnover.age_s(10_000, 60.0) == pytest.approx(young_s)
