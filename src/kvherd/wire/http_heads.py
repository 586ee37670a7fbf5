"""Heads of HTTP/1.1 messages that come again and again on one connection, all alike but for the length of the body.

A head that a strict parser has read once, byte for byte, need not be read by it again: its meaning is known.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Self, overload

Header = tuple[bytes, bytes]

_LENGTH: Final = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,9})[ \t]*\r\n", re.IGNORECASE)
_DIGITS: Final = 9
_LENGTH_NAME: Final = b"content-length"
_NAMING: Final = frozenset({b"x-request-id", b"traceparent"})


@dataclass(frozen=True, slots=True)
class KnownHead:
    """A head but for its Content-Length: what stands before the digits and what after them."""

    before: bytes
    after: bytes

    @classmethod
    def of(cls, message: bytes) -> Self | None:
        """The head that a message begins with, if a parser has read it whole; None if it does not tell one length."""
        end = message.find(b"\r\n\r\n") + 4
        found = _LENGTH.search(message, 0, end)
        if found is None or _LENGTH.search(message, found.end(1), end) is not None:
            return None
        before, after = found.span(1)
        return cls(message[:before], message[after:end])

    def body(self, message: bytes) -> tuple[int, int] | None:
        """Where the body begins and how long it is, if this message has this head."""
        if not message.startswith(self.before):
            return None
        begin = len(self.before)
        end = message.find(self.after, begin, begin + _DIGITS + len(self.after))
        digits = message[begin:end]
        if end < 0 or not digits.isdigit():
            return None
        return end + len(self.after), int(digits)


class Block:
    """Headers that come again together, and what was made of them once: each message adds little of its own.

    `noted` belongs to whoever writes them out, for what it found in them.
    """

    __slots__ = ("_first", "_lines", "_shorter", "headers", "noted")

    def __init__(self, headers: Iterable[Header]) -> None:
        self.headers = tuple(headers)
        self.noted: object = None
        self._first = dict(reversed(self.headers))
        self._lines: dict[frozenset[bytes], bytes] = {}
        self._shorter: dict[bytes, Block] = {}

    def first(self, name: bytes) -> bytes | None:
        return self._first.get(name)

    def lines(self, left_out: frozenset[bytes]) -> bytes:
        """As they are sent, but those of these names."""
        lines = self._lines.get(left_out)
        if lines is None:
            lines = self._lines[left_out] = _written(self.headers, left_out)
        return lines

    def without(self, name: bytes) -> "Block":
        shorter = self._shorter.get(name)
        if shorter is None:
            shorter = self._shorter[name] = Block(header for header in self.headers if header[0] != name)
        return shorter


class KnownHeaders(Sequence[Header]):
    """The headers of one message: a block that came before, then its `own`. Names are in lower case.

    `written` is its own as they are sent, but for a Content-Length, if whoever made them said so.
    """

    __slots__ = ("block", "own", "written")

    def __init__(self, block: Block, own: tuple[Header, ...], written: bytes | None = None) -> None:
        self.block = block
        self.own = own
        self.written = written

    def __iter__(self) -> Iterator[Header]:
        yield from self.block.headers
        yield from self.own

    def __len__(self) -> int:
        return len(self.block.headers) + len(self.own)

    @overload
    def __getitem__(self, index: int) -> Header: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Header, ...]: ...
    def __getitem__(self, index: int | slice) -> Header | tuple[Header, ...]:
        return (self.block.headers + self.own)[index]


def first(headers: Iterable[Header], name: bytes) -> bytes | None:
    """The value of the first header of this name, which is in lower case as theirs are."""
    if type(headers) is KnownHeaders:
        value = headers.block.first(name)
        if value is not None:
            return value
        headers = headers.own
    for key, value in headers:
        if key == name:
            return value
    return None


def without(headers: Sequence[Header], name: bytes) -> Sequence[Header]:
    """All headers but those of this name."""
    if type(headers) is KnownHeaders:
        own = tuple(header for header in headers.own if header[0] != name)
        written = headers.written if len(own) == len(headers.own) else None
        return KnownHeaders(headers.block.without(name), own, written)
    return [header for header in headers if header[0] != name]


def with_more(headers: Sequence[Header], more: Iterable[Header]) -> Sequence[Header]:
    """These, and behind them others."""
    if type(headers) is KnownHeaders:
        return KnownHeaders(headers.block, (*headers.own, *more))
    return [*headers, *more]


def lines(headers: Iterable[Header], left_out: frozenset[bytes]) -> bytes:
    """Headers as they are sent, but those of these names."""
    if type(headers) is KnownHeaders:
        own = headers.written
        if own is None or _LENGTH_NAME not in left_out or not left_out.isdisjoint(_NAMING):
            own = _written(headers.own, left_out)
        return headers.block.lines(left_out) + own
    return _written(headers, left_out)


def _written(headers: Iterable[Header], left_out: frozenset[bytes]) -> bytes:
    parts: list[bytes] = []
    for name, value in headers:
        if name not in left_out:
            parts += (name, b": ", value, b"\r\n")
    return b"".join(parts)
