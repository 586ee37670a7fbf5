"""Each sampling parameter does what it says, alone and with a seed."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvherd.core.engine.generation import Sampling
from kvherd.runtime.batch import Choice, SamplingState
from kvherd.runtime.sampler import sample
from kvherd.runtime.weights import Floats

# probabilities 0.5, 0.25, 0.125, 0.0625, 0.0625
LOGITS = np.log(np.array([0.5, 0.25, 0.125, 0.0625, 0.0625], dtype=np.float32))
GREEDY = Sampling(temperature=0.0)


def once(state: SamplingState, logits: Floats = LOGITS, dice: int = 0) -> Choice:
    (choice,) = sample(logits[None].copy(), [state], np.random.default_rng(dice))
    return choice


def shares(sampling: Sampling, *, draws: int = 4000) -> dict[int, float]:
    """How often each token is drawn."""
    states = [SamplingState(sampling, position=index) for index in range(draws)]
    choices = sample(np.tile(LOGITS, (draws, 1)), states, np.random.default_rng(7))
    return {token: count / draws for token, count in Counter(choice.token_id for choice in choices).items()}


def test_temperature_zero_takes_the_best() -> None:
    assert once(SamplingState(GREEDY, 0)).token_id == 0
    assert once(SamplingState(GREEDY, 0)).logprob is None


def test_temperature_one_draws_by_probability() -> None:
    assert shares(Sampling()) == pytest.approx({0: 0.5, 1: 0.25, 2: 0.125, 3: 0.0625, 4: 0.0625}, abs=0.03)


def test_temperature_sharpens_and_flattens() -> None:
    assert shares(Sampling(temperature=0.5))[0] == pytest.approx(0.25 / 0.3359, abs=0.03)
    assert shares(Sampling(temperature=100.0))[4] == pytest.approx(0.2, abs=0.03)


def test_a_tiny_temperature_is_greedy_and_not_a_division_by_nothing() -> None:
    assert shares(Sampling(temperature=1e-9), draws=50) == {0: 1.0}
    assert shares(Sampling(temperature=1e-4), draws=50) == {0: 1.0}


@pytest.mark.parametrize(("top_k", "kept"), [(1, {0}), (2, {0, 1}), (99, {0, 1, 2, 3, 4}), (0, {0, 1, 2, 3, 4})])
def test_top_k_keeps_the_most_likely(top_k: int, kept: set[int]) -> None:
    assert shares(Sampling(top_k=top_k)).keys() == kept


@pytest.mark.parametrize(("top_p", "kept"), [(0.01, {0}), (0.5, {0}), (0.51, {0, 1}), (0.8, {0, 1, 2})])
def test_top_p_keeps_the_fewest_that_reach_it(top_p: float, kept: set[int]) -> None:
    assert shares(Sampling(top_p=top_p)).keys() == kept


def test_top_p_counts_what_top_k_left() -> None:
    assert shares(Sampling(top_k=2, top_p=0.6)).keys() == {0}  # of two, the first has 0.667


@pytest.mark.parametrize(("min_p", "kept"), [(0.1, {0, 1, 2, 3, 4}), (0.2, {0, 1, 2}), (0.6, {0}), (1.0, {0})])
def test_min_p_drops_what_is_far_below_the_best(min_p: float, kept: set[int]) -> None:
    assert shares(Sampling(min_p=min_p)).keys() == kept


def test_presence_and_frequency_count_output_only() -> None:
    presence = Sampling(temperature=0.0, presence_penalty=1.0)  # ln 0.5 − 1 < ln 0.25
    assert once(SamplingState(presence, 0, output_token_ids=[0])).token_id == 1
    assert once(SamplingState(presence, 0, prompt_token_ids=[0])).token_id == 0
    frequency = Sampling(temperature=0.0, frequency_penalty=0.5)
    assert once(SamplingState(frequency, 0, output_token_ids=[0])).token_id == 0
    assert once(SamplingState(frequency, 0, output_token_ids=[0, 0])).token_id == 1


def test_a_negative_penalty_rewards() -> None:
    assert once(SamplingState(Sampling(temperature=0.0, presence_penalty=-2.0), 0, output_token_ids=[2])).token_id == 2


def test_repetition_counts_prompt_and_output_and_each_token_once() -> None:
    positive = np.array([2.0, 1.5, -0.5, -1.0], dtype=np.float32)
    penalty = Sampling(temperature=0.0, repetition_penalty=1.5)
    assert once(SamplingState(penalty, 0, prompt_token_ids=[0, 0, 0]), positive).token_id == 1
    assert once(SamplingState(penalty, 0, output_token_ids=[0]), positive).token_id == 1
    negative = np.array([-1.0, -1.4, -2.0, -3.0], dtype=np.float32)  # a negative logit must sink, too
    assert once(SamplingState(penalty, 0, output_token_ids=[0]), negative).token_id == 1


def test_bias_lifts_bans_and_ignores_what_is_no_token() -> None:
    assert once(SamplingState(Sampling(temperature=0.0, logit_bias=((4, 100.0),)), 0)).token_id == 4
    assert once(SamplingState(Sampling(temperature=0.0, logit_bias=((0, -100.0),)), 0)).token_id == 1
    assert once(SamplingState(Sampling(temperature=0.0, logit_bias=((99, 100.0), (-1, 100.0))), 0)).token_id == 0


def test_a_forbidden_token_is_never_chosen() -> None:
    assert once(SamplingState(GREEDY, 0, forbidden_token_ids=[0, 1, 99])).token_id == 2
    drawn = {once(SamplingState(Sampling(), 0, forbidden_token_ids=[0]), dice=dice).token_id for dice in range(60)}
    assert 0 not in drawn


def test_a_seed_repeats_whatever_the_company_and_the_dice() -> None:
    seeded = SamplingState(Sampling(seed=11), position=5)
    alone = once(seeded, dice=1).token_id
    company = [SamplingState(Sampling(), 0), seeded, SamplingState(Sampling(seed=3), 5)]
    rows = np.stack([LOGITS[::-1], LOGITS, LOGITS])
    assert sample(rows, company, np.random.default_rng(99))[1].token_id == alone


def test_a_seed_is_not_stuck_on_one_draw() -> None:
    drawn = {once(SamplingState(Sampling(seed=11), position=position)).token_id for position in range(50)}
    assert len(drawn) > 2


def test_a_negative_seed_is_a_seed() -> None:
    state = SamplingState(Sampling(seed=-5), position=2)
    assert once(state, dice=0) == once(state, dice=1)


def test_without_a_seed_the_dice_decide() -> None:
    assert len({once(SamplingState(Sampling(), 0), dice=dice).token_id for dice in range(50)}) > 2


def test_logprobs_are_the_models_own_before_anything_changed_them() -> None:
    state = SamplingState(
        Sampling(temperature=0.0, logprobs=3, presence_penalty=2.0, logit_bias=((2, 50.0),), top_k=1),
        0,
        output_token_ids=[0],
    )
    choice = once(state)
    assert choice.token_id == 2
    assert choice.logprob is not None
    assert choice.logprob.token_id == 2
    assert choice.logprob.logprob == pytest.approx(np.log(0.125), abs=1e-5)
    assert [token for token, _ in choice.logprob.top] == [0, 1, 2]
    assert choice.logprob.top[0][1] == pytest.approx(np.log(0.5), abs=1e-5)


@pytest.mark.parametrize(("asked", "given_"), [(0, 0), (1, 1), (5, 5), (50, 5)])
def test_logprobs_have_as_many_alternatives_as_asked_and_exist(asked: int, given_: int) -> None:
    choice = once(SamplingState(Sampling(temperature=0.0, logprobs=asked), 0))
    assert choice.logprob is not None
    assert len(choice.logprob.top) == given_


@settings(max_examples=100, deadline=None)
@given(
    top_k=st.integers(-1, 6),
    top_p=st.floats(0.0, 1.0),
    min_p=st.floats(0.0, 1.0),
    temperature=st.floats(0.0, 5.0),
    dice=st.integers(0, 1000),
)
def test_something_is_always_chosen(top_k: int, top_p: float, min_p: float, temperature: float, dice: int) -> None:
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert 0 <= once(SamplingState(sampling, 0), dice=dice).token_id < 5
