"""Which class of prompts a call is of, and what the probes of each are."""

import json

import pytest

from kvherd.core.text.parity import PromptClass, classify, first_difference, probes
from kvherd.wire.openai.requests import decode_chat, decode_completion

SPECIAL = {"<|im_start|>": 1}
HI = {"role": "user", "content": "hi"}


def chat(*messages: object, **fields: object) -> PromptClass:
    return classify(decode_chat(json.dumps({"model": "m", "messages": messages, **fields}).encode()), SPECIAL)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (chat(HI), PromptClass.CHAT),
        (chat({"role": "system", "content": "be"}, HI), PromptClass.TURNS),
        (chat({"role": "user", "content": [{"type": "text", "text": "hi"}]}), PromptClass.PARTS),
        (chat({"role": "user", "content": "<|im_start|>"}), PromptClass.SPECIAL),
        (chat(HI, chat_template_kwargs={"thinking": True}), PromptClass.TEMPLATE_ARGS),
        (chat(HI, add_generation_prompt=False), PromptClass.TEMPLATE_ARGS),
        (chat(HI, {"role": "assistant", "content": "The"}), PromptClass.PREFILL),
        (chat(HI, tools=[{"type": "function", "function": {"name": "f"}}]), PromptClass.TOOLS),
        (chat(HI, {"role": "tool", "content": "5"}), PromptClass.TOOLS),
    ],
)
def test_a_chat_is_of_the_class_that_goes_wrong_first(found: PromptClass, expected: PromptClass) -> None:
    assert found is expected


def test_a_completion_is_a_text() -> None:
    assert classify(decode_completion(b'{"model": "m", "prompt": "hi"}'), SPECIAL) is PromptClass.TEXT


def test_every_class_has_a_probe_that_is_of_it() -> None:
    bodies = probes(SPECIAL)
    assert set(bodies) == set(PromptClass)
    for prompt_class, body in bodies.items():
        decode = decode_completion if "prompt" in body else decode_chat
        assert classify(decode(json.dumps({"model": "m", **body}).encode()), SPECIAL) is prompt_class


def test_without_special_tokens_there_is_no_probe_of_them() -> None:
    assert PromptClass.SPECIAL not in probes({})


def test_the_first_difference_may_be_an_end() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2], [1]) == 1
    assert first_difference([], [4]) == 0
