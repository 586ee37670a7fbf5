"""Edits of a request body that leave every other byte of it as the client wrote it.

Bodies are never written anew: duplicate keys, odd numbers and spacing reach the worker as they came. A body given here
was read by `peek`, so it is one JSON object.
"""

import re
from collections.abc import Iterator
from itertools import islice
from typing import Final

import msgspec

from kvherd.core.errors import FieldInvalid
from kvherd.wire.openai.routing import Peek, peek

_FULL_REPORT: Final = b'"kv_cache_report_mode":"full"'
_MODE: Final = "kv_cache_report_mode"
_MODEL: Final = re.compile(rb'"model"\s*:\s*("(?:[^"\\]|\\.)*+"|null)')
_XARGS: Final = re.compile(rb'"vllm_xargs"\s*:\s*')
_MOST_TRIES: Final = 8
"""Each reads the whole body, in which a stranger may put as many members of one name as there is room."""
_EMPTY_OBJECT: Final = re.compile(rb"\{\s*\}")


def with_usage(body: bytes, asked: Peek) -> bytes | None:
    """Let a stream end with its usage. None if the client said anything about `stream_options` itself."""
    if not asked.streams or bytes(asked.stream_options):
        return None
    return _with_member(body, b'"stream_options":{"include_usage":true}')


def with_full_report(body: bytes, asked: Peek) -> bytes | None:
    """Let vLLM tell the whole cached chain of the prompt anew. None if the client chose a mode itself, or has something
    else than an object there.
    """
    own = bytes(asked.vllm_xargs)
    if not own:
        return _with_member(body, b'"vllm_xargs":{' + _FULL_REPORT + b"}")
    if own == b"null" or _EMPTY_OBJECT.fullmatch(own):
        return _with_xargs(body, own, b"{" + _FULL_REPORT + b"}")
    try:
        if _MODE in msgspec.json.decode(own, type=dict[str, msgspec.Raw]):
            return None
    except (msgspec.MsgspecError, RecursionError):
        return None
    return _with_xargs(body, own, b"{" + _FULL_REPORT + b"," + own[1:])


def with_rank(body: bytes, rank: int) -> bytes:
    """Name the rank that is to serve it, by the name that every SGLang knows. The body names none."""
    return _with_member(body, b'"data_parallel_rank":%d' % rank)


def with_model(body: bytes, model: str) -> bytes:
    """Ask for this model in place of the one that the body names, if any. Raises `FieldInvalid` if its name cannot
    be found.
    """
    for found in _members(body, b'"model"', _MODEL):
        edited = body[: found.start(1)] + msgspec.json.encode(model) + body[found.end(1) :]
        if peek(edited).model == model:  # another may stand further inside
            return edited
    if not peek(body).model:
        return _with_member(body, b'"model":' + msgspec.json.encode(model))
    problem = (
        "is an alias here: write its key without escapes, before or behind all members of that name further inside"
    )
    raise FieldInvalid("model", problem)


def _with_member(body: bytes, member: bytes) -> bytes:
    """Add a member whose key the object lacks, at its end."""
    end = body.rindex(b"}")
    comma = b"" if _EMPTY_OBJECT.fullmatch(body.strip()) else b","
    return body[:end] + comma + member + body[end:]


def _with_xargs(body: bytes, old: bytes, new: bytes) -> bytes | None:
    """Replace their value, given as it stands there. None if it is not found."""
    for found in _members(body, b'"vllm_xargs"', _XARGS):
        if body.startswith(old, found.end()):
            edited = body[: found.end()] + new + body[found.end() + len(old) :]
            if bytes(peek(edited).vllm_xargs) == new:
                return edited
    return None


def _members(body: bytes, key: bytes, member: re.Pattern[bytes]) -> Iterator[re.Match[bytes]]:
    """Where such members stand: the last ones first, then the first ones; of very many, none of those between.

    A quote within a JSON string is escaped, so the key is found as a key only. That it is the one at the top, and not
    one further inside, is seen by reading what an edit makes of it.
    """
    end, given = len(body), 0
    while given < _MOST_TRIES and (at := body.rfind(key, 0, end)) >= 0:
        end = at + len(key) - 1
        found = member.match(body, at)
        if found is not None:
            given += 1
            yield found
    yield from islice(member.finditer(body, 0, end), _MOST_TRIES)
