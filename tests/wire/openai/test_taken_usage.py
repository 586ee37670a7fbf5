"""Whatever a stream looks like and however it is cut, the client sees what it would have seen unasked."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvherd.wire.openai.taken_usage import TakenUsage

RECORDED = Path(__file__).parents[2] / "fixtures/vllm-0.32-http/chat_stream.txt"
EXTRA = b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":3,"total_tokens":4}}'
STAMPED = b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":3},"system_fingerprint":"vllm-1"}'
TEXT = b'data: {"id":"c","choices":[{"delta":{"content":"a \\"usage\\": {"},"finish_reason":null}]}'
FINISH = b'data: {"id":"c","choices":[{"delta":{},"finish_reason":"stop"}]}'
FINISH_STAMPED = b'data: {"id":"c","choices":[{"delta":{},"finish_reason":"stop"}],"system_fingerprint":"vllm-1"}'
DONE = b"data: [DONE]"
OTHERS = (
    TEXT,
    b": keep-alive",
    b'data: {"choices":[{"index":0}],"usage":null}',
    b'data: {"choices":[],"usage":null,"sglext":{"a":1}}',
    b'data: {"choices":[{"index":0}],"usage":{"prompt_tokens":3}}',
    b'event: x\nid: 7\ndata: {"usage":',
    b"data: \xff\xfe",
    b"",
)


def taken(stream: bytes, cuts: list[int]) -> bytes:
    taker, places = TakenUsage(), sorted({0, *(cut % (len(stream) + 1) for cut in cuts), len(stream)})
    pieces = [stream[begin:end] for begin, end in pairwise(places)]
    return b"".join(map(taker.feed, pieces)) + taker.end()


@given(
    st.lists(st.sampled_from(OTHERS), max_size=5),
    st.lists(st.sampled_from(OTHERS), max_size=2),
    st.sampled_from([b"\n", b"\r\n", b"\r"]),
    st.lists(st.integers(0, 10_000), max_size=12),
)
def test_the_extra_event_is_gone_and_nothing_else(
    before: list[bytes], after: list[bytes], newline: bytes, cuts: list[int]
) -> None:
    def stream(*events: bytes) -> bytes:
        return b"".join(event + newline + newline for event in events)

    asked = stream(*before, FINISH, STAMPED, *after, DONE)
    assert taken(asked, cuts) == stream(*before, FINISH_STAMPED, *after, DONE)
    plain = stream(*before, FINISH, EXTRA, *after, DONE)
    assert taken(plain, cuts) == stream(*before, FINISH, *after, DONE)


def test_of_a_recorded_stream_of_vllm_the_last_event_is_taken_and_its_fingerprint_put_back() -> None:
    recorded = RECORDED.read_bytes()
    *first, finish, _usage, done, rest = recorded.split(b"\n\n")
    stamped = finish.removesuffix(b"}") + b',"system_fingerprint":"vllm-0.32.0-47c0b76c"}'
    expected = b"\n\n".join((*first, stamped, done, rest))
    for size in (1, 7, 100, 100_000):
        taker = TakenUsage()
        pieces = [recorded[place : place + size] for place in range(0, len(recorded), size)]
        assert b"".join(map(taker.feed, pieces)) + taker.end() == expected


def test_an_event_passes_as_soon_as_it_is_whole() -> None:
    taker = TakenUsage()
    assert taker.feed(TEXT + b"\n") == b""
    assert taker.feed(b"\n: ping\n\nda") == TEXT + b"\n\n: ping\n\n"
    assert taker.feed(b"ta: 1\n\n") == b"data: 1\n\n"


def test_the_event_with_the_finish_waits_for_the_next_whatever_that_is() -> None:
    taker = TakenUsage()
    assert taker.feed(FINISH + b"\n\n") == b""
    assert taker.feed(b": ping\n\n") == FINISH + b"\n\n: ping\n\n"
    assert taker.feed(EXTRA + b"\n\n") == b""


def test_a_stream_that_breaks_off_loses_nothing() -> None:
    taker = TakenUsage()
    assert taker.feed(FINISH + b"\n\ndata: {") == b""
    assert taker.end() == FINISH + b"\n\ndata: {"


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
@pytest.mark.parametrize("tail", [0, 1, 2, 3])
def test_an_event_longer_than_any_usage_is_not_kept(end: bytes, tail: int) -> None:
    taker, long = TakenUsage(), b'data: {"usage":"' + b"x" * 70_000 + b'"}'
    stream = long + end + EXTRA + end + DONE + end
    cut = len(long) + tail
    first = taker.feed(stream[:cut])
    assert len(first) >= len(long) - 3
    assert first + taker.feed(stream[cut:]) + taker.end() == long + end + DONE + end


def test_a_comment_within_the_extra_event_stays() -> None:
    taker = TakenUsage()
    assert taker.feed(b": ping\n" + EXTRA + b"\n\n" + DONE + b"\n\n") == b": ping\n\n" + DONE + b"\n\n"


def test_an_event_nested_without_end_is_passed_on() -> None:
    event = b'data: {"choices":[],"usage":' + b"[" * 5000 + b"]" * 5000 + b"}\n\n"
    taken = TakenUsage()
    assert taken.feed(event) + taken.end() == event
