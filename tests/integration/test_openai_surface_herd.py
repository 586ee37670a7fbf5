"""What the OpenAI client can ask for, field by field, through a real gateway over a worker of either kind."""

import json
import uuid
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from kvherd.testing.doors import Door
from kvherd.testing.processes import wait_until

pytestmark = pytest.mark.engine

GOES_ON = {"ignore_eos": True}  # a random model may well begin with the end
LETTERS = {str(ord(letter)): 100 for letter in "abcd"}
HALVES = {"195": 100, "169": 100}
"""The two bytes of é, by chance in either order: whole characters, and halves that stay alone."""
TOOLS: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


def said(text: str = "") -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": text or uuid.uuid4().hex}]


# --- what comes back ----------------------------------------------------------------------------------------------


def test_models_are_listed_and_retrieved(door: Door) -> None:
    assert [model.id for model in door.client.models.list()] == ["tiny"]
    assert door.client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError) as caught:
        door.client.models.retrieve("other")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_headers_say_who_answered_and_what_was_expected_to_be_cached(door: Door) -> None:
    messages = said(uuid.uuid4().hex * 3)
    create = door.client.chat.completions.with_raw_response.create

    def ask() -> Any:
        return create(model="tiny", messages=messages, max_tokens=2, extra_headers={"X-Request-Id": "mine-1"})

    first = ask()
    assert first.headers["x-kvherd-worker"] == door.worker
    assert first.headers["x-request-id"] == "mine-1" == first.parse()._request_id
    assert first.headers["x-kvherd-predicted-cached-tokens"] == "0"
    expected = str((first.parse().usage.prompt_tokens - 1) // 16 * 16)
    predicted = "x-kvherd-predicted-cached-tokens"
    wait_until(lambda: ask().headers[predicted] == expected, within_s=20, what="it is known to be held")
    made = create(model="tiny", messages=messages, max_tokens=2).headers["x-request-id"]
    assert len(made) == 32


def test_a_stream_has_headers_too_and_usage_at_its_end_only_if_asked(door: Door) -> None:
    for options in (None, {"include_usage": False}, {"include_usage": True}):
        create: Any = door.client.chat.completions.with_raw_response.create
        answer = create(
            model="tiny",
            messages=said(),
            max_tokens=3,
            stream=True,
            stream_options=openai.omit if options is None else options,
            extra_body=GOES_ON,
        )
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-kvherd-worker"] == door.worker
        chunks = list(answer.parse())
        assert all(chunk.usage is None for chunk in chunks[:-1])
        if options == {"include_usage": True}:
            assert chunks[-1].choices == []
            assert chunks[-1].usage is not None
            assert chunks[-1].usage.completion_tokens == 3
        else:
            assert chunks[-1].usage is None
            assert chunks[-1].choices[0].finish_reason == "length"


def test_the_client_s_own_helper_adds_a_stream_up(door: Door) -> None:
    with door.client.chat.completions.stream(
        model="tiny", messages=said(), max_tokens=4, logprobs=True, top_logprobs=2, extra_body=GOES_ON
    ) as stream:
        kinds = {event.type for event in stream}
        answer = stream.current_completion_snapshot
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta"} <= kinds
    (choice,) = answer.choices
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [len(token.top_logprobs) for token in choice.logprobs.content] == [2] * 4


def test_choices_of_a_stream_are_told_apart(door: Door) -> None:
    texts, ends = ["", "", ""], ["", "", ""]
    for chunk in door.client.chat.completions.create(
        model="tiny", messages=said(), max_tokens=6, n=3, stream=True, extra_body=GOES_ON
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends[choice.index] += choice.finish_reason or ""
    assert all(texts)
    assert ends == ["length"] * 3


# --- prompts of text completions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt",
    ["onetwo", ["one", "two"], [111, 110, 101], [[111, 110, 101], [116, 119, 111]]],
    ids=["a text", "texts", "tokens", "lists of tokens"],
)
def test_a_prompt_may_be_text_or_tokens_one_or_several(door: Door, prompt: Any) -> None:
    def ask(prompt: Any) -> list[str]:
        answer = door.client.completions.create(
            model="tiny", prompt=prompt, max_tokens=4, temperature=0, extra_body=GOES_ON
        )
        assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
        return [choice.text for choice in answer.choices]

    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    texts = [bytes(one).decode() if isinstance(one, list) else one for one in (prompt if several else [prompt])]
    assert ask(prompt) == [text for one in texts for text in ask(one)]


def test_logprobs_of_a_text_completion_stand_beside_their_places(door: Door) -> None:
    answer = door.client.completions.create(
        model="tiny", prompt="one", max_tokens=4, logprobs=3, seed=1, logit_bias=LETTERS, extra_body=GOES_ON
    )
    (choice,) = answer.choices
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens == list(choice.text)
    assert logprobs.text_offset == [0, 1, 2, 3]
    assert [logprob <= 0 for logprob in logprobs.token_logprobs or []] == [True] * 4
    assert all(len(top) >= 3 for top in logprobs.top_logprobs or [])


# --- when an answer ends, and how it is drawn ---------------------------------------------------------------------


def test_a_seed_draws_the_same_again(door: Door) -> None:
    messages = said()

    def ask(seed: int) -> str | None:
        answer = door.client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=24, seed=seed, extra_body=GOES_ON, logit_bias=LETTERS
        )
        return answer.choices[0].message.content

    assert ask(1) == ask(1)
    assert len({ask(seed) for seed in range(4)}) > 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_an_answer_before_it_also_across_tokens(door: Door, stream: bool) -> None:
    def ask(stop: str | list[str] | None) -> tuple[str, str | None]:
        answer = door.client.completions.create(
            model="tiny",
            prompt="one",
            max_tokens=24,
            seed=7,
            logit_bias=LETTERS,
            stop=stop,
            stream=stream,
            extra_body=GOES_ON,
        )
        if isinstance(answer, openai.Stream):
            choices = [choice for chunk in answer for choice in chunk.choices]
            return "".join(choice.text for choice in choices), choices[-1].finish_reason
        return answer.choices[0].text, answer.choices[0].finish_reason

    whole, why = ask(None)
    assert (len(whole), why) == (24, "length")
    stop = whole[9:13]  # four tokens, a byte each
    assert ask(stop) == (whole[: whole.index(stop)], "stop")
    assert ask(["never", stop]) == (whole[: whole.index(stop)], "stop")


def test_no_piece_of_a_stream_holds_half_a_character(door: Door) -> None:
    def ask(*, stream: bool) -> Any:
        return door.client.completions.create(
            model="tiny", prompt="one", max_tokens=64, seed=3, logit_bias=HALVES, stream=stream, extra_body=GOES_ON
        )

    whole = ask(stream=False).choices[0].text
    assert "é" in whole
    pieces = [choice.text for chunk in ask(stream=True) for choice in chunk.choices]
    assert "".join(pieces) == whole  # half a character would have become a mark of its own
    assert len(pieces) > 1  # how many is the machine's affair: what is there at once leaves at once


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_an_answer_s_length_has_two_names(door: Door, name: str) -> None:
    limit: dict[str, Any] = {name: 3}
    answer = door.client.chat.completions.create(model="tiny", messages=said(), extra_body=GOES_ON, **limit)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


# --- what is refused, and how -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"modalities": ["text", "audio"]}, "modalities"),
    ],
)
def test_what_this_engine_cannot_do_is_refused_by_name(door: Door, more: dict[str, Any], named: str) -> None:
    with pytest.raises(openai.BadRequestError, match=named) as caught:
        door.client.chat.completions.create(model="tiny", messages=said(), **more)
    assert caught.value.code == "unsupported"


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_of_a_field_is_the_same_before_a_stream(door: Door, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        door.client.chat.completions.create(model="tiny", messages=said(), top_p=1.5, stream=stream)
    error = caught.value
    assert (error.type, error.param, error.code) == ("invalid_request_error", "top_p", "invalid_value")


def test_what_no_worker_here_does_is_no_server_s_fault(door: Door) -> None:
    """A client would try that again."""
    with pytest.raises((openai.BadRequestError, openai.NotFoundError)):
        door.client.embeddings.create(model="tiny", input="hello")
    with pytest.raises((openai.BadRequestError, openai.NotFoundError)):
        door.client.responses.create(model="tiny", input="hello")


def test_tools_that_may_be_called_and_fields_nobody_knows_pass(door: Door) -> None:
    answer = door.client.chat.completions.create(
        model="tiny",
        messages=said(),
        max_tokens=2,
        tools=TOOLS,
        tool_choice="auto",
        metadata={"a": "b"},
        extra_body=GOES_ON | {"nobody_knows": {"a": [1]}},
    )
    assert answer.choices[0].finish_reason == "length"


# --- what the client never does, and others do --------------------------------------------------------------------


@pytest.mark.parametrize("model", ["", '"model": null,', '"model": "",'], ids=["absent", "null", "empty"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_the_one_model_need_not_be_named(door: Door, path: str, model: str) -> None:
    prompt = '"messages": [{"role": "user", "content": "hi"}]' if "chat" in path else '"prompt": "hi"'
    body = f'{{{model} {prompt}, "max_tokens": 2}}'
    answer = httpx.post(f"{door.gateway.url}{path}", content=body, timeout=60)
    assert (answer.status_code, answer.json()["model"]) == (200, "tiny")


def test_what_is_no_request_gets_a_plain_answer(door: Door) -> None:
    chat = f"{door.gateway.url}/v1/chat/completions"
    named = {b"": None, b"[]": "body", b'{"model": 1}': "model", b'{"model": "tiny"}': "messages"}
    for content, param in named.items():
        answer = httpx.post(chat, content=content, timeout=60)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert httpx.get(chat).status_code == 405
    assert httpx.options(chat).headers["allow"] == "POST"
    assert httpx.head(f"{door.gateway.url}/v1/models").status_code == 200
    assert httpx.post(f"{chat}/", json={}).status_code == 404


def test_a_stream_ends_with_its_end_mark(door: Door) -> None:
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 2, "stream": True}
    answer = httpx.post(f"{door.gateway.url}/v1/completions", json=body, timeout=60)
    *events, done, nothing = answer.text.split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "")
    assert all(json.loads(event.removeprefix("data: "))["object"] == "text_completion" for event in events)
