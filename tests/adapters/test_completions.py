"""OpenAI answers over scripted generations: whole, streamed, several choices, stops, errors and ends."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest

from kvherd.adapters.completions import OpenAiCompletions
from kvherd.adapters.usage_sniffer import UsageSniffer
from kvherd.core.engine.generation import GenerationRequest, TokenDelta
from kvherd.core.errors import EngineStopping, FieldInvalid, PromptTooLong
from kvherd.core.ids import RequestId
from kvherd.core.text.calls import ChatCall, CompletionCall
from kvherd.testing.text import ByteTokenizer, ScriptedGenerations
from kvherd.wire.openai.requests import decode_chat, decode_completion

ID = RequestId("r1")


def completions(*, context: int = 1000, vocab_size: int = 0) -> OpenAiCompletions:
    return OpenAiCompletions(ByteTokenizer(), "herd", context, vocab_size=vocab_size, now_s=lambda: 1234.9)


def chat(**fields: Any) -> ChatCall:
    return decode_chat(json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}).encode())


def text(prompt: Any = "say", **fields: Any) -> CompletionCall:
    return decode_completion(json.dumps({"model": "m", "prompt": prompt, **fields}).encode())


async def whole(call: ChatCall | CompletionCall, engine: ScriptedGenerations) -> Any:
    return json.loads(await completions().whole(call, request=ID, generate=engine.generate))


async def frames(call: ChatCall | CompletionCall, engine: ScriptedGenerations) -> list[Any]:
    stream = b"".join([data async for data in completions().stream(call, request=ID, generate=engine.generate)])
    events = stream.decode().split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") for event in events)
    bodies = [event.removeprefix("data: ") for event in events]
    return [body if body == "[DONE]" else json.loads(body) for body in bodies]


@pytest.mark.parametrize(
    ("host", "storage", "told"),
    [
        (2, 0, {"device": 1, "host": 2}),
        (0, 2, {"device": 1, "host": 0, "storage": 2}),
        (1, 2, {"device": 0, "host": 1, "storage": 2}),
    ],
)
async def test_tokens_that_came_from_elsewhere_are_told_apart_and_read_again(
    host: int, storage: int, told: dict[str, int]
) -> None:
    engine = ScriptedGenerations("Paris", cached_tokens=3, host_tokens=host, storage_tokens=storage)
    body = await completions().whole(chat(), request=ID, generate=engine.generate)
    details = json.loads(body)["usage"]["prompt_tokens_details"]
    assert details == {"cached_tokens": 3, "cached_tokens_details": told}
    sniffer = UsageSniffer(stream=False)
    sniffer.feed(body)
    read = sniffer.usage()
    assert read is not None
    assert (read.cached_tokens, read.host_tokens, read.storage_tokens) == (3, host, storage)


async def test_a_whole_chat_has_text_reason_and_usage() -> None:
    answer = await whole(chat(), ScriptedGenerations("Paris", cached_tokens=3))
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Paris", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": 256,
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": 20,
        "completion_tokens": 5,
        "total_tokens": 25,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert (answer["object"], answer["model"], answer["created"]) == ("chat.completion", "herd", 1234)


async def test_a_chat_stream_opens_with_the_role_and_ends_with_done() -> None:
    seen = await frames(chat(stream=True), ScriptedGenerations("héy"))
    assert seen.pop() == "[DONE]"
    assert seen[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [frame["choices"][0]["delta"] for frame in seen[1:-1]] == [
        {"content": "h"},
        {"content": "é"},
        {"content": "y"},
    ]
    assert seen[-1]["choices"][0] | {"stop_reason": None} == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    assert all("usage" not in frame for frame in seen)


async def test_a_stream_has_usage_only_when_asked() -> None:
    seen = await frames(chat(stream=True, stream_options={"include_usage": True}), ScriptedGenerations("ok"))
    assert seen[-2]["choices"] == []
    assert seen[-2]["usage"]["completion_tokens"] == 2


async def test_several_choices_come_under_their_indices() -> None:
    engine = ScriptedGenerations("ab")
    seen = await frames(chat(stream=True, n=3), engine)
    for index in range(3):
        mine = [frame["choices"][0] for frame in seen[:-1] if frame["choices"][0]["index"] == index]
        assert "".join(choice["delta"].get("content", "") for choice in mine) == "ab"
        assert mine[-1]["finish_reason"] == "stop"
    assert sorted(request.request for request in engine.requests) == ["r1-0", "r1-1", "r1-2"]


async def test_the_prompt_counts_once_for_several_choices() -> None:
    answer = await whole(text("four", n=2), ScriptedGenerations("xyz"))
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (4, 6)


async def test_choices_of_a_seeded_call_have_seeds_of_their_own() -> None:
    engine = ScriptedGenerations("a")
    await whole(text(["p", "q"], n=2, seed=-1), engine)
    seeds = {str(request.request): request.sampling.seed for request in engine.requests}
    assert seeds["r1-0"] == seeds["r1-2"] != seeds["r1-1"] == seeds["r1-3"]
    assert all(seed is not None and seed >= 0 for seed in seeds.values())


async def test_several_prompts_and_echo() -> None:
    answer = await whole(text(["ab", [99, 100]], echo=True), ScriptedGenerations("!"))
    assert [choice["text"] for choice in answer["choices"]] == ["ab!", "cd!"]


async def test_echo_is_the_first_frame_of_a_stream() -> None:
    seen = await frames(text("ab", echo=True, stream=True), ScriptedGenerations("!"))
    assert [frame["choices"][0]["text"] for frame in seen[:-1]] == ["ab", "!", ""]


async def test_a_stop_string_ends_the_answer_and_aborts_the_generation() -> None:
    engine = ScriptedGenerations("one. two. three.")
    answer = await whole(chat(stop=[". t"]), engine)
    assert answer["choices"][0]["message"]["content"] == "one"
    assert (answer["choices"][0]["finish_reason"], answer["choices"][0]["stop_reason"]) == ("stop", ". t")
    assert answer["usage"]["completion_tokens"] == 6
    assert engine.aborted == [ID]


async def test_chat_logprobs_name_each_shown_token() -> None:
    answer = await whole(chat(logprobs=True, top_logprobs=2, stop="d"), ScriptedGenerations("abcd"))
    content = answer["choices"][0]["logprobs"]["content"]
    assert [token["token"] for token in content] == ["a", "b", "c"]
    assert content[0] == {
        "token": "a",
        "logprob": -0.5,
        "bytes": [97],
        "top_logprobs": [
            {"token": "A", "logprob": -2.0, "bytes": [65]},
            {"token": "B", "logprob": -3.0, "bytes": [66]},
        ],
    }


async def test_completion_logprobs_have_offsets_into_the_text() -> None:
    answer = await whole(text(logprobs=1), ScriptedGenerations("aé"))
    assert answer["choices"][0]["logprobs"] == {
        "tokens": ["a", "\\xc3", "\\xa9"],
        "token_logprobs": [-0.5] * 3,
        "top_logprobs": [{"A": -2.0, token: -0.5} for token in ("a", "\\xc3", "\\xa9")],
        "text_offset": [0, 1, 1],
    }


async def test_length_is_a_reason_and_the_context_a_limit() -> None:
    assert (await whole(text(max_tokens=2), ScriptedGenerations("abc")))["choices"][0]["finish_reason"] == "length"
    engine = ScriptedGenerations("abc")
    await completions(context=5).whole(text("say"), request=ID, generate=engine.generate)
    assert engine.requests[0].limits.max_new_tokens == 2


@pytest.mark.parametrize(("context", "asked"), [(3, None), (2, None), (10, 8)])
async def test_a_prompt_too_long_is_refused_before_anything_runs(context: int, asked: int | None) -> None:
    engine = ScriptedGenerations("abc")
    with pytest.raises(PromptTooLong) as caught:
        await completions(context=context).whole(text("say", max_tokens=asked), request=ID, generate=engine.generate)
    assert (caught.value.prompt_tokens, caught.value.context_tokens) == (3, context)
    assert engine.requests == []


async def test_tokens_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(FieldInvalid, match=r"prompt\[1\]: token 300"):
        completions(vocab_size=259).prompt_ids(text([[5], [300]]))


async def test_an_error_before_the_first_delta_is_raised() -> None:
    engine = ScriptedGenerations("abc", error=EngineStopping())
    with pytest.raises(EngineStopping):
        await frames(chat(stream=True), engine)


@pytest.mark.parametrize("n", [1, 2])
async def test_an_error_in_the_middle_becomes_an_event_and_the_end(n: int) -> None:
    engine = ScriptedGenerations("abc", error=EngineStopping(), fail_after=1)
    seen = await frames(chat(stream=True, n=n), engine)
    assert seen[-1]["error"]["message"] == "the engine is stopping"
    assert "[DONE]" not in seen
    assert engine.alive == set()


async def test_an_error_of_one_choice_aborts_the_others_of_a_whole_answer() -> None:
    slow = ScriptedGenerations("abc", pause=lambda: asyncio.sleep(3600))
    failing = ScriptedGenerations("abc", error=EngineStopping(), fail_after=1)

    def generate(request: GenerationRequest) -> AsyncIterator[TokenDelta]:
        return (slow if request.request.endswith("0") else failing).generate(request)

    with pytest.raises(EngineStopping):
        await completions().whole(chat(n=2), request=ID, generate=generate)
    assert slow.alive == set()


@pytest.mark.parametrize("n", [1, 3])
async def test_closing_a_stream_aborts_every_generation(n: int) -> None:
    engine = ScriptedGenerations("abc" * 50)
    stream = completions().stream(chat(stream=True, n=n), request=ID, generate=engine.generate)
    await anext(stream)
    await stream.aclose()
    assert engine.alive == set()
    assert len(engine.aborted) <= n


@pytest.mark.parametrize("n", [1, 3])
async def test_cancelling_a_whole_answer_aborts_every_generation(n: int) -> None:
    engine = ScriptedGenerations("abc", pause=lambda: asyncio.sleep(10))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(15):
            await completions().whole(chat(n=n), request=ID, generate=engine.generate)
    assert engine.alive == set()


async def test_a_slow_reader_holds_the_generations_back() -> None:
    made = 0

    async def count() -> None:
        nonlocal made
        made += 1

    engine = ScriptedGenerations("x" * 500, pause=count)
    stream = completions().stream(chat(stream=True, n=2), request=ID, generate=engine.generate)
    await anext(stream)
    for _ in range(500):
        await asyncio.sleep(0)
    assert made < 100
    await stream.aclose()


async def test_a_generation_that_ends_without_a_finish_is_a_defect() -> None:
    async def nothing(request: GenerationRequest) -> AsyncGenerator[TokenDelta, None]:
        return
        yield

    with pytest.raises(RuntimeError, match="without a finish"):
        await completions().whole(chat(), request=ID, generate=nothing)


async def test_the_chat_prompt_is_what_the_template_makes() -> None:
    assert completions().prompt_ids(chat()) == [list(b"user: hi\nassistant: ")]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_nested_without_end_tells_no_usage(stream: bool) -> None:
    sniffer = UsageSniffer(stream=stream)
    answer = b'{"usage":{"prompt_tokens":1},"x":' + b"[" * 5000 + b"]" * 5000 + b"}"
    sniffer.feed(b"data: " + answer + b"\n\n" if stream else answer)
    assert sniffer.usage() is None
