"""Pieces of text are never split inside a character and make exactly what decoding everything makes."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from kvherd.core.text.detokenizer import ByteDetokenizer, IncrementalDetokenizer

BOS, EOS = 256, 257
# beyond single bytes: tokens that begin, end, or do both inside characters, as byte-level vocabularies have them
LONG_TOKENS = [
    "é".encode()[1:] + "é".encode()[:1],
    "🦙".encode()[:3],
    "🦙".encode()[3:] + b" and ",
    b"\x82\xac\xe2",
    b"the",
]
VOCABULARY = [bytes([byte]) for byte in range(256)] + [b"", b""] + LONG_TOKENS

any_tokens = st.lists(st.integers(0, len(VOCABULARY) - 1), max_size=60)
bad_bytes = st.lists(st.sampled_from([0x80, 0xBF, 0xE2, 0xF0, 0x9F, 0xFF, 0xC3, 65, BOS, 261]), max_size=300)
text_tokens = st.text(max_size=60).map(lambda text: list(text.encode()))


def decode(token_ids: list[int]) -> str:
    return b"".join(VOCABULARY[token_id] for token_id in token_ids).decode(errors="replace")


def pieces_of(token_ids: list[int], decode: Callable[[list[int]], str] = decode, chunk: int = 1) -> list[str]:
    detokenizer = IncrementalDetokenizer(decode)
    pieces = [detokenizer.feed(token_ids[begin : begin + chunk]) for begin in range(0, len(token_ids), chunk)]
    return [*pieces, detokenizer.finish()]


@given(st.one_of(any_tokens, bad_bytes, text_tokens), st.integers(1, 7))
def test_the_pieces_make_the_text_of_all_tokens_however_they_are_cut(token_ids: list[int], chunk: int) -> None:
    assert "".join(pieces_of(token_ids, chunk=chunk)) == decode(token_ids)


@given(st.one_of(any_tokens, bad_bytes, text_tokens), st.integers(1, 7))
def test_bytes_alone_make_the_text_of_all_tokens_too_and_say_what_they_hold_back(
    token_ids: list[int], chunk: int
) -> None:
    plain = ByteDetokenizer(VOCABULARY.__getitem__)
    pieces = []
    for begin in range(0, len(token_ids), chunk):
        pieces.append(plain.feed(token_ids[begin : begin + chunk]))
        assert "".join(pieces) + plain.held == decode(token_ids[: begin + chunk])
    assert "".join([*pieces, plain.finish()]) == decode(token_ids)


@given(st.text())
def test_no_piece_of_real_text_ends_inside_a_character(text: str) -> None:
    pieces = pieces_of(list(text.encode()))
    assert all("\N{REPLACEMENT CHARACTER}" not in piece or piece in text for piece in pieces)


def test_a_character_is_shown_with_its_last_byte() -> None:
    assert pieces_of(list("a🦙b".encode())) == ["a", "", "", "", "🦙", "b", ""]


def test_bytes_that_never_become_a_character_are_shown_at_the_end() -> None:
    assert pieces_of([65, 0xF0, 0x9F]) == ["A", "", "", "\N{REPLACEMENT CHARACTER}"]


def test_it_says_when_it_holds_a_part_of_a_character() -> None:
    detokenizer = IncrementalDetokenizer(decode)
    detokenizer.feed([0xE2])
    assert detokenizer.held == "\N{REPLACEMENT CHARACTER}"
    detokenizer.feed([0x82, 0xAC])
    assert detokenizer.held == ""


@pytest.mark.parametrize(
    "token_ids",
    [[0x80] * 4000, list("word 🦙 ".encode()) * 400, [0xE2] + [261] * 4000, [BOS] * 4000],
    ids=["no character ever", "text", "no token ends a character", "special tokens"],
)
def test_only_a_bounded_window_is_decoded_again(token_ids: list[int]) -> None:
    longest = 0

    def counting(window: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(window))
        return decode(window)

    assert "".join(pieces_of(token_ids, counting)) == decode(token_ids)
    assert longest <= 70


def test_a_tokenizer_that_strips_the_first_space_keeps_the_others() -> None:
    tokenizer = Tokenizer(models.BPE({"▁the": 0, "▁herd": 1, "s": 2}, []))
    tokenizer.decoder = decoders.Metaspace()
    assert pieces_of([0, 1, 2, 1], tokenizer.decode) == ["the", " herd", "s", " herd", ""]
