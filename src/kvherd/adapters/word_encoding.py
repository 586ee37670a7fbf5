"""Text → tokens by looking words up, for vocabularies that cut a text into words by a pattern before they merge.

A library of tokenizers cuts, merges and describes each word anew, which costs 0.4 µs a character. Where its pattern is
one that can be read here, words of ASCII are found by the same pattern and their tokens remembered. Everything else is
its own business: text that has a token among its words, other writing, normalizers that change ASCII. Whether both cut
alike is tried once, at the start.
"""

import json
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

from tokenizers import Tokenizer, models
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from kvherd.adapters.vocabulary import byte_characters

MOST_WORDS: Final = 32_768
MOST_CHARACTERS: Final = 48
"""What is longer is hardly a word, and is not remembered."""

PIECE_CHARACTERS: Final = 64 * 1024
"""Takes 10 ms or so; between two of them other threads have their turn."""

_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+"
_DIGITS_APART: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+|[0-9]| ?[^\sA-Za-z0-9]+|\s+(?![^\s0-9])|\s+"
"""The same where each digit is cut out first: before one the text ends."""
_BEFORE_DIGITS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_BEHIND_DIGITS: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS: Final = tuple(_BEFORE_DIGITS + digits + _BEHIND_DIGITS for digits in (r"\p{N}{1,3}", r"\p{N}"))
"""Of Llama 3 and of Qwen 2."""
_CLASSES: Final = {
    "L": "A-Za-z",
    "N": "0-9",
    "Nd": "0-9",
    "Lu": "A-Z",
    "Ll": "a-z",
    "Lt": "",
    "Lm": "",
    "Lo": "",
    "M": "",
}
_PROPERTY: Final = re.compile(r"\\p\{(\w+)\}")
_ESCAPE: Final = re.compile(r"\\(.)")
_CLASS: Final = re.compile(r"\[(?:\\.|[^\]\\])*\]")
_CHARACTERS: Final = {byte: character for character, byte in byte_characters().items()}
_WORD_ENDS: Final = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])")
"""Where words end: none of the patterns that are known by name takes a letter and the space behind it together."""
_TRIAL: Final = "".join(
    f"{one}a {one}B1{one}\n{one}{one}  {one}'S b'll{one} 12345{one}\t\r\n\n {one}" for one in map(chr, range(128))
)


class WordEncoding:
    """Encodes as the tokenizer does, without the tokens that stand around a text. Safe in threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        words: re.Pattern[str],
        *,
        apart: bool,
        piece_characters: int = PIECE_CHARACTERS,
        most_words: int = MOST_WORDS,
    ) -> None:
        """`apart`: words of ASCII are the same whatever stands beside them at `_WORD_ENDS`."""
        self._apart = apart
        self._piece = piece_characters
        self._most_words = most_words
        self._tokenizer = tokenizer
        self._model = tokenizer.model
        self._words = words.findall
        added = {token.content: index for index, token in tokenizer.get_added_tokens_decoder().items()}
        pattern = "|".join(map(re.escape, sorted(added, key=len, reverse=True))) or r"(?!)"
        self._added = re.compile(pattern)
        self._ids = added
        self._known: dict[str, Sequence[int]] = {}
        self._spaced: dict[str, Sequence[int]] = {}
        """What stands behind a space, up to the next."""
        self._begun: dict[str, Sequence[int]] = {}
        """What stands at the beginning of a text, up to a space."""

    def encode(self, text: str) -> list[int] | None:
        """None where only the tokenizer itself can tell."""
        begun = self._added.match(text)
        if begun is not None:
            ids, end = [self._ids[begun[0]]], begun.end()
            text = text[end:]
        else:
            ids = []
        if self._added.search(text):
            return None
        if self._apart and len(text) > self._piece:
            for piece in _pieces(text, self._piece):
                if not self._encode_piece(piece, ids):
                    return None
                time.sleep(0)  # compiled code lets no other thread have its turn unless it waits for something
            return ids
        return ids if self._encode_piece(text, ids) else None

    def _encode_piece(self, text: str, ids: list[int]) -> bool:
        """Whether this can tell."""
        if text.isascii():
            if not self._apart or not self._look_up_spaced(text, ids):
                self._look_up(self._words(text), ids)
            return True
        if not self._apart:
            return False
        for part in _WORD_ENDS.split(text):
            if part.isascii():
                self._look_up(self._words(part), ids)
            else:
                ids += self._known.get(part) or self._learn(part, self._whole(part))
        return True

    def _whole(self, part: str) -> Sequence[int]:
        ids: list[int] = self._tokenizer.encode(part, add_special_tokens=False).ids
        return ids

    def _look_up(self, words: list[str], ids: list[int]) -> None:
        known = self._known
        for word in words:
            found = known.get(word)
            ids += found if found is not None else self._learn(word, self._merged(word))

    def _look_up_spaced(self, text: str, ids: list[int]) -> bool:
        """The same without looking for words in what was met before; False, and nothing, where a space is not between
        two characters that are none: then words may go beyond it.
        """
        spaced, count, first = self._spaced, len(ids), True
        for part in text.split(" "):
            if first:
                first = False
                if not part or part[-1].isspace():
                    return False
                ids += self._begun.get(part) or self._look_up_part(part, part, self._begun)
                continue
            found = spaced.get(part)
            if found is None:
                if not part or part[0].isspace() or part[-1].isspace():
                    del ids[count:]
                    return False
                found = self._look_up_part(part, " " + part, spaced)
            ids += found
        return True

    def _look_up_part(self, part: str, text: str, met: dict[str, Sequence[int]]) -> Sequence[int]:
        """The tokens of a text that is remembered as this part."""
        ids: list[int] = []
        self._look_up(self._words(text), ids)
        if len(part) < MOST_CHARACTERS:
            if len(met) >= self._most_words:
                met.clear()
            met[part] = ids
        return ids

    def _merged(self, word: str) -> Sequence[int]:
        return [token.id for token in self._model.tokenize(_spelt(word))]

    def _learn(self, word: str, ids: Sequence[int]) -> Sequence[int]:
        if len(word) <= MOST_CHARACTERS:
            if len(self._known) >= self._most_words:
                self._known.clear()
            self._known[word] = ids
        return ids


def _pieces(text: str, characters: int) -> Iterator[str]:
    """Cut where words end."""
    begin = 0
    while begin < len(text):
        found = _WORD_ENDS.search(text, begin + characters)
        end = found.start() if found is not None else len(text)
        yield text[begin:end]
        begin = end


def word_encoding(
    tokenizer: Tokenizer, *, piece_characters: int = PIECE_CHARACTERS, most_words: int = MOST_WORDS
) -> WordEncoding | None:
    """None for a tokenizer that is not read here in all that matters."""
    added = tokenizer.get_added_tokens_decoder().values()
    plain = not any(one.lstrip or one.rstrip or one.single_word for one in added)
    model = tokenizer.model
    whole = isinstance(model, models.BPE) and model.dropout is None
    if not plain or not whole or tokenizer.truncation is not None or tokenizer.padding is not None:
        return None
    pattern = _pattern(_state(tokenizer.pre_tokenizer)) if _keeps_ascii(_state(tokenizer.normalizer)) else None
    if pattern is None:
        return None
    words = re.compile(pattern[0], re.ASCII)
    if not _cuts_alike(tokenizer, words):
        return None
    return WordEncoding(tokenizer, words, apart=pattern[1], piece_characters=piece_characters, most_words=most_words)


def _state(part: Normalizer | PreTokenizer | None) -> dict[str, Any]:
    state: dict[str, Any] = {} if part is None else json.loads(part.__getstate__())
    return state


def _keeps_ascii(normalizer: dict[str, Any]) -> bool:
    return normalizer.get("type") in (None, "NFC", "NFD", "NFKC", "NFKD")


def _pattern(state: dict[str, Any]) -> tuple[str, bool] | None:
    """The words of a text of ASCII, as a pattern of ours, and whether it is known by name."""
    parts = state.get("pretokenizers", [state])
    last = parts[-1]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return None
    match [part.get("type") for part in parts[:-1]]:
        case []:
            return (_GPT2, True) if last.get("use_regex", True) else None
        case ["Digits"] if last.get("use_regex", True) and parts[0].get("individual_digits"):
            return _DIGITS_APART, True
        case ["Split"] if not last.get("use_regex", True):
            return _split(parts[0])
        case _:
            return None


def _split(part: dict[str, Any]) -> tuple[str, bool] | None:
    source = part.get("pattern", {}).get("Regex")
    if source is None or part.get("behavior") != "Isolated" or part.get("invert"):
        return None
    pattern = _ascii(source)
    return None if pattern is None else (pattern, source in _SPLITS)


def _ascii(source: str) -> str | None:
    """The pattern with Unicode's properties less what is no ASCII; None if it has something else that is not known."""
    if {found[1] for found in _PROPERTY.finditer(source)} - set(_CLASSES):
        return None
    within = _CLASS.sub(lambda found: _PROPERTY.sub(lambda name: _CLASSES[name[1]], found[0]), source)
    if "[]" in within or "[^]" in within or "&&" in within:
        return None
    pattern = _PROPERTY.sub(lambda name: f"[{_CLASSES[name[1]]}]" if _CLASSES[name[1]] else "(?!)", within)
    if {found[1] for found in _ESCAPE.finditer(pattern)} - set("sSrn"):
        return None
    return pattern


def _cuts_alike(tokenizer: Tokenizer, words: re.Pattern[str]) -> bool:
    cut = tokenizer.pre_tokenizer
    if cut is None:
        return False
    theirs = [spelt for spelt, _ in cut.pre_tokenize_str(_TRIAL)]
    ours = words.findall(_TRIAL)
    return [_spelt(word) for word in ours] == theirs


def _spelt(word: str) -> str:
    """As byte-level vocabularies have it."""
    return "".join([_CHARACTERS[byte] for byte in word.encode()])
