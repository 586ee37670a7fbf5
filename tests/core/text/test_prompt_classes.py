"""Which class of prompts a call is of, and what the probes of each are."""

import json

import pytest

from kvherd.core.text.parity import PromptClass, classify, first_difference, probes
from kvherd.wire.openai.requests import decode_chat, decode_completion

SPECIAL = {"<|im_start|>": 1}
HI = {"role": "user", "content": "hi"}


TOOL = {"type": "function", "function": {"name": "f"}}
CHAT, TURNS = PromptClass.CHAT, PromptClass.TURNS


def chat(*messages: object, **fields: object) -> tuple[PromptClass, ...]:
    return classify(decode_chat(json.dumps({"model": "m", "messages": messages, **fields}).encode()), SPECIAL)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (chat(HI), (CHAT,)),
        (chat({"role": "system", "content": "be"}, HI), (CHAT, TURNS)),
        (chat({"role": "user", "content": [{"type": "text", "text": "hi"}]}), (CHAT, PromptClass.PARTS)),
        (chat({"role": "user", "content": "<|im_start|>"}), (CHAT, PromptClass.SPECIAL)),
        (chat(HI, chat_template_kwargs={"thinking": True}), (CHAT, PromptClass.TEMPLATE_ARGS)),
        (chat(HI, {"role": "assistant", "content": "The"}), (CHAT, TURNS, PromptClass.PREFILL)),
        (chat(HI, add_generation_prompt=False, continue_final_message=True), (CHAT, PromptClass.PREFILL)),
        (chat(HI, tools=[TOOL]), (CHAT, PromptClass.TOOLS)),
        (chat(HI, {"role": "tool", "content": "5"}), (CHAT, TURNS, PromptClass.TOOLS)),
    ],
)
def test_a_chat_is_of_every_class_that_may_go_wrong(
    found: tuple[PromptClass, ...], expected: tuple[PromptClass, ...]
) -> None:
    assert found == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"add_generation_prompt": False},
        {"chat_template_kwargs": {"add_generation_prompt": False}},
    ],
)
def test_fields_that_engines_read_each_in_their_way_are_a_class_of_their_own(fields: dict[str, object]) -> None:
    assert chat(HI, **fields)[-1] is PromptClass.AMBIGUOUS


def test_a_completion_is_a_text() -> None:
    assert classify(decode_completion(b'{"model": "m", "prompt": "hi"}'), SPECIAL) == (PromptClass.TEXT,)


def test_every_class_but_the_ambiguous_has_a_probe_that_is_of_it() -> None:
    bodies = probes(SPECIAL)
    assert set(bodies) == set(PromptClass) - {PromptClass.AMBIGUOUS}
    for prompt_class, body in bodies.items():
        decode = decode_completion if "prompt" in body else decode_chat
        assert classify(decode(json.dumps({"model": "m", **body}).encode()), SPECIAL)[-1] is prompt_class


def test_without_special_tokens_there_is_no_probe_of_them() -> None:
    assert PromptClass.SPECIAL not in probes({})


def test_the_first_difference_may_be_an_end() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2], [1]) == 1
    assert first_difference([], [4]) == 0
