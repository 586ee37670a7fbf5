"""What routing reads of a body."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvherd.core.kv.hashing import PrefixHasher, prefix_chain
from kvherd.services.gateway.reading.encodings import EncodingCache
from kvherd.services.gateway.reading.prompts import Prompt, read_prompt
from kvherd.testing.tokenizer import ByteTokenizer
from kvherd.testing.virtual_time import virtual_time
from kvherd.wire.openai.routing import peek

KEY = b"k"


async def read(path: str, body: object, tokenizer: ByteTokenizer | None = None) -> Prompt:
    data = json.dumps(body).encode()
    return await read_prompt(path, data, peek(data), tokenizer or ByteTokenizer(), EncodingCache())


async def test_a_chat_is_rendered_and_tokenized_as_the_engine_does() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    prompt = await read("/v1/chat/completions", body)
    tokenizer = ByteTokenizer()
    assert prompt.token_ids == tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


async def test_a_text_and_its_token_ids_are_one_prompt() -> None:
    text = await read("/v1/completions", {"model": "m", "prompt": "hello"})
    tokens = await read("/v1/completions", {"model": "m", "prompt": list(b"hello")})
    sglang = await read("/generate", {"input_ids": list(b"hello")})
    assert list(text.token_ids or ()) == list(tokens.token_ids or ()) == list(sglang.token_ids or ()) == list(b"hello")


async def test_of_several_prompts_the_first_counts() -> None:
    prompt = await read("/v1/completions", {"model": "m", "prompt": ["one", "two"]})
    assert (prompt.token_ids, prompt.several) == (list(b"one"), True)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": "what?"}),
        ("/v1/completions", {"prompt": {"no": "prompt"}}),
        ("/generate", {"input_ids": ["x"]}),
        ("/v1/embeddings", {"input": "hello"}),
    ],
)
async def test_what_cannot_be_read_is_left_to_the_worker(path: str, body: object) -> None:
    assert (await read(path, body)).token_ids is None


async def test_token_ids_that_no_vocabulary_has_get_no_credit() -> None:
    prompt = await read("/v1/completions", {"model": "m", "prompt": [2**32] * 16})
    assert prompt.chain(PrefixHasher(KEY), "m", 4) == []


async def test_a_salt_keeps_prefixes_apart() -> None:
    plain = await read("/v1/completions", {"model": "m", "prompt": "hello"})
    salted = await read("/v1/completions", {"model": "m", "prompt": "hello", "cache_salt": "mine"})
    hasher = PrefixHasher(KEY)
    assert plain.chain(hasher, "m", 4) == prefix_chain(list(b"hello"), block_size=4, model="m", key=KEY)
    assert salted.chain(hasher, "m", 4) == prefix_chain(list(b"hello"), block_size=4, model="m", salt="mine", key=KEY)


HI = [{"role": "user", "content": "hi"}]
CHANGED = [
    ("extra_key", "mine"),
    ("extra_key", ["a"]),
    ("chat_template", "{{ messages }}"),
    ("documents", [{"title": "a"}]),
    ("truncate_prompt_tokens", 4),
    ("truncate_prompt_tokens", -1),
    ("session_params", {"id": "s"}),
    ("lora_path", "adapter"),
    ("reasoning", {"effort": "low"}),
    ("thinking", {"type": "adaptive"}),
    ("task", "query"),
]
PROMPTS: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "hello"},
    "/generate": {"text": "hello"},
}


@pytest.mark.parametrize("path", PROMPTS)
@pytest.mark.parametrize(("name", "value"), CHANGED)
async def test_a_prompt_that_a_field_changes_in_a_way_not_known_here_gets_no_credit(
    path: str, name: str, value: object
) -> None:
    assert (await read(path, {"model": "m", **PROMPTS[path], name: value})).token_ids is None
    assert (await read(path, {"model": "m", **PROMPTS[path], name: None})).token_ids is not None


@pytest.mark.parametrize(
    ("path", "fields", "told"),
    [
        ("/v1/chat/completions", {"add_special_tokens": False, "documents": [], "chat_template_kwargs": {}}, True),
        ("/v1/chat/completions", {"add_special_tokens": True}, False),
        ("/v1/chat/completions", {"input_ids": [1, 2]}, False),
        ("/v1/chat/completions", {"add_generation_prompt": True, "continue_final_message": True}, False),
        ("/v1/completions", {"add_special_tokens": True}, True),
        ("/v1/completions", {"add_special_tokens": False}, False),
        ("/v1/completions", {"prompt_embeds": "AAAA"}, False),
        ("/generate", {"input_ids": [1, 2]}, True),
        ("/generate", {"image_data": "x.png"}, False),
        ("/generate", {"input_embeds": [[0.5]]}, False),
        ("/generate", {"lora_id": "a"}, False),
    ],
)
async def test_what_a_field_changes_depends_on_the_path(path: str, fields: dict[str, object], told: bool) -> None:
    assert ((await read(path, {"model": "m", **PROMPTS[path], **fields})).token_ids is not None) == told


async def test_a_turn_that_was_encoded_before_is_not_encoded_again() -> None:
    cache, tokenizer = EncodingCache(), ByteTokenizer()
    await cache.encode(tokenizer, "<|im_start|>user\none<|im_end|>\n")
    tokenizer.encoded.clear()
    await cache.encode(tokenizer, "<|im_start|>user\none<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n")
    assert tokenizer.encoded == ["<|im_start|>user\ntwo"]


async def test_two_tokenizers_do_not_share_encodings() -> None:
    cache = EncodingCache()
    other = ByteTokenizer(special_tokens={"<|im_start|>": 300})
    text = "<|im_start|>x"
    assert await cache.encode(ByteTokenizer(), text) != await cache.encode(other, text)


async def test_memory_is_bounded() -> None:
    cache, tokenizer = EncodingCache(limit_chars=100), ByteTokenizer()
    for number in range(50):
        await cache.encode(tokenizer, f"<|im_start|>{number:020}")
    assert cache._chars == sum(len(segment) for _, segment in cache._known) <= 100


@pytest.mark.net  # a thread needs the real clock
async def test_long_fresh_text_is_encoded_all_the_same() -> None:
    tokenizer = ByteTokenizer()
    text = "<|im_start|>" + "x" * 70_000
    assert await EncodingCache().encode(tokenizer, text) == ByteTokenizer().encode(text)


@given(st.lists(st.sampled_from(["<|im_start|>", "<|im_end|>", "user\n", "a", "é", "<|im_", ""]), max_size=20))
def test_cutting_never_changes_the_tokens(pieces: list[str]) -> None:
    text = "".join(pieces)
    assert virtual_time(EncodingCache(limit_chars=10).encode(ByteTokenizer(), text)) == ByteTokenizer().encode(text)


def test_prompts_with_a_common_text_have_a_common_chain() -> None:
    hasher = PrefixHasher(KEY)
    first, second = Prompt(b"x" * 128 + b"a" * 64), Prompt(b"x" * 128 + b"b" * 64)
    one, other = first.text_chain(hasher, "m"), second.text_chain(hasher, "m")
    assert one[:2] == other[:2]
    assert one[2] != other[2]


class AroundTokenizer(ByteTokenizer):
    """Puts a first token before a text, as Llama does."""

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return [1] * add_special_tokens + super().encode(text)


@pytest.mark.net  # a thread needs the real clock
async def test_a_plain_text_gets_the_first_token_that_the_engine_gives_it() -> None:
    completion = await read("/v1/completions", {"model": "m", "prompt": "hi"}, AroundTokenizer())
    native = await read("/generate", {"text": "hi"}, AroundTokenizer())
    assert completion.token_ids == native.token_ids == [1, *b"hi"]
