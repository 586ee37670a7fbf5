"""Heads of HTTP/1.1 messages that come again and again on one connection, all alike but for the length of the body.

A head that a strict parser has read once, byte for byte, need not be read by it again: its meaning is known.
"""

import re
from dataclasses import dataclass
from typing import Self

_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,9})[ \t]*\r\n", re.IGNORECASE)
_DIGITS = 9


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
        return cls(message[: found.start(1)], message[found.end(1) : end])

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
