"""A request body → what routing needs of its prompt, and no more.

Encodings are cached by segment. A rendered prompt is cut only before special tokens: these are taken out before the
vocabulary's merges apply, so no merge crosses such a cut; cuts elsewhere change the tokens.
"""

import asyncio
import re
import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from kvherd.core.errors import CallerError
from kvherd.core.ids import PrefixHash
from kvherd.core.kv.bigrams import bigram_keys
from kvherd.core.kv.hashing import TOKEN_BYTES, PrefixHasher, token_bytes
from kvherd.core.text.parity import PromptClass, classify
from kvherd.ports.completions import Tokenizer
from kvherd.wire.openai.prompts import decode_chat_prompt, decode_completion_prompts, decode_generate_prompts
from kvherd.wire.openai.routing import Peek

_RENDERED = frozenset({"/v1/chat/completions"})

LONG_BYTES = 32 * 1024
"""Fresh text of this size takes about 10 ms to encode: longer than the loop should stand still."""

TEXT_BLOCK_BYTES = 64
BYTES_PER_TOKEN = 4
"""A usual prompt in English; an estimate where nothing was tokenized."""


@dataclass(slots=True)
class Prompt:
    """A prompt as routing sees it. `token_ids` is None where it was not tokenized; then `text` stands in for it.

    `model` is the name it asks for, which may be an adapter's. `several` says that the call has more prompts than this
    first one; `classes` is empty where the tokens are the client's own, or nothing was tokenized.
    """

    text: bytes
    token_ids: Sequence[int] | None = None
    salt: str | None = None
    model: str = ""
    several: bool = False
    classes: tuple[PromptClass, ...] = ()
    _chains: dict[tuple[str, str | None, int, bool], list[PrefixHash]] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return len(self.text) // BYTES_PER_TOKEN if self.token_ids is None else len(self.token_ids)

    def forget(self) -> None:
        """It cannot be tokenized."""
        self.token_ids = None
        self.classes = ()

    def chain(
        self, hasher: PrefixHasher, model: str, block_size: int, *, lora: str | None = None, bigrams: bool = False
    ) -> list[PrefixHash]:
        """Name its full blocks, of tokens or of pairs; empty if it was not tokenized or holds what is no token."""
        if self.token_ids is None or block_size <= 0:
            return []
        known = self._chains.get((model, lora, block_size, bigrams))
        if known is None:
            root = hasher.root(model=model, block_size=block_size, lora=lora, salt=self.salt)
            try:
                tokens = token_bytes(self.token_ids)
                keys = bigram_keys(self.token_ids, block_size) if bigrams else []
                end = len(keys) * block_size * TOKEN_BYTES if bigrams else len(tokens)
                known = hasher.extend(root, tokens[:end], block_size * TOKEN_BYTES, keys)
            except struct.error:  # ids from the client that no vocabulary has: whoever answers will say so
                known = []
            self._chains[model, lora, block_size, bigrams] = known
        return known

    def text_chain(self, hasher: PrefixHasher, model: str, *, lora: str | None = None) -> list[PrefixHash]:
        """Name pieces of its text, for workers of which only what they were sent is known."""
        known = self._chains.get((model, lora, 0, False))
        if known is None:
            root = hasher.root(model=model, block_size=0, lora=lora, salt=self.salt)
            known = self._chains[model, lora, 0, False] = hasher.extend(root, self.text, TEXT_BLOCK_BYTES)
        return known


class EncodingCache:
    """Encodes text segment by segment and remembers the latest segments, `limit_chars` of them altogether."""

    def __init__(self, *, limit_chars: int = 8 * 1024 * 1024) -> None:
        self._limit = limit_chars
        self._chars = 0
        self._known: OrderedDict[tuple[int, str], list[int]] = OrderedDict()
        self._cuts: dict[int, re.Pattern[str]] = {}
        # A tokenizer is told apart by its identity, so it must stay alive as long as its encodings.
        self._tokenizers: dict[int, Tokenizer] = {}

    async def encode(self, tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Tokens of a prompt; a rendered chat has its special tokens, to a plain text they are added.

        Long fresh text is encoded in a thread. Raises `PromptTooLong`, before any work, for what cannot fit into the
        context of the model.
        """
        known = self.encode_now(tokenizer, text, add_special_tokens=add_special_tokens)
        if known is not None:
            return known
        if add_special_tokens and tokenizer.encode("", add_special_tokens=True):
            # what stands around a text is told by the whole text only
            return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=True)
        segments = self._cut(tokenizer, text)
        fresh = self._fresh(tokenizer, segments)
        encoded = await asyncio.to_thread(lambda: [tokenizer.encode(segment) for segment in fresh])
        return self._joined(tokenizer, segments, dict(zip(fresh, encoded, strict=True)))

    def encode_now(self, tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False) -> list[int] | None:
        """The same, but None where it takes a thread."""
        tokenizer.check_length(text)
        if add_special_tokens and tokenizer.encode("", add_special_tokens=True):
            return None
        segments = self._cut(tokenizer, text)
        fresh = self._fresh(tokenizer, segments)
        if sum(map(len, fresh)) > LONG_BYTES:
            return None
        return self._joined(tokenizer, segments, {segment: tokenizer.encode(segment) for segment in fresh})

    def _fresh(self, tokenizer: Tokenizer, segments: Sequence[str]) -> list[str]:
        """Those that are not known, each once."""
        me, known = id(tokenizer), self._known
        return list(dict.fromkeys([segment for segment in segments if (me, segment) not in known]))

    def _joined(self, tokenizer: Tokenizer, segments: Sequence[str], found: dict[str, list[int]]) -> list[int]:
        token_ids: list[int] = []
        for segment in segments:
            token_ids += self._recall(tokenizer, segment, found)
        self._shrink()
        return token_ids

    def _recall(self, tokenizer: Tokenizer, segment: str, found: dict[str, list[int]]) -> list[int]:
        key = (id(tokenizer), segment)
        known = self._known.get(key)
        if known is None:
            # A segment known before the thread ran may have been pushed out since.
            known = found[segment] if segment in found else tokenizer.encode(segment)
            self._known[key] = known
            self._chars += len(segment)
        else:
            self._known.move_to_end(key)
        return known

    def _shrink(self) -> None:
        while self._chars > self._limit:
            (_, segment), _ = self._known.popitem(last=False)
            self._chars -= len(segment)

    def _cut(self, tokenizer: Tokenizer, text: str) -> list[str]:
        pattern = self._cuts.get(id(tokenizer))
        if pattern is None:
            special = sorted(tokenizer.special_tokens, key=len, reverse=True)
            # Without any special token nothing is cut: a pattern that never matches. Looking ahead for each token at
            # every character, to split there at once, takes a hundred times as long.
            pattern = re.compile("|".join(map(re.escape, special)) or r"(?!)")
            self._cuts[id(tokenizer)] = pattern
            self._tokenizers[id(tokenizer)] = tokenizer
        cuts = [found.start() for found in pattern.finditer(text)]
        return [text[begin:end] for begin, end in pairwise((0, *cuts, len(text))) if begin < end]


async def read_prompt(
    path: str, body: bytes, peeked: Peek, tokenizer: Tokenizer | None, cache: EncodingCache
) -> Prompt:
    """Read the prompt of a body, tokenized where a tokenizer is given and the path is known.

    One with a field that changes it in a way not known here is not tokenized. Raises nothing for a body that it cannot
    read in full: the worker knows more dialects, and says what is wrong.
    """
    now = read_prompt_now(path, body, peeked, tokenizer, cache)
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
    path: str, body: bytes, peeked: Peek, tokenizer: Tokenizer | None, cache: EncodingCache
) -> Prompt | None:
    """The same, but None where so much fresh text is to be encoded that a thread should do it."""
    prompt = _untold(path, body, peeked)
    if tokenizer is None:
        return prompt
    try:
        text = _text_to_encode(path, body, prompt, tokenizer)
        if text is not None:
            prompt.token_ids = cache.encode_now(tokenizer, text, add_special_tokens=path not in _RENDERED)
            return None if prompt.token_ids is None else prompt
    except CallerError:
        prompt.forget()
    return prompt


def _untold(path: str, body: bytes, peeked: Peek) -> Prompt:
    return Prompt(_text_of(path, body, peeked), salt=peeked.cache_salt, model=peeked.model or "")


def _text_to_encode(path: str, body: bytes, prompt: Prompt, tokenizer: Tokenizer) -> str | None:
    """The text of the prompt as the model gets it; None if it has none or is tokens already. Raises `CallerError`."""
    if path in _RENDERED:
        call = decode_chat_prompt(body)
        if call is None:
            return None
        text = tokenizer.render_chat(call)
        prompt.classes = classify(call, tokenizer.special_tokens)
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
