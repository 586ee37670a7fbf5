"""A message that is a role and a text and nothing else, as nearly all are: read at once, into what it says."""

from typing import Final, Literal

import msgspec


class PlainMessage(msgspec.Struct, forbid_unknown_fields=True):
    """`messages.read_message` makes of it a dictionary of the same two values."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str


_list: Final = msgspec.json.Decoder(tuple[PlainMessage])


def last_message(rest: bytes) -> PlainMessage | None:
    """The last of a list of messages, given what is left of the list from there on; None if it is not plain."""
    try:
        return _list.decode(b"[" + rest)[0]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
