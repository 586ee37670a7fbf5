"""Where a template only shows what a message says, its turn has the same text around whatever it says."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvherd.adapters.chat_template import CHATML, ChatTemplate
from kvherd.core.text.calls import CallOptions, ChatCall
from kvherd.testing.chat_templates import SPLIT

LOOP = "{% for m in messages %}%s{% endfor %}"
SHOWN = {
    "chatml": CHATML,
    "stripped": LOOP.replace("%s", "[{{ m.role }}] {{ m['content'] | trim }}\n"),
    "a name for it": LOOP.replace(
        "%s",
        "{% set said = '<' + m.role + '>' + m.content.strip() %}{% if loop.first %}{% set said = bos + said %}"
        "{% endif %}{{ said ~ '|' }}",
    ),
    "asked for by name": LOOP.replace("%s", "{{ m.get('content', '') or 'nothing' }};"),
    "only if there is any": LOOP.replace("%s", "{% if m.content is string and m.content %}{{ m.content }}{% endif %}!"),
    "tools, which it has none of": LOOP.replace(
        "%s", "{% if 'tool_calls' in m %}{{ m.tool_calls }}{% else %}{{ m.content }}{% endif %}."
    ),
    "stripped with what is around it": LOOP.replace("%s", "{{ (' ' + m.content + ' ') | trim }}/"),
    "by the first message": LOOP.replace(
        "%s", "{% if messages[0]['role'] == 'system' and m.role == 'user' %}>{% endif %}{{ m.content }}\n"
    ),
}
LOOKED_AT = {
    "its length": "{{ m.content | length }}",
    "in capitals": "{{ m.content | upper }}",
    "a letter of it": "{{ m.content[0] }}",
    "what it is": "{% if m.content == 'hi' %}greeting{% endif %}",
    "a part of it": "{{ m.content.split('a')[0] }}",
    "whether something is in it": "{% if '?' in m.content %}question{% endif %}",
    "all of the message": "{{ m }}",
    "all of its values": "{% for name, value in m.items() %}{{ value }}{% endfor %}",
    "by a name": "{% set said = m.content %}{{ said | replace('a', 'b') }}",
    "by a name that it gets later": "{% for i in [1, 2] %}{{ x | upper }}{% set x = m.content %}{% endfor %}",
    "a field by another's name": "{{ m[m.role] }}",
    "letter by letter": "{% for letter in m.content %}{{ letter }}-{% endfor %}",
    "times": "{{ m.content * 2 }}",
    "its number": "{{ loop.index0 }} {{ m.content }}",
    "its neighbour": "{{ messages[loop.index0 - 1].content }} {{ m.content }}",
    "whether it is the last": "{{ m.content }}{% if loop.last %}.{% endif %}",
}
CONTENT = st.sampled_from(["a", " a", "a ", "\x1fa", "\nx\u3000", "é", "a" * 9, "{{ m }}", "<b>", "0"])
CHAT = st.lists(
    st.builds(lambda role, said: {"role": role, "content": said}, st.sampled_from(["user", "assistant"]), CONTENT),
    min_size=2,
    max_size=5,
)


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos": "<s>"})


def only_shown(source: str) -> bool:
    turns = template(source).turns
    return turns is not None and turns.only_shown


def last_turn(made: ChatTemplate, messages: list[dict[str, Any]]) -> str:
    rendered = made.render_turns(ChatCall(CallOptions(model=""), tuple(messages)), len(messages) - 1)
    assert rendered is not None
    return rendered.turns[0] + rendered.ending


@pytest.mark.parametrize("source", SHOWN.values(), ids=SHOWN)
@settings(deadline=None, max_examples=30)
@given(chat=CHAT, other=CHAT, said=CONTENT)
def test_around_what_is_only_shown_stands_the_same_whatever_it_is(
    source: str, chat: list[dict[str, Any]], other: list[dict[str, Any]], said: str
) -> None:
    assert only_shown(source)
    made, role = template(source), chat[-1]["role"]
    mark = "\x1fmark\x1f"
    marked = last_turn(made, [*chat[:-1], {"role": role, "content": mark}])
    whole = mark if mark in marked else "mark"
    before, after = marked.split(whole)
    shown = said if whole == mark else said.strip()
    elsewhere = [chat[0], *other, {"role": role, "content": said}]
    assert last_turn(made, elsewhere) == before + shown + after


@pytest.mark.parametrize("body", LOOKED_AT.values(), ids=LOOKED_AT)
def test_what_is_looked_at_is_not_only_shown(body: str) -> None:
    assert not only_shown(LOOP.replace("%s", body))


@pytest.mark.parametrize("ending", ["{{ messages[-1].content }}", "{{ messages | length }}"])
def test_what_stands_behind_the_turns_may_tell_of_no_message(ending: str) -> None:
    assert only_shown(CHATML)
    assert not only_shown(CHATML + ending)


def test_templates_that_look_at_tools_or_neighbours_are_taken_as_they_are() -> None:
    assert [only_shown(source) for source in SPLIT] == [True, False, False]
