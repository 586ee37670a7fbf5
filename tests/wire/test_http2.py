"""HTTP/2 frames and gRPC's messages as bytes."""

import re

import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvherd.core.errors import FrameInvalid
from kvherd.wire import http2


def cut(buffer: bytearray, limit_bytes: int = 1 << 20) -> list[bytes]:
    return list(http2.cut_messages(buffer, limit_bytes=limit_bytes))


@given(st.lists(st.binary(max_size=40), max_size=8), st.integers(1, 9))
def test_messages_come_out_whole_however_their_bytes_are_split(messages: list[bytes], step: int) -> None:
    stream, buffer, found = b"".join(map(http2.message, messages)), bytearray(), []
    for at in range(0, len(stream), step):
        buffer += stream[at : at + step]
        found += cut(buffer)
    assert found == messages
    assert not buffer


@pytest.mark.parametrize(
    ("data", "says"), [(b"\1\0\0\0\1x", "compressed"), (b"\0\0\0\1\0", "at most 100")], ids=["compressed", "too large"]
)
def test_a_message_that_cannot_be_taken_is_refused_in_words(data: bytes, says: str) -> None:
    with pytest.raises(FrameInvalid, match=says):
        cut(bytearray(data), 100)


@given(st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=300))
def test_headers_are_read_by_others_as_they_were_meant(value: str) -> None:
    block = http2.call_headers("host:1", "/a.Service/Method", (("x-one", value),))
    found: dict[str, str] = dict(hpack.Decoder().decode(block))  # type: ignore[arg-type] # text, unless told otherwise
    assert found == {
        ":method": "POST",
        ":scheme": "http",
        ":path": "/a.Service/Method",
        ":authority": "host:1",
        "te": "trailers",
        "content-type": "application/grpc",
        "user-agent": "kvherd",
        "x-one": value,
    }


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (1.5, "1500m"),
        (0.0001, "1m"),
        (-3.0, "1m"),
        (99_999.999, "99999999m"),
        (100_000.2, "100001S"),
        (1e300, "99999999S"),
    ],
)
def test_a_time_is_told_in_eight_digits_and_a_unit(seconds: float, told: str) -> None:
    assert http2.timeout_value(seconds) == told


@given(st.floats(0.001, 99_999_999))
def test_a_time_that_is_told_is_never_less_than_it_is(seconds: float) -> None:
    told = http2.timeout_value(seconds)
    assert re.fullmatch(r"[0-9]{1,8}[mS]", told)
    unit_s = {"m": 0.001, "S": 1.0}[told[-1]]
    assert -1e-6 <= int(told[:-1]) * unit_s - seconds <= unit_s + 1e-6


@pytest.mark.parametrize(
    ("headers", "status", "words"),
    [
        ({b"grpc-status": b"0"}, "OK", ""),
        ({b"grpc-status": b"14", b"grpc-message": b"gone%20%C3%A9"}, "UNAVAILABLE", "gone é"),
        ({b"grpc-status": b"99"}, "UNKNOWN", ""),
        ({b":status": b"503"}, "UNAVAILABLE", "HTTP 503"),
        ({b":status": b"404"}, "UNIMPLEMENTED", "HTTP 404"),
        ({}, "UNKNOWN", "without a status"),
    ],
)
def test_the_last_headers_say_how_a_call_ended(headers: dict[bytes, bytes], status: str, words: str) -> None:
    found = http2.status_of_headers(headers)
    assert found[0] == status
    assert words in found[1]


@given(st.binary(max_size=30), st.integers(0, 255))
def test_no_frame_raises_anything_but_the_decoder_s_own_error(payload: bytes, flags: int) -> None:
    for read in (http2.number, lambda data: list(http2.read_settings(data)), lambda data: http2.unpadded(data, flags)):
        try:
            read(payload)
        except FrameInvalid:
            continue


def test_padding_and_priority_are_taken_off() -> None:
    assert http2.unpadded(b"\2body\0\0", http2.PADDED) == b"body"
    assert http2.unpadded(b"\1\0\0\0\0\7body\0", http2.PADDED | http2.PRIORITY) == b"body"
    with pytest.raises(FrameInvalid, match="padding"):
        http2.unpadded(b"\5bo", http2.PADDED)
