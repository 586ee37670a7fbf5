"""A chat body taken apart without reading its messages: each of them as it came, and what is around them all."""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from kvherd.core.errors import CallerError
from kvherd.core.text.calls import ChatCall
from kvherd.wire.openai.body import parse_object
from kvherd.wire.openai.fields import Fields
from kvherd.wire.openai.messages import MOST_MESSAGES, in_parts, read_message
from kvherd.wire.openai.prompts import read_frame

_raw_list: Final = msgspec.json.Decoder(list[msgspec.Raw])
_HEAD: Final = 64
_TRIES: Final = 4


def split_messages(messages: bytes) -> list[bytes]:
    """Each message as it came; none if that is no list of up to as many as are taken."""
    try:
        found = _raw_list.decode(messages)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return []
    return list(map(bytes, found)) if len(found) <= MOST_MESSAGES else []


def message_starts(raw: Sequence[bytes], messages: bytes) -> list[int]:
    """Where each of them begins in `messages`, of which they were split: only commas and white space are between."""
    starts, end = [], 0
    for one in raw:
        at = messages.find(one, end)
        starts.append(at)
        end = at + len(one)
    return starts


def around_messages(body: bytes, messages: bytes) -> tuple[bytes, bytes] | None:
    """What stands before and behind `messages`, which are in this body; None if they are not easily found.

    Bodies with the same around them differ in nothing else.
    """
    head, at = messages[:_HEAD], -1
    for _ in range(_TRIES):
        at = body.find(head, at + 1)
        if at < 0:
            return None
        if body.startswith(messages, at):
            return body[:at], body[at + len(messages) :]
    return None


def decode_frame(around: tuple[bytes, bytes]) -> ChatCall | None:
    """The call without its messages; None if it cannot be read, if the engine alone knows its prompt, or if its last
    message is to be gone on with.
    """
    try:
        frame = read_frame(Fields(parse_object(b"[]".join(around))))
    except CallerError:
        return None
    return None if frame is None or frame.continue_final_message else frame


def decode_messages(raw: Sequence[bytes], *, begin: int) -> list[tuple[dict[str, Any], bool]]:
    """Those from number `begin` on, and whether each has its content in parts. Raises as `read_messages` does."""
    read = []
    for number, one in enumerate(raw[begin:], start=begin):
        value = parse_object(one)
        read.append((read_message(f"messages[{number}]", value), in_parts(value)))
    return read
