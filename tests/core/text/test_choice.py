"""One choice from tokens to shown text: stops, ends and logprobs that belong to what was shown."""

from hypothesis import given
from hypothesis import strategies as st

from kvherd.core.engine.generation import Finish, FinishReason, Limits, TokenDelta, TokenLogprob
from kvherd.core.text.choice import Choice, ShownToken, TextDelta

LENGTH = Finish(FinishReason.LENGTH)


def decode(token_ids: list[int]) -> str:
    return bytes(token_ids).decode(errors="replace")


def news(text: str | bytes, *, before: int = 0, finish: Finish | None = None, logprobs: bool = False) -> TokenDelta:
    token_ids = tuple(text.encode() if isinstance(text, str) else text)
    return TokenDelta(
        token_ids,
        prompt_tokens=7,
        completion_tokens=before + len(token_ids),
        cached_tokens=4,
        logprobs=tuple(TokenLogprob(token_id, -1.0) for token_id in token_ids) if logprobs else (),
        finish=finish,
    )


def tokens(*placed: tuple[str, int]) -> tuple[ShownToken, ...]:
    return tuple(ShownToken(TokenLogprob(ord(letter), -1.0), offset) for letter, offset in placed)


def test_text_comes_as_it_is_made() -> None:
    choice = Choice(decode, Limits(9))
    assert choice.feed(news("he")) == TextDelta("he")
    assert choice.feed(news("llo", before=2, finish=LENGTH)) == TextDelta("llo", (), LENGTH)
    assert (choice.prompt_tokens, choice.cached_tokens, choice.completion_tokens) == (7, 4, 5)


def test_it_is_plain_between_whole_characters_if_nothing_is_looked_for_in_them() -> None:
    def spelt(token_id: int) -> bytes:
        return bytes([token_id])

    choice = Choice(decode, Limits(9), token_bytes=spelt)
    plain = [choice.plain]
    for half in (b"\xf0\x9f", b"\x90\x91"):
        choice.feed(news(half))
        plain.append(choice.plain)
    assert plain == [True, False, True]
    assert not Choice(decode, Limits(9)).plain, "its tokens may be spelt otherwise elsewhere"
    assert not Choice(decode, Limits(9, stop=("END",)), token_bytes=spelt).plain


def test_a_stop_string_ends_it_and_is_not_shown() -> None:
    choice = Choice(decode, Limits(99, stop=("END",)))
    assert choice.feed(news("ok E")) == TextDelta("ok ")
    assert choice.feed(news("ND and more", before=4)) == TextDelta("", (), Finish(FinishReason.STOP, "END"))
    assert choice.completion_tokens == 6


def test_a_stop_string_that_is_complete_with_the_last_token_is_why_it_ended() -> None:
    choice = Choice(decode, Limits(4, stop=("!",)))
    assert choice.feed(news("hey!", finish=LENGTH)).finish == Finish(FinishReason.STOP, "!")


def test_held_text_is_shown_when_the_generation_ends() -> None:
    choice = Choice(decode, Limits(4, stop=("END",)))
    assert choice.feed(news(b"hi EN\xf0", finish=LENGTH)) == TextDelta("hi EN\N{REPLACEMENT CHARACTER}", (), LENGTH)


def test_stop_strings_are_not_looked_for_in_the_first_tokens() -> None:
    choice = Choice(decode, Limits(9, min_new_tokens=3, stop=(".",)))
    assert choice.feed(news("a.b.c")) == TextDelta("a.b", (), Finish(FinishReason.STOP, "."))


def test_logprobs_come_with_the_text_of_their_token() -> None:
    choice = Choice(decode, Limits(9, stop=("END",)))
    assert choice.feed(news("oE", logprobs=True)) == TextDelta("o", tokens(("o", 0)))
    assert choice.feed(news("k", before=2, logprobs=True)) == TextDelta("Ek", tokens(("E", 1), ("k", 2)))


def test_tokens_of_the_stop_string_have_no_logprobs() -> None:
    choice = Choice(decode, Limits(9, stop=("END",)))
    assert choice.feed(news("kENDx", logprobs=True)).tokens == tokens(("k", 0))


def test_the_bytes_of_one_character_share_an_offset() -> None:
    choice = Choice(decode, Limits(9))
    assert choice.feed(news(b"a\xc3", logprobs=True)).tokens == tokens(("a", 0))
    assert [token.text_offset for token in choice.feed(news(b"\xa9b", logprobs=True)).tokens] == [1, 1, 2]


@given(st.text(max_size=20))
def test_each_byte_of_a_text_is_placed_at_its_character(text: str) -> None:
    shown = Choice(decode, Limits(99)).feed(news(text, finish=LENGTH, logprobs=True)).tokens
    assert [token.text_offset for token in shown] == [
        place for place, character in enumerate(text) for _ in character.encode()
    ]


def test_bytes_that_are_no_text_have_places_of_their_own() -> None:
    shown = Choice(decode, Limits(9)).feed(news(b"\xf4\xd3Cb\x93", finish=LENGTH, logprobs=True)).tokens
    assert [token.text_offset for token in shown] == [0, 1, 2, 3, 4]


def test_a_stop_string_after_bytes_that_are_no_text_has_no_logprobs() -> None:
    choice = Choice(decode, Limits(9, stop=("END",)))
    shown = choice.feed(news(b"\x93END", logprobs=True))
    assert (shown.text, [token.text_offset for token in shown.tokens]) == ("\N{REPLACEMENT CHARACTER}", [0])


@given(st.text(alphabet="abé", max_size=20), st.lists(st.text(alphabet="abé", min_size=1, max_size=3), max_size=2))
def test_each_shown_token_has_its_logprob_once_and_in_order(text: str, stops: list[str]) -> None:
    choice = Choice(decode, Limits(99, stop=tuple(stops)))
    shown, reported = "", []
    for index, token_id in enumerate(text.encode()):
        delta = choice.feed(news(bytes([token_id]), before=index, logprobs=True))
        shown += delta.text
        reported += [token.token.token_id for token in delta.tokens]
        if delta.finish is not None:
            break
    else:
        delta = choice.feed(news("", before=len(text.encode()), finish=LENGTH))
        shown += delta.text
        reported += [token.token.token_id for token in delta.tokens]
    assert bytes(reported).decode() == shown
