"""SGLang's own generate: bodies in, shapes out."""

import json
from typing import Any

import pytest

from kvherd.core.engine.generation import Finish, FinishReason, TokenLogprob
from kvherd.core.errors import FieldInvalid, Unsupported
from kvherd.core.text.calls import NativeCall
from kvherd.core.text.choice import ShownToken, TextDelta
from kvherd.wire.sglang_native import NativeAnswer, decode_generate, encode_answers

COUNTS = {"prompt_tokens": 1, "completion_tokens": 2, "cached_tokens": 0}


def decoded(**fields: Any) -> NativeCall:
    return decode_generate(json.dumps(fields).encode())


def test_sampling_parameters_arrive_under_sglangs_names() -> None:
    params = {"max_new_tokens": 7, "min_new_tokens": 2, "temperature": 0, "sampling_seed": 5, "stop": "x", "n": 2}
    native = decoded(text="hi", sampling_params=params, return_logprob=True, top_logprobs_num=3)
    options = native.call.options
    assert (options.max_new_tokens, options.limits.min_new_tokens, options.limits.stop) == (7, 2, ("x",))
    assert (options.sampling.temperature, options.sampling.seed, options.sampling.logprobs) == (0.0, 5, 3)
    assert (options.n, native.listed) == (2, True)


def test_without_a_limit_it_is_sglangs() -> None:
    assert decoded(text="hi").call.options.max_new_tokens == 128


@pytest.mark.parametrize(
    ("fields", "prompts", "listed"),
    [
        ({"text": "a"}, ("a",), False),
        ({"text": ["a"]}, ("a",), True),
        ({"input_ids": [1, 2]}, ((1, 2),), False),
        ({"input_ids": [[1], [2]]}, ((1,), (2,)), True),
    ],
)
def test_a_list_of_prompts_has_a_list_of_answers(fields: dict[str, Any], prompts: Any, listed: bool) -> None:
    native = decoded(**fields)
    assert (native.call.prompts, native.listed) == (prompts, listed)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": ["a", ""]}, "text[1]"),
        ({"input_ids": [[1], [-1]]}, "input_ids[1][0]"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"text": "a", "sampling_params": [{}]}, "sampling_params"),
    ],
)
def test_a_wrong_value_is_refused_by_its_path(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(FieldInvalid) as caught:
        decoded(**fields)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "fields",
    [
        {"image_data": "x"},
        {"return_hidden_states": True},
        {"logprob_start_len": 0},
        {"sampling_params": {"regex": "a+"}},
    ],
)
def test_what_cannot_be_honoured_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(Unsupported):
        decoded(text="a", **fields)


@pytest.mark.parametrize(
    ("finish", "shape"),
    [
        (None, None),
        (Finish(FinishReason.STOP, "x"), {"type": "stop", "matched": "x"}),
        (Finish(FinishReason.LENGTH), {"type": "length", "length": 2}),
        (Finish(FinishReason.ABORT, message="left"), {"type": "abort", "message": "left"}),
    ],
)
def test_each_end_has_its_shape(finish: Finish | None, shape: Any) -> None:
    answer = NativeAnswer("r", 0)
    answer.add(TextDelta("a", finish=finish))
    assert answer.fields(**COUNTS, logprobs=False)["meta_info"]["finish_reason"] == shape


def test_logprobs_are_triples() -> None:
    answer = NativeAnswer("r", 0)
    answer.add(TextDelta("a", (ShownToken(TokenLogprob(5, -0.5, ((5, -0.5), (6, -1.0))), 0),), None, (5,)))
    meta = answer.fields(**COUNTS, logprobs=True)["meta_info"]
    assert meta["output_token_logprobs"] == [[-0.5, 5, None]]
    assert meta["output_top_logprobs"] == [[[-0.5, 5, None], [-1.0, 6, None]]]


def test_one_answer_stands_alone_and_several_in_a_list() -> None:
    assert encode_answers([{"a": 1}], listed=False) == b'{"a":1}'
    assert encode_answers([{"a": 1}], listed=True) == b'[{"a":1}]'
