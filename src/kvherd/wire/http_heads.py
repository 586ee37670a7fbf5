"""Heads of HTTP/1.1 messages that come again and again on one connection, all alike but for the length of the body.

A head that a strict parser has read once, byte for byte, need not be read by it again: its meaning is known.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Self, overload

Header = tuple[bytes, bytes]

_LENGTH: Final = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,9})[ \t]*\r\n", re.IGNORECASE)
_DIGITS: Final = 9
_ZERO: Final = 0x30
_LENGTH_NAME: Final = b"content-length"
_NAMING: Final = frozenset({b"x-request-id", b"traceparent"})


class KnownHead:
    """A head but for its Content-Length: what stands before the digits and what after them."""

    __slots__ = ("_after", "_before")

    def __init__(self, before: bytes, after: bytes) -> None:
        self._before = before
        self._after = after

    @classmethod
    def of(cls, message: bytes) -> Self | None:
        """The head that a message begins with, if a parser has read it whole; None if it does not tell one length."""
        end = message.find(b"\r\n\r\n") + 4
        found = _LENGTH.search(message, 0, end)
        if found is None or _LENGTH.search(message, found.end(1), end) is not None:
            return None
        before, after = found.span(1)
        return cls(message[:before], message[after:end])

    def body(self, message: bytes) -> int:
        """Where the body begins if the message is this head and all of the body that it tells; else -1.

        Digit by digit: compiled, that is a twentieth of finding, cutting out and reading a number.
        """
        before, after = self._before, self._after
        if not message.startswith(before):
            return -1
        at = len(before)
        last = min(at + _DIGITS, len(message))
        length = 0
        while at < last:
            digit = message[at] - _ZERO
            if digit < 0 or digit > 9:
                break
            length = length * 10 + digit
            at += 1
        begin = at + len(after)
        told = at > len(before) and begin + length == len(message)
        return begin if told and message[at:begin] == after else -1


class Block:
    """Headers that come again together, and what was made of them once: each message adds little of its own.

    `noted` belongs to whoever looks at all of them, for what it found.
    """

    __slots__ = ("_first", "_left_out", "_lines", "_lines_left", "_names_left_in", "_shorter", "headers", "noted")

    def __init__(self, headers: Iterable[Header]) -> None:
        self.headers = tuple(headers)
        self.noted: object = None
        self._first = dict(reversed(self.headers))
        self._left_out: frozenset[bytes] | None = None
        self._lines_left = b""
        self._names_left_in = False
        self._lines: dict[frozenset[bytes], bytes] = {}
        self._shorter: dict[bytes, Block] = {}

    def first(self, name: bytes) -> bytes | None:
        return self._first.get(name)

    def lines(self, left_out: frozenset[bytes]) -> bytes:
        """As they are sent, but those of these names."""
        if left_out is not self._left_out:  # nearly always the same are left out
            lines = self._lines.get(left_out)
            if lines is None:
                lines = self._lines[left_out] = _written(self.headers, left_out)
            self._left_out, self._lines_left = left_out, lines
            self._names_left_in = _LENGTH_NAME in left_out and _NAMING.isdisjoint(left_out)
        return self._lines_left

    def naming_is_left_in(self, left_out: frozenset[bytes]) -> bool:
        """But for a Content-Length, which is left out: so that what `KnownHeaders` have `written` may be used."""
        self.lines(left_out)
        return self._names_left_in

    def without(self, name: bytes) -> "Block":
        shorter = self._shorter.get(name)
        if shorter is None:
            shorter = self._shorter[name] = Block(header for header in self.headers if header[0] != name)
        return shorter


NO_LENGTH: Final = -1


class KnownHeaders(Sequence[Header]):
    """The headers of one message: a block that came before, then its own. Names are in lower case.

    Its own are a Content-Length, if `length` is not negative, and `more`, or what is `written` as it is sent: a name
    and a trace, which are seldom looked at.
    """

    __slots__ = ("_own", "block", "length", "more", "written")

    def __init__(
        self, block: Block, more: tuple[Header, ...] = (), written: bytes | None = None, length: int = NO_LENGTH
    ) -> None:
        self.block = block
        self.more = more
        self.written = written
        self.length = length
        self._own: tuple[Header, ...] | None = None

    @property
    def own(self) -> tuple[Header, ...]:
        """Made when somebody asks."""
        own = self._own
        if own is None:
            own = self.more if self.written is None else _read(self.written)
            if self.length >= 0:
                own = ((_LENGTH_NAME, b"%d" % self.length), *own)
            self._own = own
        return own

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
        block, written = headers.block.without(name), headers.written
        if written is not None and name not in _NAMING and name != _LENGTH_NAME:
            return KnownHeaders(block, (), written, headers.length)
        return KnownHeaders(block, tuple(header for header in headers.own if header[0] != name))
    return [header for header in headers if header[0] != name]


def with_more(headers: Sequence[Header], more: Iterable[Header]) -> Sequence[Header]:
    """These, and behind them others."""
    if type(headers) is KnownHeaders:
        if headers.written is None and not headers.more:
            return KnownHeaders(headers.block, tuple(more), None, headers.length)
        return KnownHeaders(headers.block, (*headers.own, *more))
    return [*headers, *more]


def lines(headers: Iterable[Header], left_out: frozenset[bytes]) -> bytes:
    """Headers as they are sent, but those of these names."""
    if type(headers) is KnownHeaders:
        block, written = headers.block, headers.written
        if written is None or not block.naming_is_left_in(left_out):
            written = _written(headers.own, left_out)
        return block.lines(left_out) + written
    return _written(headers, left_out)


def _read(lines: bytes) -> tuple[Header, ...]:
    """Headers that were written here."""
    read = []
    for line in lines.split(b"\r\n")[:-1]:
        name, _, value = line.partition(b": ")
        read.append((name, value))
    return tuple(read)


def _written(headers: Iterable[Header], left_out: frozenset[bytes]) -> bytes:
    parts: list[bytes] = []
    for name, value in headers:
        if name not in left_out:
            parts += (name, b": ", value, b"\r\n")
    return b"".join(parts)
