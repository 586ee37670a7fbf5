"""Bodies become calls, and a body that cannot be honoured is refused with a sentence that names the place."""

import json
from typing import Any

import pytest

from kvherd.core.errors import BodyNotJson, CallerError, FieldInvalid, Unsupported
from kvherd.wire.openai import fields
from kvherd.wire.openai.requests import decode_chat, decode_completion
from kvherd.wire.openai.tokens import decode_detokenize

USER = {"role": "user", "content": "hi"}


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [USER], **fields}).encode()


def completion(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": "hi", **fields}).encode()


def refusal(body: bytes) -> str:
    with pytest.raises(CallerError) as caught:
        decode_chat(body)
    return str(caught.value)


def test_a_small_chat_has_the_defaults() -> None:
    call = decode_chat(chat())
    assert call.messages == (USER,)
    assert (call.options.n, call.options.stream, call.options.max_new_tokens) == (1, False, None)
    assert call.options.sampling.temperature == 1.0


def test_every_sampling_field_arrives() -> None:
    options = decode_chat(
        chat(
            temperature=0.5,
            top_p=0.9,
            top_k=40,
            min_p=0.1,
            frequency_penalty=1,
            presence_penalty=-1,
            repetition_penalty=1.1,
            logit_bias={"5": -100},
            seed=7,
            logprobs=True,
            top_logprobs=3,
        )
    ).options
    sampling = options.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 40, 0.1)
    assert (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty) == (1, -1, 1.1)
    assert (sampling.logit_bias, sampling.seed, sampling.logprobs) == (((5, -100.0),), 7, 3)


def test_every_limit_arrives() -> None:
    options = decode_chat(
        chat(
            max_tokens=9,
            min_tokens=2,
            stop=["a", "b"],
            stop_token_ids=[4],
            ignore_eos=True,
            n=3,
            stream=True,
            stream_options={"include_usage": True},
            cache_salt="s",
            user="u",
            skip_special_tokens=False,
        )
    ).options
    limits = options.limits
    assert (options.max_new_tokens, limits.max_new_tokens, limits.min_new_tokens) == (9, 9, 2)
    assert (limits.stop, limits.stop_token_ids, limits.ignore_eos) == (("a", "b"), (4,), True)
    assert (options.n, options.stream, options.include_usage) == (3, True, True)
    assert (options.cache_salt, options.user, options.skip_special_tokens) == ("s", "u", False)


def test_the_new_name_of_max_tokens_wins() -> None:
    assert decode_chat(chat(max_tokens=9, max_completion_tokens=4)).options.max_new_tokens == 4


def test_null_is_as_good_as_absent() -> None:
    body = chat(
        **dict.fromkeys(("temperature", "stop", "n", "seed", "logit_bias", "stream_options", "tools", "suffix"))
    )
    assert decode_chat(body) == decode_chat(chat())


def test_unknown_fields_are_let_through() -> None:
    assert decode_chat(chat(shiny_new_thing={"a": 1})) == decode_chat(chat())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", 2.1),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("min_p", 2),
        ("frequency_penalty", 3),
        ("repetition_penalty", 0),
        ("n", 0),
        ("n", 129),
        ("n", 1.5),
        ("max_tokens", 0),
        ("max_completion_tokens", "9"),
        ("min_tokens", -1),
        ("stop", 5),
        ("stop", ["x"] * 17),
        ("stream", "yes"),
        ("seed", 2**63),
        ("logit_bias", []),
        ("top_logprobs", 3),
        ("stream_options", {"include_usage": True}),
        ("tools", "hammer"),
        ("chat_template_kwargs", 1),
        ("messages", []),
        ("messages", "hi"),
        ("model", None),
        ("model", 5),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(field: str, value: Any) -> None:
    with pytest.raises(FieldInvalid) as caught:
        decode_chat(chat(**{field: value}))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("messages", "path"),
    [
        ([USER, {"content": "x"}], "messages[1].role"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role"),
        ([USER, USER, {"role": "user"}], "messages[2].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0]"),
        (["hi"], "messages[0]"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_a_wrong_message_is_refused_by_its_path(messages: list[Any], path: str) -> None:
    with pytest.raises(FieldInvalid) as caught:
        decode_chat(chat(messages=messages))
    assert caught.value.field == path


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        {"suffix": "x"},
        {"best_of": 4},
        {"modalities": ["audio"]},
        {"audio": {}},
        {"tool_choice": "required"},
        {"functions": [{}]},
        {"guided_json": {}},
        {"chat_template": "{{ messages }}"},
        {"documents": [{"title": "a"}]},
        {"truncate_prompt_tokens": 4},
        {"session_params": {"id": "s"}},
    ],
)
def test_what_cannot_be_honoured_is_refused_and_named(fields: dict[str, Any]) -> None:
    with pytest.raises(Unsupported) as caught:
        decode_chat(chat(**fields))
    assert next(iter(fields)) in caught.value.what


def test_harmless_values_of_what_cannot_be_honoured_are_let_through() -> None:
    body = chat(response_format={"type": "text"}, suffix="", modalities=["text"], best_of=1, store=False)
    assert decode_chat(body) == decode_chat(chat())


def test_text_parts_become_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert decode_chat(chat(messages=[{"role": "user", "content": parts}])).messages[0]["content"] == "a\nb"


def test_tool_calls_reach_the_template_with_their_arguments_as_values() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    message = decode_chat(chat(messages=[{"role": "assistant", "content": None, "tool_calls": [call]}])).messages[0]
    assert message["content"] == ""
    assert message["tool_calls"][0]["function"]["arguments"] == {"x": 1}


def test_template_arguments_and_tools_arrive_and_no_tools_means_none() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    call = decode_chat(chat(tools=tools, chat_template_kwargs={"deep": True}, add_generation_prompt=False))
    assert (call.tools, call.template_args, call.add_generation_prompt) == (tuple(tools), {"deep": True}, False)
    assert decode_chat(chat(tools=tools, tool_choice="none")).tools == ()


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("hi", ("hi",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
    ],
)
def test_a_prompt_may_be_text_or_tokens_one_or_several(prompt: Any, prompts: tuple[Any, ...]) -> None:
    assert decode_completion(completion(prompt=prompt)).prompts == prompts


@pytest.mark.parametrize("prompt", [None, "", [], [""], [[]], [1, "a"], ["a", -1], [-1], 5, {"a": 1}, [1.5]])
def test_a_prompt_of_anything_else_is_refused(prompt: Any) -> None:
    with pytest.raises(FieldInvalid, match=r"^prompt"):
        decode_completion(completion(prompt=prompt))


def test_completions_take_a_number_of_logprobs_and_echo() -> None:
    assert decode_completion(completion(logprobs=0)).options.sampling.logprobs == 0
    assert decode_completion(completion(echo=True)).echo
    with pytest.raises(Unsupported):
        decode_completion(completion(logprobs=1, echo=True))


@pytest.mark.parametrize(
    ("body", "line", "column"),
    [
        (b"", 1, 1),
        (b'{"a": 1,\n  x}', 2, 3),
        (b'{"a": 1} x', 1, 10),
        (b'{"a":\n NaN}', 2, 2),
        (b'{"a": "\xff"}', 1, 8),
        ('{"ä": x}'.encode(), 1, 7),
        (b'{"a": 1e999}', 1, 13),
        (b"[" * 100_000, 1, 1),
    ],
)
def test_what_is_no_json_is_refused_with_line_and_column(body: bytes, line: int, column: int) -> None:
    with pytest.raises(BodyNotJson) as caught:
        decode_chat(body)
    assert (caught.value.line, caught.value.column) == (line, column)


def test_json_that_is_no_object_is_refused() -> None:
    assert refusal(b"[]") == "body: must be a JSON object, not a list"


def test_refusals_say_what_would_be_right() -> None:
    assert refusal(chat(temperature=-1)) == "temperature: must be between 0 and 2, not -1"
    assert refusal(chat(max_tokens=0)) == "max_tokens: must be between 1 and 2147483647, not 0"


def test_a_number_with_thousands_of_digits_is_refused() -> None:
    assert "a number in it is too long" in refusal(b'{"model": "m", "max_tokens": ' + b"9" * 5000 + b"}")


def test_a_final_message_is_gone_on_with_only_without_the_beginning_of_a_new_one() -> None:
    message = {"role": "assistant", "content": "The"}
    fields = {"model": "m", "messages": [message], "continue_final_message": True}
    call = decode_chat(json.dumps({**fields, "add_generation_prompt": False}).encode())
    assert (call.continue_final_message, call.add_generation_prompt) == (True, False)
    with pytest.raises(FieldInvalid, match="continue_final_message: needs add_generation_prompt to be false"):
        decode_chat(json.dumps(fields).encode())


@pytest.mark.parametrize("wrong", ["true", "-1", str(2**31), "1.5", '"5"', "null", "[1]"])
def test_a_token_that_is_none_is_named_by_its_place(wrong: str) -> None:
    with pytest.raises(FieldInvalid) as refused:
        decode_completion(b'{"model":"m","prompt":[5,6,%b,7]}' % wrong.encode())
    assert refused.value.field == "prompt[2]"
    with pytest.raises(FieldInvalid) as refused:
        decode_completion(b'{"model":"m","prompt":["a",[5,%b]]}' % wrong.encode())
    assert refused.value.field == "prompt[1][1]"


def test_tokens_are_not_looked_at_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Millions of them fit in a body, and while they are read nobody else is served."""

    def one_by_one(_path: str, _value: object) -> int:
        raise AssertionError("a step for each token")

    monkeypatch.setattr(fields, "token_item", one_by_one)
    many = list(range(100_000))
    whole = decode_completion(json.dumps({"model": "m", "prompt": many}).encode())
    listed = decode_completion(json.dumps({"model": "m", "prompt": [many, many]}).encode())
    assert (whole.prompts, listed.prompts) == ((tuple(many),), (tuple(many),) * 2)
    assert decode_detokenize(json.dumps({"model": "m", "tokens": many}).encode()) == many
