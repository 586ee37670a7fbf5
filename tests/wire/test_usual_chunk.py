"""The usual message of a generation, as the library that writes it does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from kvherd.wire.usual_chunk import TokenTexts, UsualChunks, spelling

TOKENS = st.integers(0, 2**32 - 1)
COUNTS = st.integers(1, 2**31)


def chunk(*token_ids: int, request: str = "r-1", **fields: object) -> bytes:
    told = pb.GenerateStreamChunk(token_ids=token_ids, **({"prompt_tokens": 8, "completion_tokens": 3} | fields))
    data: bytes = pb.GenerateResponse(request_id=request, chunk=told).SerializeToString()
    return data


@given(
    token_id=TOKENS, prompt=COUNTS, made=COUNTS, cached=st.integers(0, 2**31), request=st.text(min_size=1, max_size=200)
)
def test_the_one_token_of_a_usual_message_is_found_as_it_is_spelt(
    token_id: int, prompt: int, made: int, cached: int, request: str
) -> None:
    data = chunk(
        token_id, request=request, prompt_tokens=prompt, completion_tokens=made, cached_tokens=cached, index=cached
    )
    assert UsualChunks(request, ()).token(data) == spelling(token_id)


@given(st.lists(TOKENS, max_size=60))
def test_a_message_of_none_or_several_tokens_is_spelt_as_no_token_is(token_ids: list[int]) -> None:
    found = UsualChunks("r-1", ()).token(chunk(*token_ids))
    assert (found in {spelling(token_id) for token_id in token_ids}) == (len(token_ids) == 1)


def test_a_token_that_ends_the_generation_is_not_the_usual_one() -> None:
    chunks = UsualChunks("r-1", [2, 49_152])
    assert chunks.token(chunk(2)) == chunks.token(chunk(49_152)) == b""
    assert chunks.token(chunk(3)) == spelling(3)


def test_what_is_of_another_request_or_another_kind_is_not_usual() -> None:
    chunks = UsualChunks("r-1", ())
    complete = pb.GenerateComplete(output_ids=[5], finish_reason="stop", prompt_tokens=8)
    assert chunks.token(chunk(5, request="r-2")) == b""
    assert chunks.token(pb.GenerateResponse(request_id="r-1", complete=complete).SerializeToString()) == b""
    assert chunks.token(chunk(5, prompt_tokens=0)) == b""
    assert chunks.token(chunk(5, hidden_states=[0.5] * 64)) == b"", "its size takes two bytes"


@pytest.mark.parametrize("cut", range(len(chunk(300))))
def test_a_message_that_is_cut_off_is_not_usual(cut: int) -> None:
    assert UsualChunks("r-1", ()).token(chunk(300)[:cut]) == b""


@given(st.binary(max_size=40))
def test_no_bytes_confuse_it(tail: bytes) -> None:
    assert isinstance(UsualChunks("r-1", ()).token(b"\n\x03r-1\x12" + tail), bytes)


def test_what_a_token_shows_is_asked_for_once_and_quoted() -> None:
    asked: list[int] = []

    def spelt(token_id: int) -> bytes:
        asked.append(token_id)
        return {5: b'a "b"\n', 300: "🐑".encode(), 6: b"\xf0\x9f"}.get(token_id, b"")

    texts = TokenTexts(spelt)
    assert texts.learn(spelling(5)) == b'a \\"b\\"\\n'
    assert texts.learn(spelling(300)) == "🐑".encode()
    assert asked == [5, 300]
    assert texts.learn(spelling(6)) == b"", "a part of a character"
    assert texts.learn(spelling(7)) == b"", "it shows nothing"
    assert set(texts.known) == {spelling(5), spelling(300)}


@given(st.lists(TOKENS, max_size=4).filter(lambda token_ids: len(token_ids) != 1), st.binary(max_size=8))
def test_nothing_is_learnt_from_what_is_no_one_token_s_spelling(token_ids: list[int], data: bytes) -> None:
    texts = TokenTexts(lambda _: b"text")
    several = UsualChunks("r-1", ()).token(chunk(*token_ids))
    overlong = b"\n\x02\x85\x00"
    for strange in (several, overlong, b"", b"\n\x01" + spelling(300), data + b"\x80"):
        assert texts.learn(strange) == b""
    assert texts.known == {}
