"""What stands around the messages of chats: the same for all turns of most conversations, and for many of them."""

from collections import OrderedDict
from secrets import token_hex
from typing import Final, NamedTuple

import msgspec

from kvherd.core.text.calls import ChatCall
from kvherd.wire.openai.conversation import around_messages, decode_frame
from kvherd.wire.openai.routing import Peek, peek_around

FRAMES_BYTES: Final = 4 * 1024 * 1024
_OWN_BYTES: Final = 1024
LOOK: Final = 8
"""Bytes of the first message, as which the last one is expected to begin."""
_FIELD: Final = b'"messages"'
_MOST_AROUND: Final = 256
_AROUND_BYTES: Final = 2048


class Around:
    """What was read of bodies with the same around their messages, the latest with this name."""

    __slots__ = ("name", "peeked")

    def __init__(self, name: tuple[int, int], peeked: Peek) -> None:
        self.name = name
        self.peeked = peeked


class Frame(NamedTuple):
    """All of a call but its messages. `number`: equal ones have the same."""

    number: int
    call: ChatCall


class Frames:
    """Frames by what stands around the messages in a body, the latest used."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._known: OrderedDict[tuple[bytes, bytes], Frame | None] = OrderedDict()
        self._known_bytes = 0
        self._numbers: OrderedDict[bytes, Frame] = OrderedDict()
        self._numbers_bytes = 0
        self._next = 0
        self._around: dict[tuple[bytes, bytes], Around] = {}

    def of(self, body: bytes, messages: bytes) -> Frame | None:
        around = around_messages(body, messages)
        if around is None:
            return None
        if around in self._known:
            return self._known[around]
        call = decode_frame(around)
        frame = self._known[around] = None if call is None else self._numbered(call)
        self._known_bytes += len(around[0]) + len(around[1]) + _OWN_BYTES
        while self._known_bytes > self._limit:
            (head, tail), _ = self._known.popitem(last=False)
            self._known_bytes -= len(head) + len(tail) + _OWN_BYTES
        return frame

    def _numbered(self, call: ChatCall) -> Frame:
        """Many fields of a body change nothing in its prompt: bodies come and go, and beginnings stay."""
        changing = msgspec.json.encode([call.tools, call.template_args, call.add_generation_prompt])
        frame = self._numbers.get(changing)
        if frame is not None:
            self._numbers.move_to_end(changing)
            return frame
        frame = self._numbers[changing] = Frame(self._next, call)
        self._next += 1
        self._numbers_bytes += len(changing) + _OWN_BYTES
        while self._numbers_bytes > self._limit:
            self._numbers_bytes -= len(self._numbers.popitem(last=False)[0]) + _OWN_BYTES
        return frame

    def note(self, name: tuple[int, int], body: bytes, messages: bytes) -> None:
        """What is around these messages, of a chat that was read: `around` finds it with others."""
        begin = body.find(b"[", body.find(_FIELD) + len(_FIELD))
        before, behind = body[:begin], body[begin + len(messages) :]
        if len(before) + len(behind) > _AROUND_BYTES or not body.startswith(messages, begin):
            return
        known = self._around.get((before, behind))
        peeked = peek_around(before, behind, token_hex(8).encode()) if known is None else known.peeked
        if peeked is None:
            return
        if len(self._around) >= _MOST_AROUND:
            self._around.clear()
        self._around[before, behind] = Around(name, peeked)

    def around(self, body: bytes) -> tuple[Around, bytes] | None:
        """What was noted of what stands around the messages of this body, and what stands between, which are its
        messages if they are any; None if it cannot be found without reading them.
        """
        begin = body.find(b"[", body.find(_FIELD) + len(_FIELD))
        first = body.find(b"{", begin)
        if begin < 0 or first < 0:  # and compiled, no piece may be cut out of bytes that ends before it begins
            return None
        at = body.rfind(body[first : first + LOOK])
        end = body.find(b"}]", at) + 2
        if end < 2 or begin + len(body) - end > _AROUND_BYTES:
            return None
        around = self._around.get((body[:begin], body[end:]))
        return None if around is None else (around, body[begin:end])
