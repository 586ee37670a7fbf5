"""Long lists of token ids, taken out of a body before anything else reads it.

Whoever decodes JSON holds the interpreter until the end, and millions of numbers take half a second. Here they are
looked through and read piece by piece, and between two pieces other threads have their turn. What is left is short.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from kvherd.core.errors import FieldInvalid, PromptTooLong
from kvherd.core.text.calls import CompletionCall, NativeCall
from kvherd.wire.openai.requests import MOST_PROMPTS, decode_completion
from kvherd.wire.openai.routing import Peek, peek
from kvherd.wire.sglang_native import decode_generate

PIECE_BYTES: Final = 256 * 1024
_NAMES: Final = (b'"prompt"', b'"input_ids"', b'"input"')
_MOST_TRIES: Final = 4
_BEFORE_VALUE_BYTES: Final = 64
"""Colon and spaces, of which nobody writes more."""
_SPACE: Final = b" \t\r\n"
_OF_LISTS: Final = b"0123456789,[]" + _SPACE
_TOO_HIGH: Final = 2**31
_MARK: Final = _TOO_HIGH - 2
_MARKED: Final = b"%d" % _MARK
_numbers: Final = msgspec.json.Decoder(list[int])


@dataclass(frozen=True, slots=True)
class Cut:
    """A body in two: `rest` is all of it but `raw`, a list of token ids or several, in whose place a mark stands."""

    rest: bytes
    raw: bytes
    mark: bytes
    lists: "tuple[array[int], ...]"

    def whole(self, rest: bytes) -> bytes:
        """The body again, of which the rest was edited."""
        return rest.replace(self.mark, self.raw, 1)

    def first(self, prompts: Sequence[str | tuple[int, ...]]) -> "array[int] | None":
        """The ids of the first prompt, if these prompts were read where the mark stands."""
        return self.lists[0] if prompts and prompts[0] == (_MARK,) else None

    def filled(self, call: CompletionCall, most_tokens: int) -> CompletionCall:
        """The call with the ids where the mark stands. Raises `PromptTooLong` for a prompt of more than these."""
        if not all(one == (_MARK,) for one in call.prompts):
            return call
        for ids in self.lists:
            if len(ids) > most_tokens:
                raise PromptTooLong(len(ids), call.options.max_new_tokens or 0, most_tokens)
        return replace(call, prompts=tuple(map(tuple, self.lists)))


def cut_ids(body: bytes, *, piece_bytes: int = PIECE_BYTES) -> Cut | None:
    """Take out what is longer than a piece. None if there is nothing like that, or if it is no list of token ids: then
    whoever reads the whole says what is wrong with it.
    """
    for name in _NAMES:
        at = -1
        for _ in range(_MOST_TRIES):
            at = body.find(name, at + 1)
            if at < 0:
                break
            found = _list_behind(body, at + len(name), piece_bytes)
            if found is not None:
                return _cut(body, *found, piece_bytes)
    return None


def peek_long(body: bytes) -> tuple[Peek, Cut | None]:
    """As `peek`, and what was taken out: then the peek is of the rest."""
    cut = cut_ids(body)
    return peek(body if cut is None else cut.rest), cut


def decode_long_completion(body: bytes, *, most_tokens: int) -> CompletionCall:
    """As `decode_completion`. Also raises `PromptTooLong`."""
    cut = cut_ids(body)
    if cut is None:
        return decode_completion(body)
    return cut.filled(decode_completion(cut.rest), most_tokens)


def decode_long_generate(body: bytes, *, most_tokens: int) -> NativeCall:
    """As `decode_generate`. Also raises `PromptTooLong`."""
    cut = cut_ids(body)
    if cut is None:
        return decode_generate(body)
    native = decode_generate(cut.rest)
    return replace(native, call=cut.filled(native.call, most_tokens))


def _list_behind(body: bytes, at: int, piece_bytes: int) -> tuple[int, int] | None:
    """From where to where the value of a key has nothing but numbers and brackets, if that is a list and long.

    A quote within a JSON string is escaped, so the key was found as a key or as a text, behind which is no colon.
    """
    head = body[at : at + _BEFORE_VALUE_BYTES]
    begin = at + len(head)
    head = head.lstrip(_SPACE)
    if not head.startswith(b":"):
        return None
    value = head[1:].lstrip(_SPACE)
    begin -= len(value)
    if not value.startswith(b"["):
        return None
    end = begin
    while end < len(body):
        left = len(body[end : end + piece_bytes].lstrip(_OF_LISTS))
        end = min(end + piece_bytes, len(body)) - left
        if left:
            break
    end = body.rfind(b"]", begin, end) + 1
    return (begin, end) if end - begin > piece_bytes else None


def _cut(body: bytes, begin: int, end: int, piece_bytes: int) -> Cut | None:
    raw = body[begin:end]
    opened = raw.count(b"[")
    inner = raw[1:-1].strip(_SPACE)
    if opened != raw.count(b"]") or opened > MOST_PROMPTS + 1:
        return None
    if opened == 1:
        parts, mark = [inner], b"[" + _MARKED + b"]"
    else:
        parts = _within(inner)
        mark = b"[" + b",".join([b"[" + _MARKED + b"]"] * len(parts)) + b"]"
    rest = body[:begin] + mark + body[end:]
    if not parts or rest.count(_MARKED) != len(parts):
        return None
    try:
        return Cut(rest, raw, mark, tuple(read_ids(part, piece_bytes=piece_bytes) for part in parts))
    except (msgspec.MsgspecError, ValueError, FieldInvalid):
        return None


def _within(inner: bytes) -> list[bytes]:
    """What is in each list of a list of such; none if it is something else."""
    parts = []
    for number, part in enumerate(inner.split(b"]")[:-1]):
        head, bracket, ids = part.partition(b"[")
        if not bracket or head.strip(_SPACE) != (b"," if number else b""):
            return []
        parts.append(ids.strip(_SPACE))
    return parts if inner.endswith(b"]") else []


def read_ids(ids: bytes, *, piece_bytes: int = PIECE_BYTES) -> "array[int]":
    """Token ids with commas between them, at least one. Raises what tells that it is anything else."""
    read = array("I")
    at = 0
    while at <= len(ids):
        end = ids.find(b",", at + piece_bytes)
        end = len(ids) if end < 0 else end
        numbers = _numbers.decode(b"[" + ids[at:end] + b"]")
        if not numbers or min(numbers) < 0 or max(numbers) >= _TOO_HIGH:
            raise FieldInvalid("prompt", "must be token ids")
        read.extend(numbers)
        at = end + 1
    return read
