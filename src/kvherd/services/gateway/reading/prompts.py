"""A request body → what routing needs of its prompt, and no more."""

import struct
from collections.abc import Callable, Sequence
from typing import Final

from kvherd.core.errors import CallerError
from kvherd.core.ids import PrefixHash
from kvherd.core.kv.bigrams import bigram_keys
from kvherd.core.kv.hashing import TOKEN_BYTES, PrefixHasher, token_bytes
from kvherd.core.text.parity import PromptClass, classes_of, classify, said_by
from kvherd.ports.completions import Tokenizer
from kvherd.services.gateway.reading.conversations import Beginning, Conversations, Recalled
from kvherd.services.gateway.reading.encodings import EncodingCache
from kvherd.wire.long_lists import Cut
from kvherd.wire.openai.prompts import decode_chat_prompt, decode_completion_prompts, decode_generate_prompts
from kvherd.wire.openai.routing import Peek

_RENDERED = frozenset({"/v1/chat/completions"})

LONG_BODY_BYTES: Final = 256 * 1024
LONG_CHAT_BYTES: Final = 1024 * 1024
"""Reading bodies of these sizes takes 10 ms or more, and one of 30 MB a second. Of a chat only what is new is read,
which is more than a thread can save.
"""
TEXT_BLOCK_BYTES = 64
MOST_TEXT_BLOCKS: Final = 65_536
"""Of a prompt that was not tokenized; no more are remembered of any worker (`PrefixMemory`)."""
BYTES_PER_TOKEN = 4
"""A usual prompt in English; an estimate where nothing was tokenized."""


def is_long(path: str, body: bytes) -> bool:
    """Whether a body is to be read in a thread."""
    size = len(body)
    return size >= LONG_BODY_BYTES and (size >= LONG_CHAT_BYTES or path not in _RENDERED)


class Prompt:
    """A prompt as routing sees it. `token_ids` is None where it was not tokenized; then `text` stands in for it.

    `model` is the name it asks for, which may be an adapter's. `several` says that the call has more prompts than this
    first one; `classes` is empty where the tokens are the client's own, or nothing was tokenized. `beginning` is
    what is known of its first messages from a prompt before. No dataclass, as `Turn` is none.
    """

    __slots__ = ("_chains", "beginning", "classes", "model", "salt", "several", "text", "token_ids")

    def __init__(self, text: bytes, *, salt: str | None = None, model: str = "") -> None:
        self.text = text
        self.salt = salt
        self.model = model
        self.token_ids: Sequence[int] | None = None
        self.several = False
        self.classes: tuple[PromptClass, ...] = ()
        self.beginning: Beginning | None = None
        self._chains: dict[tuple[str, str | None, int, bool], list[PrefixHash]] = {}

    @property
    def tokens(self) -> int:
        return len(self.text) // BYTES_PER_TOKEN if self.token_ids is None else len(self.token_ids)

    def forget(self) -> None:
        """It cannot be tokenized."""
        self.token_ids, self.beginning = None, None
        self.classes = ()

    def chain(
        self, hasher: PrefixHasher, model: str, block_size: int, *, lora: str | None = None, bigrams: bool = False
    ) -> list[PrefixHash]:
        """Name its full blocks, of tokens or of pairs; empty if it was not tokenized or holds what is no token."""
        if self.token_ids is None or block_size <= 0:
            return []
        known = self._chains.get((model, lora, block_size, bigrams))
        if known is None:
            if self.beginning is not None and not bigrams:
                known = self.beginning.chain(hasher, model, block_size, lora=lora, salt=self.salt)
                rest = self.token_ids[len(known) * block_size :]
            else:
                known, rest = [], self.token_ids
            parent = known[-1] if known else hasher.root(model=model, block_size=block_size, lora=lora, salt=self.salt)
            try:
                known = known + _names(hasher, parent, rest, block_size, bigrams=bigrams)
            except struct.error:  # ids from the client that no vocabulary has: whoever answers will say so
                known = []
            self._chains[model, lora, block_size, bigrams] = known
        return known

    def begun(self, block_size: int, *, bigrams: bool) -> int:
        """How many leading blocks of `chain` are of messages that were read before, and are likely to come again."""
        if self.beginning is None or bigrams or block_size <= 0:
            return 0
        return len(self.beginning.tokens) // block_size

    def text_chain(self, hasher: PrefixHasher, model: str, *, lora: str | None = None) -> list[PrefixHash]:
        """Name pieces of its text, for workers of which only what they were sent is known."""
        known = self._chains.get((model, lora, 0, False))
        if known is None:
            root = hasher.root(model=model, block_size=0, lora=lora, salt=self.salt)
            text = self.text[: MOST_TEXT_BLOCKS * TEXT_BLOCK_BYTES]
            known = self._chains[model, lora, 0, False] = hasher.extend(root, text, TEXT_BLOCK_BYTES)
        return known

    def know(self, model: str, block_size: int, names: list[PrefixHash], *, lora: str | None, bigrams: bool) -> None:
        """What `chain` is to give, or with 0 `text_chain`, as somebody named it who could take his time."""
        self._chains[model, lora, block_size, bigrams] = names


def _names(
    hasher: PrefixHasher, parent: PrefixHash, token_ids: Sequence[int], block_size: int, *, bigrams: bool
) -> list[PrefixHash]:
    tokens = token_bytes(token_ids)
    keys = bigram_keys(token_ids, block_size) if bigrams else []
    end = len(keys) * block_size * TOKEN_BYTES if bigrams else len(tokens)
    return hasher.extend(parent, tokens[:end], block_size * TOKEN_BYTES, keys)


async def read_prompt(
    path: str,
    body: bytes,
    peeked: Peek,
    tokenizer: Tokenizer | None,
    cache: EncodingCache,
    *,
    conversations: Conversations | None = None,
    recalled: Recalled | None = None,
) -> Prompt:
    """Read the prompt of a body, tokenized where a tokenizer is given and the path is known.

    One with a field that changes it in a way not known here is not tokenized. Raises nothing for a body that it cannot
    read in full: the worker knows more dialects, and says what is wrong.
    """
    now = read_prompt_now(path, body, peeked, tokenizer, cache, conversations=conversations, recalled=recalled)
    if now is not None or tokenizer is None:
        return now or _untold(path, body, peeked)
    prompt = _untold(path, body, peeked)
    try:
        text = _text_to_encode(path, body, prompt, tokenizer)
        if text is not None:
            prompt.token_ids = await cache.encode(tokenizer, text, add_special_tokens=path not in _RENDERED)
    except CallerError:
        prompt.forget()
    return prompt


def read_prompt_now(
    path: str,
    body: bytes,
    peeked: Peek,
    tokenizer: Tokenizer | None,
    cache: EncodingCache,
    *,
    conversations: Conversations | None = None,
    recalled: Recalled | None = None,
) -> Prompt | None:
    """The same, but None where so much fresh text is to be encoded that a thread should do it."""
    prompt = _untold(path, body, peeked)
    if tokenizer is None:
        return prompt
    try:
        if conversations is not None and path in _RENDERED:
            told = conversations.read(body, prompt.text, tokenizer, recalled)
            if told is not None:
                prompt.token_ids, prompt.classes, prompt.beginning = told
                return prompt
        text = _text_to_encode(path, body, prompt, tokenizer)
        if text is not None:
            prompt.token_ids = cache.encode_now(tokenizer, text, add_special_tokens=path not in _RENDERED)
            return None if prompt.token_ids is None else prompt
    except CallerError:
        prompt.forget()
    return prompt


def read_long_prompt(
    path: str, body: bytes, peeked: Peek, tokenizer: Tokenizer | None, cache: EncodingCache, *, cut: Cut | None
) -> Prompt:
    """The same in a thread, however long that takes. `cut` is what was taken out of the body when it was peeked at."""
    prompt = _untold(path, body, peeked)
    if cut is not None and prompt.text and prompt.text is not body:
        prompt.text = cut.whole(prompt.text)
    if tokenizer is None:
        return prompt
    try:
        special_in = cache.special(tokenizer).search
        text = _text_to_encode(path, body if cut is None else cut.rest, prompt, tokenizer, special_in)
        if text is not None:
            prompt.token_ids = cache.encode_here(tokenizer, text, add_special_tokens=path not in _RENDERED)
        elif cut is not None and prompt.token_ids is not None:
            prompt.token_ids = cut.first((tuple(prompt.token_ids),)) or prompt.token_ids
    except CallerError:
        prompt.forget()
    return prompt


def _untold(path: str, body: bytes, peeked: Peek) -> Prompt:
    return Prompt(_text_of(path, body, peeked), salt=peeked.cache_salt, model=peeked.model or "")


def _text_to_encode(
    path: str,
    body: bytes,
    prompt: Prompt,
    tokenizer: Tokenizer,
    special_in: Callable[[str], object] | None = None,
) -> str | None:
    """The text of the prompt as the model gets it; None if it has none or is tokens already. Raises `CallerError`.

    `special_in` says whether a special token is in a text, which is worth having where the text is long.
    """
    if path in _RENDERED:
        call = decode_chat_prompt(body)
        if call is None:
            return None
        text = tokenizer.render_chat(call)
        if special_in is None:
            prompt.classes = classify(call, tokenizer.special_tokens)
        else:
            tokenizer.check_length(text)
            prompt.classes = classes_of(call, said_by(call.messages, special_in))
        return text
    prompts: Sequence[str | tuple[int, ...]] = ()
    if path == "/v1/completions":
        prompts = decode_completion_prompts(body)
    elif path == "/generate":
        prompts = decode_generate_prompts(body)
    prompt.several = len(prompts) > 1
    match prompts[0] if prompts else None:
        case str(text):
            prompt.classes = (PromptClass.TEXT,)
            return text
        case token_ids:
            prompt.token_ids = token_ids
            return None


def _text_of(path: str, body: bytes, peeked: Peek) -> bytes:
    """The bytes that two requests with a common prefix have in common from the first on."""
    if path == "/v1/chat/completions":
        return bytes(peeked.messages)
    if path == "/v1/completions":
        return bytes(peeked.prompt)
    return body
