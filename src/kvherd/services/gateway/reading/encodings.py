"""Text → tokens, of which the latest are remembered.

A rendered prompt is cut only before special tokens: these are taken out before the vocabulary's merges apply, so no
merge crosses such a cut; cuts elsewhere change the tokens.
"""

import asyncio
import re
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from kvherd.ports.completions import Tokenizer

LONG_BYTES: Final = 32 * 1024
"""Fresh text of this size takes about 10 ms to encode: longer than the loop should stand still."""


class EncodingCache:
    """Encodes text segment by segment and remembers the latest segments, `limit_chars` of them altogether."""

    def __init__(self, *, limit_chars: int = 8 * 1024 * 1024, long_chars: int = LONG_BYTES) -> None:
        """`long_chars`: more fresh text than that takes a thread."""
        self._limit = limit_chars
        self._long = long_chars
        self._chars = 0
        self._known: OrderedDict[tuple[int, str], list[int]] = OrderedDict()
        self._cuts: dict[int, re.Pattern[str]] = {}
        self._doubtful: dict[int, int] = {}
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
        return self.encode_more(tokenizer, text)

    def encode_here(self, tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """The same, however long it takes: for whoever is in a thread, and has this cache for himself."""
        known = self.encode_now(tokenizer, text, add_special_tokens=add_special_tokens)
        return tokenizer.encode(text, add_special_tokens=add_special_tokens) if known is None else known

    def encode_more(self, tokenizer: Tokenizer, text: str) -> list[int] | None:
        """The same for what stands behind a text that was cut off at `last_cut`, of a prompt that is not too long."""
        segments = self._cut(tokenizer, text)
        fresh = self._fresh(tokenizer, segments)
        if sum(map(len, fresh)) > self._long:
            return None
        return self._joined(tokenizer, segments, {segment: tokenizer.encode(segment) for segment in fresh})

    def encode_segment(self, tokenizer: Tokenizer, segment: str) -> list[int] | None:
        """The same for a text that has no special token but, perhaps, at its beginning."""
        if len(segment) > LONG_BYTES:
            return None
        found = self._recall(tokenizer, segment, {})
        self._shrink()
        return found

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

    def last_cut(self, tokenizer: Tokenizer, text: str) -> int:
        """The last place where a prompt that begins with this text is cut, however it goes on; 0 if there is none."""
        pattern = self.special(tokenizer)
        last = len(text) - self._doubtful[id(tokenizer)]
        return max((at for found in pattern.finditer(text) if (at := found.start()) <= last), default=0)

    def _cut(self, tokenizer: Tokenizer, text: str) -> list[str]:
        cuts = [found.start() for found in self.special(tokenizer).finditer(text)]
        return [text[begin:end] for begin, end in pairwise((0, *cuts, len(text))) if begin < end]

    def special(self, tokenizer: Tokenizer) -> re.Pattern[str]:
        """Finds every special token."""
        pattern = self._cuts.get(id(tokenizer))
        if pattern is None:
            special = sorted(tokenizer.special_tokens, key=len, reverse=True)
            # Without any special token nothing is cut: a pattern that never matches. Looking ahead for each token at
            # every character, to split there at once, takes a hundred times as long.
            pattern = re.compile("|".join(map(re.escape, special)) or r"(?!)")
            self._cuts[id(tokenizer)] = pattern
            self._tokenizers[id(tokenizer)] = tokenizer
            # A token at the end of a text may turn out to be the inside of a longer one.
            nested = any(token in other[1:] for token in special for other in special)
            self._doubtful[id(tokenizer)] = len(special[0]) if nested else 0
        return pattern
