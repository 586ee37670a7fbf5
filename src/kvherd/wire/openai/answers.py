"""Answers as OpenAI's clients read them: whole, or as the frames of an event stream.

A stream is: one opening frame a choice, frames of text, one frame with the finish reason a choice, the usage if asked
for (with no choices), `data: [DONE]`. An error in the middle is a frame with `error`, and the end.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from kvherd.core.engine.generation import Finish, TokenLogprob
from kvherd.core.text.choice import ShownToken, TextDelta
from kvherd.wire.openai.errors import error_object

DONE = b"data: [DONE]\n\n"
_LEAST_LOGPROB = -9999.0  # JSON has no infinity

_encoder = msgspec.json.Encoder()


class TokenNames(Protocol):
    def token_text(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What every frame of one answer repeats."""

    answer: str
    model: str
    created_s: int
    fingerprint: str


@dataclass(slots=True)
class ChoiceAnswer:
    """One whole choice. Deltas of a choice may be added up in it."""

    text: str = ""
    tokens: list[ShownToken] = field(default_factory=list)
    finish: Finish | None = None

    def add(self, delta: TextDelta) -> None:
        self.text += delta.text
        self.tokens += delta.tokens
        self.finish = delta.finish


class Answers(Protocol):
    """The two kinds of answer. Methods that return frames return none as b""."""

    def opening(self, index: int, echo: str) -> bytes: ...

    def frames(self, index: int, delta: TextDelta) -> bytes: ...

    def around(self, index: int) -> tuple[bytes, bytes]:
        """What stands before and behind a text, as `quoted` has it, in the frame that tells nothing else."""
        ...

    def usage_frame(self, usage: dict[str, Any]) -> bytes: ...

    def whole(self, choices: Sequence[ChoiceAnswer], usage: dict[str, Any]) -> bytes: ...


class ChatAnswers:
    def __init__(self, head: AnswerHead, names: TokenNames, *, logprobs: bool) -> None:
        self._head = _head_fields(head, f"chatcmpl-{head.answer}")
        self._names = names
        self._logprobs = logprobs

    def opening(self, index: int, echo: str) -> bytes:
        return self._chunk(index, {"role": "assistant", "content": echo}, None, None)

    def frames(self, index: int, delta: TextDelta) -> bytes:
        frames = b""
        if delta.text or delta.tokens:
            frames = self._chunk(index, {"content": delta.text}, self._content(delta.tokens), None)
        if delta.finish is not None:
            frames += self._chunk(index, {}, None, delta.finish)
        return frames

    def around(self, index: int) -> tuple[bytes, bytes]:
        return _around(self._chunk(index, {"content": ""}, self._content(()), None), b'"content":"')

    def usage_frame(self, usage: dict[str, Any]) -> bytes:
        return sse(self._head | {"object": "chat.completion.chunk", "choices": [], "usage": usage})

    def whole(self, choices: Sequence[ChoiceAnswer], usage: dict[str, Any]) -> bytes:
        shaped = [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": self._content(choice.tokens),
                **_finish_fields(choice.finish),
            }
            for index, choice in enumerate(choices)
        ]
        return _encoder.encode(self._head | {"object": "chat.completion", "choices": shaped, "usage": usage})

    def _chunk(
        self, index: int, delta: dict[str, str], logprobs: dict[str, Any] | None, finish: Finish | None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, **_finish_fields(finish)}
        return sse(self._head | {"object": "chat.completion.chunk", "choices": [choice]})

    def _content(self, tokens: Sequence[ShownToken]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        return {"content": [self._token(shown.token) for shown in tokens]}

    def _token(self, token: TokenLogprob) -> dict[str, Any]:
        top = [self._named(token_id, logprob) for token_id, logprob in token.top]
        return self._named(token.token_id, token.logprob) | {"top_logprobs": top}

    def _named(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, spelt = self._names.token_text(token_id), self._names.token_bytes(token_id)
        return {"token": text, "logprob": max(logprob, _LEAST_LOGPROB), "bytes": list(spelt)}


class TextAnswers:
    """Answers of `/v1/completions`. The echo of a prompt is part of its choice's text and moves the offsets."""

    def __init__(self, head: AnswerHead, names: TokenNames, *, logprobs: bool) -> None:
        self._head = _head_fields(head, f"cmpl-{head.answer}") | {"object": "text_completion"}
        self._names = names
        self._logprobs = logprobs

    def opening(self, index: int, echo: str) -> bytes:
        return self._chunk(index, echo, None, None) if echo else b""

    def frames(self, index: int, delta: TextDelta) -> bytes:
        if not (delta.text or delta.tokens or delta.finish):
            return b""
        return self._chunk(index, delta.text, self._logprob_fields(delta.tokens), delta.finish)

    def around(self, index: int) -> tuple[bytes, bytes]:
        return _around(self._chunk(index, "", self._logprob_fields(()), None), b'"text":"')

    def usage_frame(self, usage: dict[str, Any]) -> bytes:
        return sse(self._head | {"choices": [], "usage": usage})

    def whole(self, choices: Sequence[ChoiceAnswer], usage: dict[str, Any]) -> bytes:
        shaped = [
            self._choice(index, choice.text, self._logprob_fields(choice.tokens), choice.finish)
            for index, choice in enumerate(choices)
        ]
        return _encoder.encode(self._head | {"choices": shaped, "usage": usage})

    def _chunk(self, index: int, text: str, logprobs: dict[str, Any] | None, finish: Finish | None) -> bytes:
        return sse(self._head | {"choices": [self._choice(index, text, logprobs, finish)]})

    def _choice(self, index: int, text: str, logprobs: dict[str, Any] | None, finish: Finish | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, **_finish_fields(finish)}

    def _logprob_fields(self, tokens: Sequence[ShownToken]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        return {
            "tokens": [self._names.token_text(shown.token.token_id) for shown in tokens],
            "token_logprobs": [max(shown.token.logprob, _LEAST_LOGPROB) for shown in tokens],
            "top_logprobs": [self._top(shown.token) for shown in tokens],
            "text_offset": [shown.text_offset for shown in tokens],
        }

    def _top(self, token: TokenLogprob) -> dict[str, float]:
        """The chosen token is always among them, as OpenAI has it."""
        ranked = (*token.top, (token.token_id, token.logprob))
        return {self._names.token_text(token_id): max(logprob, _LEAST_LOGPROB) for token_id, logprob in ranked}


def usage_fields(
    *,
    prompt_tokens: int,
    completion_tokens: int,
    cached_tokens: int | None,
    host_tokens: int = 0,
    storage_tokens: int = 0,
) -> dict[str, Any]:
    """OpenAI's `usage`; tokens that were loaded from the host or a store are told apart, in SGLang's words."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": None
        if cached_tokens is None
        else {"cached_tokens": cached_tokens, **cached_details(cached_tokens, host_tokens, storage_tokens)},
    }


def cached_details(cached_tokens: int, host_tokens: int, storage_tokens: int) -> dict[str, Any]:
    """Where cached tokens lay; nothing if all of them were on the device."""
    if not host_tokens and not storage_tokens:
        return {}
    details = {"device": cached_tokens - host_tokens - storage_tokens, "host": host_tokens}
    return {"cached_tokens_details": details | ({"storage": storage_tokens} if storage_tokens else {})}


def error_frame(error: BaseException) -> bytes:
    """The last frame of a stream that cannot be completed."""
    return sse({"error": error_object(error)})


def sse(value: Any) -> bytes:  # noqa: ANN401 - any JSON value
    return b"data: " + _encoder.encode(value) + b"\n\n"


def quoted(text: str) -> bytes:
    """What stands between the quotes of a JSON string."""
    return _encoder.encode(text)[1:-1]


def _around(frame: bytes, named: bytes) -> tuple[bytes, bytes]:
    """A frame of an empty text, cut in two where that is. No value can look like `named`: its quotes are escaped."""
    before, _, behind = frame.partition(named)
    return before + named, behind


def _head_fields(head: AnswerHead, answer_id: str) -> dict[str, Any]:
    return {
        "id": answer_id,
        "created": head.created_s,
        "model": head.model,
        "system_fingerprint": head.fingerprint,
    }


def _finish_fields(finish: Finish | None) -> dict[str, Any]:
    if finish is None:
        return {"finish_reason": None}
    return {"finish_reason": finish.reason.value, "stop_reason": finish.matched}
