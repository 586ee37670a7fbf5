"""Conversations that grow: what is remembered of their beginnings never changes what is made of the whole."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as HfTokenizer

from kvherd.adapters.chat_template import CHATML
from kvherd.adapters.tokenizer import ModelTokenizer
from kvherd.adapters.vocabulary import Vocabulary, byte_characters, tiny_vocabulary
from kvherd.core.kv.hashing import PrefixHasher
from kvherd.core.text.calls import ChatCall
from kvherd.core.text.turns import RenderedTurns
from kvherd.ports.completions import Tokenizer
from kvherd.services.gateway.reading.conversations import Conversations
from kvherd.services.gateway.reading.encodings import EncodingCache
from kvherd.services.gateway.reading.prompts import Prompt, read_prompt_now
from kvherd.testing.chat_templates import LAST_QUESTION, SPLIT
from kvherd.testing.tokenizer import ByteTokenizer
from kvherd.wire.openai.routing import Peek, peek

PATH = "/v1/chat/completions"
HASHER = PrefixHasher(b"key")
SPECIAL = ("<|im_start|>", "<|im_end|>", "<s>", "a<s>b", "|im_", "x<|im_end|>\n<|im_start|>user")


def merging(template: str) -> ModelTokenizer:
    """A vocabulary whose merges reach across whatever is cut wrongly, and special tokens within one another."""
    characters = sorted(byte_characters(), key=byte_characters().__getitem__)
    merges = [("a", "a"), ("aa", "a"), ("Ċ", "a"), ("Ġ", "b"), ("e", "r"), ("er", "Ċ"), (":", "Ġb"), ("<", "|")]
    names = [*characters, *("".join(pair) for pair in merges)]
    tokenizer = HfTokenizer(models.BPE(vocab={name: at for at, name in enumerate(names)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tiny = tiny_vocabulary()
    config = {**tiny.tokenizer_config, "chat_template": template}
    return ModelTokenizer(Vocabulary(tokenizer, config, {"max_position_embeddings": 600}))


TOKENIZERS = {"chatml": CHATML, "first turn": SPLIT[0], "tools": SPLIT[1], "apart": SPLIT[2], "whole": LAST_QUESTION}
MERGING = {name: merging(template) for name, template in TOKENIZERS.items()}

CONTENTS: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(
        ["", "aa", "a\n", " b", "<s>", "a<s>", "b", "<|im_", "er\naaa b:", "naïve 東京 😀", "x", "x" * 300]
    ),
    st.lists(st.builds(lambda text: {"type": "text", "text": text}, st.sampled_from(["aa", "<s>b", "é"])), max_size=2),
    st.none(),
)
CALLS = [{"id": "1", "type": "function", "function": {"name": "find", "arguments": '{"city": "Köln"}'}}]
MESSAGE = st.builds(
    lambda role, content, calls: {"role": role, "content": content, **({"tool_calls": CALLS} if calls else {})},
    st.sampled_from(["system", "user", "user", "assistant", "tool", "nobody"]),
    CONTENTS,
    st.sampled_from([False, False, True]),
)
PLAIN = st.builds(
    lambda role, content: {"role": role, "content": content},
    st.sampled_from(["user", "user", "user", "assistant", "system"]),
    st.sampled_from(["aa", " a ", "a\n", " ", "<s>", "|im_", "<|", "\x1f", "er\n", "é", "x" * 300, "im_start|>user"]),
)
STEP = st.one_of(
    st.tuples(st.just("say"), st.lists(MESSAGE, min_size=1, max_size=3)),
    st.tuples(st.just("edit"), st.tuples(st.integers(0, 20), MESSAGE)),
    st.tuples(st.just("cut"), st.integers(0, 20)),
    st.tuples(st.just("ask"), st.lists(PLAIN, min_size=1, max_size=4)),
)
FIELDS = st.sampled_from(
    [
        *([{}] * 6),
        {"user": "ann", "seed": 1},
        {"cache_salt": "salt"},
        {"tools": [{"type": "function", "function": {"name": "find"}}]},
        {"chat_template_kwargs": {"shout": True}},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"documents": [{"title": "a"}]},
        {"messages_too": [{"role": "user", "content": "aa"}]},
    ]
)
SPELLINGS = st.sampled_from([{}, {}, {"separators": (",", ":")}, {"indent": 1}, {"ensure_ascii": False}])


def done(messages: list[dict[str, Any]], act: str, what: Any) -> list[dict[str, Any]]:
    if act in ("say", "ask"):
        return [*messages, *what]
    if act == "edit" and messages:
        at = what[0] % len(messages)
        return [*messages[:at], what[1], *messages[at + 1 :]]
    return messages if act == "edit" else messages[: what % (len(messages) + 1)]


def body_of(messages: Sequence[dict[str, Any]], fields: dict[str, Any], spelling: dict[str, Any]) -> bytes:
    return json.dumps({"model": "m", **fields, "messages": messages}, **spelling).encode()


def told(prompt: Prompt | None) -> object:
    assert prompt is not None
    ids = None if prompt.token_ids is None else list(prompt.token_ids)
    chains = [
        prompt.chain(HASHER, "m", size, lora=lora, bigrams=bigrams)
        for size, lora, bigrams in ((4, None, False), (16, None, False), (16, "l", False), (4, None, True))
    ]
    return ids, prompt.classes, prompt.tokens, prompt.salt, prompt.text, chains


def told_of(peeked: Peek) -> list[object]:
    values = (getattr(peeked, name) for name in Peek.__struct_fields__)
    return [bytes(value) if isinstance(value, Raw) else value for value in values]


@pytest.mark.parametrize("tokenizer", MERGING.values(), ids=MERGING)
@settings(deadline=None)
@given(
    messages=st.lists(MESSAGE, max_size=4), steps=st.lists(st.tuples(STEP, FIELDS, SPELLINGS), min_size=1, max_size=6)
)
def test_a_conversation_has_the_tokens_that_its_messages_have_by_themselves(
    tokenizer: ModelTokenizer,
    messages: list[dict[str, Any]],
    steps: list[tuple[tuple[str, Any], dict[str, Any], dict[str, Any]]],
) -> None:
    encodings = EncodingCache()
    conversations = Conversations(encodings)
    for (act, what), fields, spelling in [(("say", []), {}, {}), *steps]:
        for last in what[:-1] if act == "ask" else ():  # of one conversation, each in another's place
            require_the_same(
                conversations, encodings, tokenizer, body_of(done(messages, act, [last]), fields, spelling)
            )
        messages = done(messages, act, what[-1:] if act == "ask" else what)
        require_the_same(conversations, encodings, tokenizer, body_of(messages, fields, spelling))


def require_the_same(
    conversations: Conversations, encodings: EncodingCache, tokenizer: Tokenizer, body: bytes
) -> Prompt:
    """Both ways to the same prompt, and to what is told of the body."""
    known = conversations.recall(body)
    peeked, recalled = known if known is not None else (peek(body), None)
    assert told_of(peeked) == told_of(peek(body))
    remembered = read_prompt_now(
        PATH, body, peeked, tokenizer, encodings, conversations=conversations, recalled=recalled
    )
    assert told(remembered) == told(read_prompt_now(PATH, body, peek(body), tokenizer, EncodingCache()))
    assert remembered is not None
    return remembered


def said(*turns: str) -> list[dict[str, Any]]:
    """`user: hi` and so on."""
    return [dict(zip(("role", "content"), turn.split(": ", 1), strict=True)) for turn in turns]


STORIES = {
    "another first message of the same length": (
        "chatml",
        [said("user: ann", "assistant: and", "user: x"), said("user: bob", "assistant: and", "user: x")],
    ),
    "an answer of a tool that turns out not to be the last": (
        "tools",
        [
            said("user: a", "tool: b", "user: c"),
            said("user: a", "tool: b", "tool: c"),
            said("user: a", "tool: b", "tool: c", "tool: d", "user: e"),
            said("user: a", "tool: b", "tool: c", "user: d", "user: e"),
        ],
    ),
    "a special token that a later message makes part of a longer one": (
        "chatml",
        [said("user: x", "assistant: b"), said("user: x", "user: b"), said("user: x", "user: b", "user: c")],
    ),
    "a special token in a message that is edited away": (
        "chatml",
        [said("user: a", "user: <s>", "user: b"), said("user: a", "user: x", "user: b")],
    ),
    "a system message that stands apart": (
        "apart",
        [said("system: a", "user: b"), said("system: a", "user: b", "user: c"), said("user: a", "user: b", "user: c")],
    ),
}


@pytest.mark.parametrize(("template", "story"), STORIES.values(), ids=STORIES)
def test_a_beginning_is_taken_for_no_other(template: str, story: list[list[dict[str, Any]]]) -> None:
    for chats in (story, story[::-1]):
        encodings = EncodingCache()
        conversations = Conversations(encodings)
        for messages in chats:
            for fields in ({}, {"cache_salt": "salt"}):
                require_the_same(conversations, encodings, MERGING[template], body_of(messages, fields, {}))


def test_a_template_that_is_rendered_as_a_whole_has_no_beginnings() -> None:
    encodings = EncodingCache()
    body = body_of(said("user: a", "user: b", "user: c"), {}, {})
    prompt = require_the_same(Conversations(encodings), encodings, MERGING["whole"], body)
    assert (prompt.beginning, prompt.token_ids is not None) == (None, True)


def read(conversations: Conversations, encodings: EncodingCache, tokenizer: ByteTokenizer, said: str) -> Prompt:
    messages = [{"role": "assistant" if at % 2 else "user", "content": text} for at, text in enumerate(said.split())]
    body = body_of(messages, {}, {})
    prompt = read_prompt_now(PATH, body, peek(body), tokenizer, encodings, conversations=conversations)
    assert prompt is not None
    return prompt


def test_of_a_conversation_that_goes_on_only_what_is_new_is_encoded() -> None:
    encodings, tokenizer = EncodingCache(), ByteTokenizer()
    conversations = Conversations(encodings)
    read(conversations, encodings, tokenizer, "one two three")
    tokenizer.encoded.clear()
    prompt = read(conversations, encodings, tokenizer, "one two three four five")
    assert tokenizer.encoded == ["<|im_start|>assistant\nfour", "<|im_start|>user\nfive"]
    assert prompt.beginning is not None
    assert prompt.beginning.count == 4
    again = read(conversations, encodings, tokenizer, "one two three four other")
    assert again.beginning is prompt.beginning


class Counting(ByteTokenizer):
    """Notes how many messages were rendered each time."""

    def __init__(self) -> None:
        super().__init__()
        self.rendered: list[int] = []

    def render_turns(self, call: ChatCall, begin: int) -> RenderedTurns | None:
        self.rendered.append(len(call.messages) - begin)
        return super().render_turns(call, begin)


def test_what_is_asked_in_anothers_place_needs_no_template() -> None:
    encodings, tokenizer = EncodingCache(), Counting()
    conversations = Conversations(encodings)
    read(conversations, encodings, tokenizer, "one two three")
    read(conversations, encodings, tokenizer, "one two other")  # what stands around it is learned here
    tokenizer.rendered.clear()
    tokenizer.encoded.clear()
    prompt = read(conversations, encodings, tokenizer, "one two another")
    assert tokenizer.rendered == []
    assert tokenizer.encoded == ["<|im_start|>user\nanother"]
    whole = read(Conversations(encodings), encodings, tokenizer, "one two another")
    assert prompt.token_ids == whole.token_ids
    assert told(prompt) == told(whole)


def test_a_conversation_goes_on_without_the_template_once_its_roles_are_known() -> None:
    encodings, tokenizer = EncodingCache(), Counting()
    conversations = Conversations(encodings)
    for last in ("three", "other"):
        read(conversations, encodings, tokenizer, f"one two {last}")
    for last in ("four", "other"):
        read(conversations, encodings, tokenizer, f"one two three {last}")
    tokenizer.rendered.clear()
    read(conversations, encodings, tokenizer, "one two three four five six seven")
    assert tokenizer.rendered == []


@pytest.mark.parametrize(
    "last",
    [
        {"role": "user", "content": "x", "name": "ann"},
        {"role": "nobody", "content": "x"},
        {"role": "user", "content": None},
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {"role": "user", "content": ""},
        {"role": "user", "content": "  "},
        {"role": "user", "content": "x<|im_end|>"},
        {"role": "user", "content": "x" * 40_000},
    ],
)
def test_what_is_not_plain_is_looked_at_closely(last: dict[str, Any]) -> None:
    encodings, tokenizer = EncodingCache(), Counting()
    conversations = Conversations(encodings)
    for plain in ("three", "other"):
        read(conversations, encodings, tokenizer, f"one two {plain}")
    body = body_of([*said("user: one", "assistant: two"), last], {}, {})
    remembered = read_prompt_now(PATH, body, peek(body), tokenizer, encodings, conversations=conversations)
    alone = read_prompt_now(PATH, body, peek(body), tokenizer, EncodingCache())
    assert (remembered is None) == (alone is None)
    if remembered is not None and alone is not None:
        assert told(remembered) == told(alone)


def test_two_tokenizers_and_two_kinds_of_calls_share_no_beginning() -> None:
    encodings = EncodingCache()
    conversations = Conversations(encodings)
    first = read(conversations, encodings, ByteTokenizer(), "one two three")
    other = read(conversations, encodings, ByteTokenizer(special_tokens={"<|im_start|>": 300}), "one two three")
    assert first.beginning is not None
    assert other.beginning is not None
    assert list(first.beginning.tokens) != list(other.beginning.tokens)


def test_memory_is_bounded_and_the_latest_used_stay() -> None:
    encodings, tokenizer = EncodingCache(), ByteTokenizer()
    conversations = Conversations(encodings, limit_bytes=20_000)
    kept = read(conversations, encodings, tokenizer, "kept well now").beginning
    for number in range(100):
        read(conversations, encodings, tokenizer, f"one {'x' * number} {number}")
        assert read(conversations, encodings, tokenizer, "kept well now").beginning is kept
        assert conversations._bytes == sum(one.size_bytes for one in conversations._known.values()) <= 20_000


@pytest.mark.parametrize("tools", [0, 1])
def test_what_stands_around_messages_is_remembered_within_bounds(tools: int) -> None:
    encodings, tokenizer = EncodingCache(), ByteTokenizer()
    conversations = Conversations(encodings, frames_bytes=10_000)
    frames = conversations._frames
    beginnings = []
    for number in range(100):
        fields = {"user": f"ann {number}", "tools": [{"name": f"find {number}"}] * tools}
        prompt = require_the_same(conversations, encodings, tokenizer, body_of(said("user: a", "user: b"), fields, {}))
        beginnings.append(prompt.beginning)
        assert 0 < frames._known_bytes <= 10_000
        assert 0 < frames._numbers_bytes <= 10_000
    assert len(frames._known) < 10
    assert len(frames._numbers) < 10
    assert len({id(one) for one in beginnings}) == (100 if tools else 1)


def test_a_prompt_that_is_too_long_is_so_with_its_beginning() -> None:
    tokenizer, encodings = MERGING["chatml"], EncodingCache()
    conversations = Conversations(encodings)
    lengths = []
    for turns in range(1, 60):
        body = body_of([{"role": "user", "content": "x" * 600}] * turns, {}, {})
        lengths.append(require_the_same(conversations, encodings, tokenizer, body).token_ids)
    assert lengths[0] is not None
    assert lengths[-1] is None


def test_long_fresh_text_is_left_to_a_thread() -> None:
    encodings, tokenizer = EncodingCache(), ByteTokenizer()
    conversations = Conversations(encodings)
    long = body_of([{"role": "user", "content": "x" * 40_000}, {"role": "user", "content": "hi"}], {}, {})
    assert read_prompt_now(PATH, long, peek(long), tokenizer, encodings, conversations=conversations) is None
    last = body_of([{"role": "user", "content": "hi"}, {"role": "user", "content": "x" * 40_000}], {}, {})
    assert read_prompt_now(PATH, last, peek(last), tokenizer, encodings, conversations=conversations) is None


def test_a_beginning_names_its_blocks_once_for_each_namespace() -> None:
    encodings, tokenizer = EncodingCache(), ByteTokenizer()
    conversations = Conversations(encodings)
    beginning = read(conversations, encodings, tokenizer, "one two three").beginning
    assert beginning is not None
    names = beginning.chain(HASHER, "m", 4, lora=None, salt=None)
    assert beginning.chain(HASHER, "m", 4, lora=None, salt=None) is names
    for number in range(20):
        assert beginning.chain(HASHER, "m", 4, lora=None, salt=str(number)) != names
    assert len(beginning.chains) <= 4
    assert beginning.chain(HASHER, "m", 4, lora=None, salt=None) == names
    assert replace(beginning, chains={}).chain(HASHER, "m", 4, lora=None, salt=None) == names


HISTORY = [{"role": "system", "content": "aa"}, {"role": "user", "content": "b"}, {"role": "assistant", "content": "x"}]


def asked(text: str, **fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [*HISTORY, {"role": "user", "content": text}], **fields}).encode()


def with_history() -> tuple[Conversations, EncodingCache]:
    """As after three questions with the same before them."""
    encodings = EncodingCache()
    conversations = Conversations(encodings)
    for text in ("b", "bb", "bbb"):
        require_the_same(conversations, encodings, MERGING["chatml"], asked(text, seed=1))
    return conversations, encodings


def test_of_a_body_that_is_known_but_for_its_last_text_nothing_else_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    conversations, encodings = with_history()
    body = asked("a }] [{ b", seed=1)
    whole = peek(body)
    assert conversations.recall(asked("a", seed=2)) is None, "other fields stand around its messages"
    known = conversations.recall(asked("aab", seed=1))
    assert known is not None
    assert told_of(known[0]) == told_of(peek(asked("aab", seed=1)))
    monkeypatch.setattr(conversations, "_frames", None)
    prompt = read_prompt_now(
        PATH, body, whole, MERGING["chatml"], encodings, conversations=conversations, recalled=known[1]
    )
    assert prompt is not None


@pytest.mark.parametrize(
    "body",
    [
        asked("b", seed=1)[:-1],
        asked("b", seed=1) + b"}",
        asked("b", seed=1).replace(b'"aa"', b'"aa'),
        asked("b", seed=1).replace(b'"content": "b"}]', b'"content": "b}]'),
        asked("b", seed=1).replace(b'"content": "b"}]', b'"content": "b"},]'),
        asked("b", seed=1).replace(b'"content": "b"}]', b'"content": "b"}}]'),
        asked("b", seed=1).replace(b'"content": "b"}]', b'"content": "b"}]]'),
        asked("b", seed=1).replace(b"[{", b"{[{"),
        asked("b", seed=1).replace(b'{"model"', b'{"messages": [], "model"'),
        asked("b", seed=1)[:-1] + b', "messages": [{"role": "user", "content": "b"}]}',
        asked("b", seed=1)[:-1] + b', "m\\u0065ssages": [{"role": "user", "content": "b"}]}',
        asked("b", seed=1).replace(b'"model": "m"', b'"model": "m", "user": "\\"messages\\": ["'),
        asked("b", seed=1).replace(b'"model": "m"', b'"model": "m", "metadata": {"messages": []}'),
        asked("b", seed=1).replace(b'"aa"', b'"ab"'),
        b"",
        b"[]",
        b'"messages"',
        b'{"messages": []}',
        b'{"messages": [{}]}',
    ],
)
def test_what_only_looks_like_a_known_body_is_read_as_a_whole(body: bytes) -> None:
    conversations, encodings = with_history()
    if conversations.recall(body) is not None:
        require_the_same(conversations, encodings, MERGING["chatml"], body)


def test_messages_that_stand_elsewhere_in_a_body_are_not_taken_for_its_own() -> None:
    encodings = EncodingCache()
    conversations = Conversations(encodings)
    for text in ("b", "bb", "bbb"):
        messages = json.dumps([*HISTORY, {"role": "user", "content": text}])
        for around in (
            '{"model": "m", "metadata": {"messages": %s}, "messages": %s}',
            '{"model": "m", "user": "\\"messages\\":", "messages": %s, "n": 1}',
        ):
            body = (around % ((messages,) * around.count("%s"))).encode()
            require_the_same(conversations, encodings, MERGING["chatml"], body)


def test_what_stands_around_messages_is_noted_within_bounds() -> None:
    conversations, encodings = with_history()
    for number in range(300):
        for text in ("a", "b"):
            require_the_same(conversations, encodings, MERGING["chatml"], asked(text, seed=number))
        assert len(conversations._frames._around) <= 256
    assert conversations.recall(asked("aab", seed=299)) is not None
    require_the_same(conversations, encodings, MERGING["chatml"], asked("aab", user="x" * 3000))
    assert conversations.recall(asked("b", user="x" * 3000)) is None
