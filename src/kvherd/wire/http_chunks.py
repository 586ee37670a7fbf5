"""Chunks of a chunked HTTP/1.1 body that are pieces by themselves, as a server sends the events of a stream.

Such a piece says its own length in its first line: whoever knows that a chunk must begin where it begins has nothing to
parse, and who sends chunks too passes it on as it is.
"""

from typing import Final

_MOST_BYTES: Final = 1024
_NONE: Final = b"\0"  # no chunk begins so


def _starts() -> tuple[bytes, ...]:
    starts = [_NONE] * _MOST_BYTES
    for size in range(1, _MOST_BYTES):
        first_line = b"%x\r\n" % size
        length = len(first_line) + size + 2
        if length < _MOST_BYTES:
            starts[length] = first_line
    return tuple(starts)


STARTS: Final = _starts()
"""By the length of a piece: how it begins if it is one chunk. Longer ones are for a parser."""

EVENTS_END: Final = b"\n\n\r\n"
"""How a chunk ends that holds whole events and no part of another."""


def content(chunk: bytes) -> bytes:
    """What a whole chunk holds."""
    begin = chunk.index(b"\n") + 1
    return chunk[begin:-2]
