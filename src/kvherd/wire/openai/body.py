"""A request body as a JSON object, or where it fails to be one."""

import json
import re
from typing import Any

import msgspec

from kvherd.core.errors import BodyNotJson, FieldInvalid

_decoder = msgspec.json.Decoder()
_MOST_READ_AGAIN = 1024 * 1024
"""To find better words; nobody has his turn meanwhile."""
_AT_BYTE = re.compile(r" \(byte (\d+)\)")


def parse_object(body: bytes) -> dict[str, Any]:
    """Raises `BodyNotJson` with line and column, `FieldInvalid` if it is JSON but no object."""
    try:
        value = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise body_not_json(body, error) from None
    if not isinstance(value, dict):
        raise FieldInvalid("body", f"must be a JSON object, not {json_name(value)}")
    return value


def body_not_json(body: bytes, error: Exception) -> BodyNotJson:
    """Say where `body` fails, in lines and columns of characters, given what msgspec said of it."""
    if len(body) > _MOST_READ_AGAIN:
        return _in_short(body, error)
    try:
        told = json.loads(body.decode())
    except json.JSONDecodeError as better:
        return BodyNotJson(better.lineno, better.colno, better.msg[:1].lower() + better.msg[1:])
    except UnicodeDecodeError as better:
        return BodyNotJson(*_position(body, better.start), f"byte 0x{body[better.start]:02x} is not UTF-8")
    except RecursionError:
        return BodyNotJson(1, 1, "it is nested too deeply")
    except ValueError:  # json has a limit for the digits of a whole number
        return BodyNotJson(1, 1, "a number in it is too long")
    # json takes what msgspec does not: NaN, numbers out of range, half surrogates
    if not _is_unicode(told):
        return BodyNotJson(1, 1, "a \\u escape in it is half of a character (a surrogate without the other)")
    return _in_short(body, error)


def _in_short(body: bytes, error: Exception) -> BodyNotJson:
    if isinstance(error, UnicodeDecodeError):
        return BodyNotJson(*_position(body, error.start), "it is not UTF-8")
    if isinstance(error, RecursionError):
        return BodyNotJson(1, 1, "it is nested too deeply")
    found = _AT_BYTE.search(str(error))
    problem = _AT_BYTE.sub("", str(error)).removeprefix("JSON is malformed: ").split(" - at")[0]
    return BodyNotJson(*_position(body, int(found[1]) if found else len(body)), problem)


def _is_unicode(value: object) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def json_name(value: object) -> str:
    """What a JSON value is called in a sentence."""
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), "null")


def _position(body: bytes, byte: int) -> tuple[int, int]:
    before = body[:byte].decode(errors="replace")
    return before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1
