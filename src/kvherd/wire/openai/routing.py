"""The little of an OpenAI body that routing reads; whoever answers reads the rest."""

import msgspec

from kvherd.core.errors import BodyNotJson, FieldInvalid
from kvherd.wire.openai.body import body_not_json
from kvherd.wire.type_words import type_words

RANK_HEADER = b"x-data-parallel-rank"
"""How vLLM is told which rank is to serve a request."""


class Peek(msgspec.Struct, frozen=True):
    """Fields of the body, with their defaults if absent or null; the last ones as undecoded JSON, empty if absent."""

    model: str | None = None
    stream: bool | None = None
    n: int | None = None
    best_of: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    cache_salt: str | None = None
    user: str | None = None
    data_parallel_rank: int | None = None
    routed_dp_rank: int | None = None
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    stream_options: msgspec.Raw = msgspec.Raw()
    vllm_xargs: msgspec.Raw = msgspec.Raw()

    @property
    def rank(self) -> int | None:
        """The data-parallel rank that the client wants, under either of SGLang's names for it."""
        return self.routed_dp_rank if self.data_parallel_rank is None else self.data_parallel_rank

    @property
    def branches(self) -> bool:
        """More than one answer to a prompt is asked for."""
        return (self.n or 1) > 1 or (self.best_of or 1) > 1

    @property
    def streams(self) -> bool:
        return self.stream is True


_decoder = msgspec.json.Decoder(Peek)


def peek(body: bytes) -> Peek:
    """Raises `BodyNotJson`, or `FieldInvalid` for a field of the wrong type."""
    try:
        return _decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _invalid(body, str(error)) from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise body_not_json(body, error) from None


def peek_around(before: bytes, behind: bytes, unlikely: bytes) -> Peek | None:
    """What `peek` tells of a body whose messages, whatever they are, stand between these two; None if they do not.

    `unlikely` is a word that no client can know.
    """
    mark = b'["%b"]' % unlikely
    try:
        peeked = peek(before + mark + behind)
    except (BodyNotJson, FieldInvalid):
        return None
    return peeked if bytes(peeked.messages) == mark else None


def with_messages(peeked: Peek, messages: bytes) -> Peek:
    return msgspec.structs.replace(peeked, messages=msgspec.Raw(messages))


def _invalid(body: bytes, words: str) -> FieldInvalid | BodyNotJson:
    problem, at, path = words.partition(" - at `$.")
    if not at and problem.startswith("Expected `object`"):
        return FieldInvalid("body", "must be a JSON object")
    if not at:
        return body_not_json(body, ValueError(words))
    return FieldInvalid(path.rstrip("`"), type_words(problem))
