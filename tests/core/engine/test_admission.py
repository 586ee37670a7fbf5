"""Nothing that a scheduler could choke on gets past the door."""

import math
from dataclasses import replace

import pytest

from kvherd.core.engine.admission import check_request, room_for_answer
from kvherd.core.engine.generation import GenerationRequest, Limits, Sampling
from kvherd.core.engine.reports import RankFacts
from kvherd.core.errors import FieldInvalid, PromptTooLong, Unsupported
from kvherd.core.ids import Rank, RequestId

FACTS = RankFacts(
    rank=Rank(0),
    pid=1,
    block_size=16,
    capacity_tokens=200,
    max_running=4,
    max_context_tokens=100,
    vocab_size=50,
    eos_token_ids=(7,),
    events_endpoint="",
    replay_endpoint="",
    weights_bytes=0,
    kv_bytes=0,
)
GOOD = GenerationRequest(RequestId("a"), [1, 2, 3], Limits(10))


def test_a_good_request_passes() -> None:
    check_request(GOOD, [FACTS])
    check_request(replace(GOOD, limits=Limits(97, stop_token_ids=(49,), stop=("x",))), [FACTS])
    check_request(replace(GOOD, rank=1), [FACTS, FACTS])


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("input_ids", replace(GOOD, prompt_token_ids=[])),
        ("input_ids", replace(GOOD, prompt_token_ids=[50])),
        ("input_ids", replace(GOOD, prompt_token_ids=[-1])),
        ("max_new_tokens", replace(GOOD, limits=Limits(-1))),
        ("min_new_tokens", replace(GOOD, limits=Limits(3, min_new_tokens=4))),
        ("stop_token_ids", replace(GOOD, limits=Limits(3, stop_token_ids=(50,)))),
        ("stop", replace(GOOD, limits=Limits(3, stop=("",)))),
        ("temperature", replace(GOOD, sampling=Sampling(temperature=-0.1))),
        ("temperature", replace(GOOD, sampling=Sampling(temperature=math.nan))),
        ("temperature", replace(GOOD, sampling=Sampling(temperature=math.inf))),
        ("top_p", replace(GOOD, sampling=Sampling(top_p=0.0))),
        ("top_p", replace(GOOD, sampling=Sampling(top_p=1.1))),
        ("top_k", replace(GOOD, sampling=Sampling(top_k=0))),
        ("top_k", replace(GOOD, sampling=Sampling(top_k=-2))),
        ("min_p", replace(GOOD, sampling=Sampling(min_p=-0.1))),
        ("frequency_penalty", replace(GOOD, sampling=Sampling(frequency_penalty=2.1))),
        ("presence_penalty", replace(GOOD, sampling=Sampling(presence_penalty=-2.1))),
        ("repetition_penalty", replace(GOOD, sampling=Sampling(repetition_penalty=0.0))),
        ("logit_bias", replace(GOOD, sampling=Sampling(logit_bias=((50, 1.0),)))),
        ("logit_bias", replace(GOOD, sampling=Sampling(logit_bias=((5, math.nan),)))),
        ("top_logprobs_num", replace(GOOD, sampling=Sampling(logprobs=21))),
        ("data_parallel_rank", replace(GOOD, rank=1)),
        ("data_parallel_rank", replace(GOOD, rank=-1)),
    ],
)
def test_a_bad_field_is_named(field: str, request_: GenerationRequest) -> None:
    with pytest.raises(FieldInvalid) as caught:
        check_request(request_, [FACTS])
    assert caught.value.field == field


def test_a_prompt_that_does_not_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(
        PromptTooLong, match="has 95 tokens and 6 for the answer, but the context of this model holds 100"
    ):
        check_request(replace(GOOD, prompt_token_ids=[1] * 95, limits=Limits(6)), [FACTS])


def test_the_pool_may_be_smaller_than_the_context() -> None:
    small = replace(FACTS, capacity_tokens=32)
    assert room_for_answer(30, small) == 2
    assert room_for_answer(30, FACTS) == 70
    with pytest.raises(PromptTooLong, match="32"):
        room_for_answer(32, small)
    with pytest.raises(PromptTooLong):
        check_request(replace(GOOD, limits=Limits(30)), [small])


def test_an_adapter_is_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="alpha"):
        check_request(replace(GOOD, lora="alpha"), [FACTS])
