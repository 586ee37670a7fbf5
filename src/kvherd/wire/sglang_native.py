"""SGLang's own `POST /generate`: body → call, and its answers.

A body has one prompt or a list of them; the answer is one object or a list. In a stream each event repeats the whole
text of its prompt so far; with several, `index` says whose it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvherd.core.engine.generation import Finish, FinishReason
from kvherd.core.errors import FieldInvalid, Unsupported
from kvherd.core.text.calls import CallOptions, CompletionCall, NativeCall
from kvherd.core.text.choice import ShownToken, TextDelta
from kvherd.wire.openai.answers import cached_details
from kvherd.wire.openai.body import parse_object
from kvherd.wire.openai.fields import Fields
from kvherd.wire.openai.options import (
    MOST_CHOICES,
    MOST_TOKENS,
    MOST_TOP_LOGPROBS,
    read_limits,
    read_rank,
    read_sampling,
)
from kvherd.wire.openai.requests import read_prompts

DEFAULT_NEW_TOKENS = 128
_REFUSED = ("image_data", "video_data", "audio_data", "input_embeds", "lora_path", "custom_logit_processor")
_REFUSED_SAMPLING = ("regex", "json_schema", "ebnf", "structural_tag")


@dataclass(slots=True)
class NativeAnswer:
    """One answer in the making. `prompt_tokens` and the other counts are of the moment."""

    request: str
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    tokens: list[ShownToken] = field(default_factory=list)
    finish: Finish | None = None

    def add(self, delta: TextDelta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.tokens += delta.tokens
        self.finish = delta.finish

    def fields(
        self,
        *,
        prompt_tokens: int,
        completion_tokens: int,
        cached_tokens: int,
        logprobs: bool,
        host_tokens: int = 0,
        storage_tokens: int = 0,
    ) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": self.request,
            "finish_reason": _finish_fields(self.finish, completion_tokens),
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "cached_tokens": cached_tokens,
            **cached_details(cached_tokens, host_tokens, storage_tokens),
        }
        if logprobs:
            shown = [each.token for each in self.tokens]
            meta["output_token_logprobs"] = [[token.logprob, token.token_id, None] for token in shown]
            meta["output_top_logprobs"] = [[[value, top, None] for top, value in token.top] for token in shown]
        return {"text": self.text, "output_ids": self.token_ids, "meta_info": meta}


def decode_generate(body: bytes) -> NativeCall:
    """Raises `BodyNotJson`, `FieldInvalid` or `Unsupported`."""
    fields = Fields(parse_object(body))
    _refuse(fields, _REFUSED)
    if fields.flag("return_hidden_states"):
        raise Unsupported("return_hidden_states")
    if fields.integer("logprob_start_len", -1, low=-1, high=MOST_TOKENS) != -1:
        raise Unsupported("logprob_start_len, which asks for logprobs of the prompt,")
    name, given = _prompt_field(fields)
    sampling = Fields(fields.mapping("sampling_params"), "sampling_params")
    _refuse(sampling, _REFUSED_SAMPLING)
    top = fields.integer("top_logprobs_num", 0, low=0, high=MOST_TOP_LOGPROBS)
    max_new_tokens = sampling.integer("max_new_tokens", DEFAULT_NEW_TOKENS, low=1, high=MOST_TOKENS)
    options = CallOptions(
        model=fields.text("model", ""),
        sampling=read_sampling(sampling, logprobs=top if fields.flag("return_logprob") else None, seed="sampling_seed"),
        max_new_tokens=max_new_tokens,
        limits=read_limits(sampling, max_new_tokens, least="min_new_tokens"),
        n=sampling.integer("n", 1, low=1, high=MOST_CHOICES),
        stream=fields.flag("stream"),
        skip_special_tokens=sampling.flag("skip_special_tokens", default=True),
        rank=read_rank(fields),
    )
    try:
        prompts = read_prompts(Fields({"prompt": given}))
    except FieldInvalid as error:
        raise FieldInvalid(error.field.replace("prompt", name, 1), error.problem) from None
    listed = isinstance(given, list) and (name == "text" or isinstance(given[0], list))
    return NativeCall(CompletionCall(options, prompts), listed=listed or options.n > 1)


def encode_answers(answers: Sequence[Any], *, listed: bool) -> bytes:
    return msgspec.json.encode(list(answers) if listed else answers[0])


def _prompt_field(fields: Fields) -> tuple[str, object]:
    text, token_ids = fields.get("text"), fields.get("input_ids")
    if (text is None) == (token_ids is None):
        raise FieldInvalid("text", "give either text or input_ids")
    return ("text", text) if text is not None else ("input_ids", token_ids)


def _refuse(fields: Fields, names: Sequence[str]) -> None:
    for name in names:
        if fields.get(name) not in (None, "", []):
            raise Unsupported(fields.at(name))


def _finish_fields(finish: Finish | None, completion_tokens: int) -> dict[str, Any] | None:
    if finish is None:
        return None
    match finish.reason:
        case FinishReason.STOP:
            return {"type": "stop", "matched": finish.matched}
        case FinishReason.LENGTH:
            return {"type": "length", "length": completion_tokens}
        case FinishReason.ABORT:
            return {"type": "abort", "message": finish.message}
