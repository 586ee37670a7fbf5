"""Chats rendered turn by turn: never another text than the whole template makes, or none."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvherd.adapters.chat_template import CHATML, ChatTemplate
from kvherd.core.errors import FieldInvalid
from kvherd.core.text.calls import CallOptions, ChatCall
from kvherd.core.text.turns import UNREAD, RenderedTurns, TurnUnreadError
from kvherd.testing.chat_templates import SPLIT, WHOLE

SPECIAL = {"bos_token": "<|im_start|>"}
TEMPLATES = {source: ChatTemplate(source, SPECIAL) for source in (CHATML, *SPLIT)}
CALL = {"type": "function", "function": {"name": "find", "arguments": {"city": "Köln"}}}
CONTENTS = st.sampled_from(["", "a", " b \n", "<|im_end|>", "c</think> d", "東京", "{{ messages }}"])
MESSAGES = st.lists(
    st.builds(
        lambda role, content, calls: {"role": role, "content": content, **({"tool_calls": [CALL]} if calls else {})},
        st.sampled_from(["system", "user", "assistant", "tool"]),
        CONTENTS,
        st.booleans(),
    ),
    min_size=1,
    max_size=8,
)
ARGS = st.sampled_from([{}, {"shout": True}])


def call_of(messages: list[dict[str, Any]], *, tools: bool, args: dict[str, Any], opens: bool) -> ChatCall:
    return ChatCall(CallOptions("m"), tuple(messages), ({"name": "find"},) * tools, args, opens)


def hidden(call: ChatCall, begin: int) -> ChatCall:
    """The same with nothing told of the messages before `begin`, but for the first and the last of them."""
    kept = tuple(m if at == 0 or at >= begin - 1 else UNREAD for at, m in enumerate(call.messages))
    return ChatCall(call.options, kept, call.tools, call.template_args, call.add_generation_prompt)


def whole(turns: RenderedTurns) -> str:
    return turns.opening + "".join(turns.turns) + turns.ending


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=["chatml", "first turn", "tools", "system apart"])
@given(messages=MESSAGES, tools=st.booleans(), args=ARGS, opens=st.booleans())
def test_turns_by_themselves_are_what_the_whole_shows_of_them(
    template: ChatTemplate, messages: list[dict[str, Any]], tools: bool, args: dict[str, Any], opens: bool
) -> None:
    call = call_of(messages, tools=tools, args=args, opens=opens)
    all_turns = template.render_turns(call, 0)
    assert all_turns is not None
    assert whole(all_turns) == template.render(call)
    apart = len(messages) - len(all_turns.turns)
    for begin in range(1, len(messages)):
        some = template.render_turns(hidden(call, begin), begin)
        assert some is not None
        assert some == RenderedTurns(all_turns.opening, all_turns.turns[begin - apart :], all_turns.ending)


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=["chatml", "first turn", "tools", "system apart"])
@given(messages=MESSAGES, more=MESSAGES, tools=st.booleans(), args=ARGS)
def test_what_was_rendered_is_not_changed_by_what_is_said_later(
    template: ChatTemplate,
    messages: list[dict[str, Any]],
    more: list[dict[str, Any]],
    tools: bool,
    args: dict[str, Any],
) -> None:
    assert template.turns is not None
    before = template.render_turns(call_of(messages, tools=tools, args=args, opens=True), 0)
    after = template.render_turns(call_of([*messages, *more], tools=tools, args=args, opens=True), 0)
    assert before is not None
    assert after is not None
    known = len(before.turns) - template.turns.ahead
    assert after.opening == before.opening
    assert after.turns[: max(0, known)] == before.turns[: max(0, known)]


@pytest.mark.parametrize("source", WHOLE)
def test_a_template_whose_turns_depend_on_others_is_rendered_as_a_whole(source: str) -> None:
    template = ChatTemplate(source, SPECIAL)
    assert template.turns is None
    assert (
        template.render_turns(call_of([{"role": "user", "content": "hi"}], tools=False, args={}, opens=True), 0) is None
    )


def test_a_look_at_the_message_before_the_first_is_one_at_the_last_and_tells_nothing() -> None:
    source = "{% for one in messages %}{{ messages[loop.index0 - 1].role ~ one.content }}{% endfor %}"
    template = ChatTemplate(source, SPECIAL)
    call = call_of([{"role": "user", "content": text} for text in "abc"], tools=False, args={}, opens=True)
    assert template.turns is not None
    assert template.render_turns(call, 0) is None
    turns = template.render_turns(hidden(call, 1), 1)
    assert turns is not None
    assert turns.turns == ["userb", "userc"]


def test_a_look_at_a_message_that_is_not_given_is_never_answered() -> None:
    source = CHATML + "{{ messages[1].content }}"
    template = ChatTemplate(source, SPECIAL)
    call = call_of([{"role": "user", "content": text} for text in "abcd"], tools=False, args={}, opens=True)
    assert template.render_turns(hidden(call, 3), 3) is None
    assert template.render_turns(call, 0) is not None
    for look in (
        str,
        bool,
        iter,
        lambda one: one["role"],
        lambda one: one.get("role"),
        lambda one: {**one},
    ):
        with pytest.raises(TurnUnreadError):
            look(UNREAD)


def test_what_a_template_refuses_it_refuses_of_the_turns_too() -> None:
    source = (
        "{% for one in messages %}{% if one.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"
    )
    template = ChatTemplate(source, SPECIAL)
    call = call_of([{"role": "user", "content": ""}, {"role": "tool", "content": ""}], tools=False, args={}, opens=True)
    with pytest.raises(FieldInvalid, match="no tools"):
        template.render_turns(hidden(call, 1), 1)


def test_a_template_is_not_told_by_what_a_message_says_where_it_was_cut() -> None:
    template = ChatTemplate(CHATML, SPECIAL)
    assert template.turns is not None
    secret = template.turns._mark
    call = call_of([{"role": "user", "content": f"x{secret}y"}] * 2, tools=False, args={}, opens=True)
    assert template.render_turns(call, 0) is None  # only who guesses 128 bits gets here
