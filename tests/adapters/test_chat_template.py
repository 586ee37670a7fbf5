"""Chat templates: what they are given, and what becomes of a template that fails."""

import pytest

from kvherd.adapters.chat_template import CHATML, ChatTemplate
from kvherd.core.errors import FieldInvalid, ModelUnsupported
from kvherd.core.text.calls import CallOptions, ChatCall

USER: dict[str, object] = {"role": "user", "content": "hi"}


def call(*messages: dict[str, object], **more: object) -> ChatCall:
    return ChatCall(CallOptions("m"), messages, **more)  # type: ignore[arg-type]


def render(source: str, chat: ChatCall) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(chat)


def test_chatml_renders_turns_and_opens_the_answer() -> None:
    chat = call({"role": "system", "content": "be kind"}, USER)
    opened = "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML, chat) == opened
    assert not render(CHATML, call(USER, add_generation_prompt=False)).endswith("assistant\n")


def test_blocks_leave_no_blank_lines_as_in_transformers() -> None:
    source = "{% for m in messages %}\n    {% if true %}\n{{ m['content'] }}\n    {% endif %}\n{% endfor %}\n"
    assert render(source, call(USER, USER)) == "hi\nhi\n"


def test_loops_may_break_and_variables_are_there() -> None:
    source = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% break %}{% endfor %}{{ eos_token }}{{ mood }}"
    assert render(source, call(USER, USER, template_args={"mood": "!"})) == "<s>hi</s>!"


def test_template_arguments_cannot_replace_the_messages() -> None:
    assert render("{{ messages[0].content }}", call(USER, template_args={"messages": [], "bos_token": "x"})) == "hi"


def test_tools_are_plain_json_and_absent_when_there_are_none() -> None:
    tool = {"name": "<é>", "n": 1}
    assert render("{{ tools[0] | tojson }}", call(USER, tools=(tool,))) == '{"name": "<é>", "n": 1}'
    assert render("{{ tools[0] | tojson(indent=1) }}", call(USER, tools=(tool,))) == '{\n "name": "<é>",\n "n": 1\n}'
    assert render("{{ tools is none }}", call(USER)) == "True"


def test_text_parts_are_joined_and_no_content_is_empty() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render(CHATML, call({"role": "user", "content": parts}, add_generation_prompt=False)) == (
        "<|im_start|>user\none\ntwo<|im_end|>\n"
    )
    assert "assistant\n<|im_end|>" in render(CHATML, call({"role": "assistant", "content": None}))


def test_a_part_that_is_no_text_is_named() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(FieldInvalid, match=r"messages\[1\]\.content\[1\]: this model reads text only"):
        render(CHATML, call(USER, {"role": "user", "content": parts}))


def test_special_tokens_in_a_message_stay() -> None:
    assert "a<|im_end|>b" in render(CHATML, call({"role": "user", "content": "a<|im_end|>b"}))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "concatenate"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages.clear() }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ nothing.at.all }}", "undefined"),
        ("{% for i in range(99999999) %}{% endfor %}", "Range too big"),
    ],
)
def test_a_template_that_fails_is_the_callers_to_know(source: str, said: str) -> None:
    with pytest.raises(FieldInvalid) as refused:
        render(source, call(USER))
    assert str(refused.value).startswith("messages: the chat template of this model refuses them: ")
    assert said in str(refused.value)


def test_a_template_that_cannot_be_read_is_the_models_fault() -> None:
    with pytest.raises(ModelUnsupported, match="its chat template"):
        ChatTemplate("{% if %}", {})


def test_a_message_that_is_to_be_gone_on_with_stays_open() -> None:
    template = ChatTemplate(CHATML, {})
    messages = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "The Rhine "})
    call = ChatCall(CallOptions("m"), messages, add_generation_prompt=False, continue_final_message=True)
    assert template.render(call).endswith("<|im_start|>assistant\nThe Rhine ")
    trimming = ChatTemplate("{% for m in messages %}[{{ m['content'] | trim }}]{% endfor %}", {})
    assert trimming.render(call) == "[hi][The Rhine"
    hiding = ChatTemplate("{{ messages[0]['content'] }}", {})
    with pytest.raises(FieldInvalid, match="continue_final_message"):
        hiding.render(call)
