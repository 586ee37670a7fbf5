"""HTTP/2 (RFC 9113) and gRPC's messages in it, as far as a client of answers that stream has to know them.

Headers are written as literals that need no table at the other end (RFC 7541, 6.2.2), so nothing has to be remembered
of what was sent. Those that come are another matter, and a library's.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from struct import Struct
from typing import Final
from urllib.parse import unquote

from kvherd.core.errors import FrameInvalid

PROTOCOL: Final = "gRPC"
PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_HEAD: Final = 9
MESSAGE_HEAD: Final = 14
"""Of a frame that begins with a message of gRPC: one byte and four are the message's."""
MOST_FRAME_BYTES: Final = 16_384
"""The largest frame that either end takes unless it says otherwise; we never do."""
FIRST_WINDOW_BYTES: Final = 65_535
LAST_STREAM: Final = 2**31 - 1
_MOST_TIMEOUT: Final = 99_999_999

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM = ACK = 0x1
END_HEADERS, PADDED, PRIORITY = 0x4, 0x8, 0x20
ENABLE_PUSH, MOST_STREAMS, FIRST_WINDOW, LARGEST_FRAME = 2, 3, 4, 5
CANCEL: Final = 8

STATUSES: Final = (
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
)
_OF_RESETS: Final = {7: "UNAVAILABLE", CANCEL: "CANCELLED", 11: "RESOURCE_EXHAUSTED", 12: "PERMISSION_DENIED"}
"""What a reset means to gRPC, by the code of it; any other is INTERNAL."""
_OF_HTTP: Final = {
    400: "INTERNAL",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "UNIMPLEMENTED",
    429: "UNAVAILABLE",
    502: "UNAVAILABLE",
    503: "UNAVAILABLE",
    504: "UNAVAILABLE",
}
"""What an answer that is not gRPC's means to it, by its HTTP status; any other is UNKNOWN."""


message_head: Final = Struct(">IBIBI").unpack_from
"""Of a frame: its size (times 256) and kind, flags, stream; of the message in it: whether compressed, its size."""


def frame(kind: int, stream: int = 0, payload: bytes = b"", *, flags: int = 0) -> bytes:
    """At most `MOST_FRAME_BYTES` of payload."""
    return b"%b%c%c%b%b" % (len(payload).to_bytes(3, "big"), kind, flags, stream.to_bytes(4, "big"), payload)


def settings(values: Mapping[int, int]) -> bytes:
    payload = b"".join(name.to_bytes(2, "big") + value.to_bytes(4, "big") for name, value in values.items())
    return frame(SETTINGS, payload=payload)


def read_settings(payload: bytes) -> Iterator[tuple[int, int]]:
    """Raises `FrameInvalid`."""
    if len(payload) % 6:
        raise FrameInvalid(PROTOCOL, f"SETTINGS of {len(payload)} bytes")
    for at in range(0, len(payload), 6):
        yield int.from_bytes(payload[at : at + 2], "big"), int.from_bytes(payload[at + 2 : at + 6], "big")


def check_size(frame_bytes: int) -> None:
    """Raises `FrameInvalid` for a frame larger than we said we take; its head is counted."""
    if frame_bytes > FRAME_HEAD + MOST_FRAME_BYTES:
        raise FrameInvalid(PROTOCOL, f"a frame of {frame_bytes} bytes")


def number(payload: bytes) -> int:
    """The 31 bits that a WINDOW_UPDATE, and the 32 that a RST_STREAM has. Raises `FrameInvalid`."""
    if len(payload) != 4:
        raise FrameInvalid(PROTOCOL, f"a frame of one number in {len(payload)} bytes")
    return int.from_bytes(payload, "big")


def unpadded(payload: bytes, flags: int) -> bytes:
    """Without padding, and without the priority that HEADERS may have. Raises `FrameInvalid`."""
    begin, end = 0, len(payload)
    if flags & PADDED:
        begin, end = 1, end - (payload[0] if payload else 0)
    if flags & PRIORITY:
        begin += 5
    if begin > end:
        raise FrameInvalid(PROTOCOL, "a frame with more padding than bytes")
    return payload[begin:end]


def call_headers(authority: str, path: str, more: Iterable[tuple[str, str]] = (), *, scheme: str = "http") -> bytes:
    """The headers of one call; `more` is its metadata, names in lower case."""
    static = b"\x83" + (b"\x86" if scheme == "http" else b"\x87")  # :method POST and :scheme, from the static table
    named = b"\x04" + _text(path) + b"\x01" + _text(authority)  # :path and :authority, their names from there
    pairs = (("te", "trailers"), ("content-type", "application/grpc"), ("user-agent", "kvherd"), *more)
    return static + named + b"".join(b"\0" + _text(name) + _text(value) for name, value in pairs)


def timeout_value(seconds: float) -> str:
    """A time as `grpc-timeout` tells it, never less than it is: a whole number of at most 8 digits, and a unit."""
    milliseconds = math.ceil(min(max(seconds, 0.001), _MOST_TIMEOUT) * 1000)
    if milliseconds <= _MOST_TIMEOUT:
        return f"{milliseconds}m"
    return f"{min(math.ceil(milliseconds / 1000), _MOST_TIMEOUT)}S"


def message(data: bytes) -> bytes:
    """As gRPC frames it, not compressed."""
    return b"\0" + len(data).to_bytes(4, "big") + data


def cut_messages(buffer: bytearray, *, limit_bytes: int) -> Iterator[bytes]:
    """Take whole messages off the front of the buffer. Raises `FrameInvalid` for one compressed or above the limit."""
    at = 0
    try:
        while len(buffer) - at >= 5:
            size = int.from_bytes(buffer[at + 1 : at + 5], "big")
            if buffer[at]:
                raise FrameInvalid(PROTOCOL, "a message is compressed, though nobody asked for that")
            if size > limit_bytes:
                raise FrameInvalid(PROTOCOL, f"a message of {size} bytes; at most {limit_bytes} are taken")
            if len(buffer) - at < 5 + size:
                return
            yield bytes(buffer[at + 5 : at + 5 + size])
            at += 5 + size
    finally:
        del buffer[:at]


def status_of_headers(headers: Mapping[bytes, bytes]) -> tuple[str, str]:
    """How a call ended, by its last headers: the status' name and its words."""
    told = headers.get(b"grpc-status", b"")
    words = unquote(headers.get(b"grpc-message", b"").decode("latin-1"))
    if told.isdigit():
        return (STATUSES[int(told)] if int(told) < len(STATUSES) else "UNKNOWN"), words
    http = headers.get(b":status", b"200").decode("latin-1")
    if http != "200" and http.isdigit():
        return _OF_HTTP.get(int(http), "UNKNOWN"), f"it answered HTTP {http}, which is no gRPC"
    return "UNKNOWN", "its stream ended without a status"


def status_of_reset(code: int) -> tuple[str, str]:
    return _OF_RESETS.get(code, "INTERNAL"), f"it reset the stream (HTTP/2 code {code})"


def _text(text: str) -> bytes:
    data = text.encode()
    return _length(len(data)) + data


def _length(value: int) -> bytes:
    """An integer behind one bit that is 0 (RFC 7541, 5.1)."""
    if value < 0x7F:
        return bytes((value,))
    rest, parts = value - 0x7F, [0x7F]
    while rest >= 0x80:
        parts.append(rest & 0x7F | 0x80)
        rest >>= 7
    return bytes((*parts, rest))
