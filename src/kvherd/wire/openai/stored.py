"""What is kept on a worker under a name: answers of `/v1/responses`, and conversations.

A body continues one by `previous_response_id` or `conversation`; an answer tells its own name as `id`, in a stream
within its first event, and perhaps the conversation's.
"""

import re
from typing import Final

import msgspec

from kvherd.core.errors import FieldInvalid

RESPONSES: Final = "/v1/responses"
CONVERSATIONS: Final = "/v1/conversations"

_MOST_BYTES: Final = 4 * 1024 * 1024
_EVENT_END: Final = re.compile(rb"(?>\r\n|\n|\r){2}")  # atomic: \r\n is one line end
_DATA: Final = re.compile(rb"^data:(.*)", re.MULTILINE)
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,256}")


class _Named(msgspec.Struct):
    id: str | None = None


class _Asked(msgspec.Struct):
    previous_response_id: str | None = None
    conversation: str | _Named | None = None


class _Told(msgspec.Struct):
    id: str | None = None
    conversation: str | _Named | None = None
    response: _Named | None = None


_asked = msgspec.json.Decoder(_Asked)
_told = msgspec.json.Decoder(_Told)


def continued(body: bytes) -> tuple[str, str] | None:
    """What a body goes on from: below which path it is kept, and its name there. None if it begins anew, or is no JSON.

    Raises `FieldInvalid` for what is no name: it becomes part of a path.
    """
    try:
        asked = _asked.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None  # whoever reads the rest says what is wrong with it
    conversation = _name_of(asked.conversation)
    name, field, root = asked.previous_response_id, "previous_response_id", RESPONSES
    if not name:
        name, field, root = conversation, "conversation", CONVERSATIONS
    if name and not is_name(name):
        raise FieldInvalid(field, "must be a name of letters, digits, _ and -, at most 256 of them")
    return (root, name) if name else None


def is_name(text: str) -> bool:
    """It may stand in a path, and there mean itself alone."""
    return _NAME.fullmatch(text) is not None


class ToldNames:
    """Feed it an answer's bytes in any pieces. `found` is what it told to be stored, a stream as soon as it told."""

    def __init__(self, *, stream: bool) -> None:
        self.found: tuple[str, ...] = ()
        self._stream = stream
        self._kept = bytearray()
        self._over = False

    def feed(self, data: bytes) -> None:
        if self._over:
            return
        self._kept += data
        while self._stream and not self._over and (end := _EVENT_END.search(self._kept)) is not None:
            event = _DATA.search(self._kept[: end.end()])
            if event is not None:
                self._read(event[1])
            else:  # a comment
                del self._kept[: end.end()]
        if len(self._kept) > _MOST_BYTES:
            self._stop()

    def end(self) -> None:
        """The answer is over."""
        if not self._over and not self._stream:
            self._read(bytes(self._kept))

    def _read(self, document: bytes) -> None:
        self._stop()
        try:
            told = _told.decode(document)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return
        names = (told.response.id if told.response else told.id, _name_of(told.conversation))
        self.found = tuple(name for name in names if name and is_name(name))

    def _stop(self) -> None:
        self._over = True
        self._kept = bytearray()


def _name_of(conversation: str | _Named | None) -> str | None:
    return conversation.id if isinstance(conversation, _Named) else conversation
