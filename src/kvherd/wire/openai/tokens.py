"""vLLM's `/tokenize` and `/detokenize` bodies."""

from dataclasses import dataclass

from kvherd.core.errors import FieldInvalid
from kvherd.core.text.calls import CallOptions, ChatCall
from kvherd.wire.openai.body import parse_object
from kvherd.wire.openai.fields import Fields, object_item
from kvherd.wire.openai.messages import has_parts, read_continuation, read_messages

_MOST_TOKENS = 2**24


@dataclass(frozen=True, slots=True)
class TokenizeText:
    prompt: str
    add_special_tokens: bool


def decode_tokenize(body: bytes) -> ChatCall | TokenizeText:
    """A text or a chat to render first. Raises `BodyNotJson` or `FieldInvalid`."""
    fields = Fields(parse_object(body))
    prompt = fields.text("prompt", None)
    if prompt is not None:
        return TokenizeText(prompt, fields.flag("add_special_tokens", default=True))
    if fields.get("messages") is None:
        raise FieldInvalid("prompt", "is missing; give a prompt, or messages")
    return ChatCall(
        options=CallOptions(model=fields.text("model", "")),
        messages=read_messages(fields),
        tools=fields.sequence("tools", object_item, most=1024),
        template_args=fields.mapping("chat_template_kwargs"),
        add_generation_prompt=fields.flag("add_generation_prompt", default=True),
        continue_final_message=read_continuation(fields),
        parts=has_parts(fields),
    )


def decode_detokenize(body: bytes) -> list[int]:
    """Raises `BodyNotJson` or `FieldInvalid`."""
    fields = Fields(parse_object(body))
    if fields.get("tokens") is None:
        raise FieldInvalid("tokens", "is missing; give a list of token ids")
    return list(fields.tokens("tokens", most=_MOST_TOKENS))
