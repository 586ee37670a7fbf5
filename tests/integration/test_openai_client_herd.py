"""The unmodified OpenAI client through a real gateway, over a worker of either kind."""

import uuid

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from kvherd.testing.doors import Door
from kvherd.testing.processes import wait_until

pytestmark = pytest.mark.engine

GOES_ON = {"ignore_eos": True}  # a random model may well begin with the end


def chat(text: str = "") -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": text or uuid.uuid4().hex}]


def test_a_chat_is_answered_whole_with_its_choices_and_logprobs(door: Door) -> None:
    answer = door.client.chat.completions.create(
        model="tiny", messages=chat(), max_tokens=5, n=2, logprobs=True, top_logprobs=2, extra_body=GOES_ON
    )
    assert sorted(choice.index for choice in answer.choices) == [0, 1]
    for choice in answer.choices:
        assert choice.finish_reason == "length"
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert [len(token.top_logprobs) for token in choice.logprobs.content] == [2] * 5
        assert all(token.logprob <= 0 for token in choice.logprobs.content)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 10


def test_a_streamed_chat_has_the_text_of_the_whole_one_and_says_what_was_cached(door: Door) -> None:
    messages = chat(uuid.uuid4().hex * 4)
    whole = door.client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=12, temperature=0, extra_body=GOES_ON
    )
    stream = door.client.chat.completions.create(
        model="tiny",
        messages=messages,
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=GOES_ON,
    )
    chunks = list(stream)
    said = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert said == whole.choices[0].message.content
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == (usage.prompt_tokens - 1) // 16 * 16


def test_text_completions_are_answered_and_streamed(door: Door) -> None:
    answer = door.client.completions.create(
        model="tiny", prompt=["one", "two"], max_tokens=3, logprobs=1, temperature=0, extra_body=GOES_ON
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert all(choice.logprobs and len(choice.logprobs.tokens or []) == 3 for choice in answer.choices)
    stream = door.client.completions.create(
        model="tiny", prompt="one", max_tokens=3, stream=True, temperature=0, extra_body=GOES_ON
    )
    assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == answer.choices[0].text


def test_refusals_are_the_exceptions_it_knows(door: Door) -> None:
    create = door.client.chat.completions.create
    with pytest.raises(openai.NotFoundError, match="served: tiny"):
        create(model="other", messages=chat())
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        create(model="tiny", messages=chat(), temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="2048") as caught:
        create(model="tiny", messages=chat("x" * 5000))
    assert caught.value.code == "context_length_exceeded"


def test_closing_a_stream_leaves_an_idle_engine(door: Door) -> None:
    stream = door.client.chat.completions.create(
        model="tiny", messages=chat(), max_tokens=1900, stream=True, extra_body=GOES_ON
    )
    next(iter(stream))
    wait_until(lambda: door.running() == 1, within_s=10, what="the engine runs it")
    stream.close()
    wait_until(lambda: door.running() == 0, within_s=10, what="the engine runs nothing")
