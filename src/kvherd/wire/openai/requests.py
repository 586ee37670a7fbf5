"""OpenAI request bodies → `core/text/calls`.

Strict about every field that is used, silent about fields nobody here knows, and plain about those that OpenAI and the
engines define but that cannot be honoured here: these are refused by name, never dropped.
"""

from kvherd.core.errors import FieldInvalid, Unsupported
from kvherd.core.text.calls import ChatCall, CompletionCall
from kvherd.wire.openai.body import json_name, parse_object
from kvherd.wire.openai.fields import Fields, object_item, text_item, token_items
from kvherd.wire.openai.messages import has_parts, read_continuation, read_messages
from kvherd.wire.openai.options import MOST_TOP_LOGPROBS, read_options

MOST_PROMPTS = 128
_MOST_TOKENS = 2**24


def decode_chat(body: bytes) -> ChatCall:
    """Raises `BodyNotJson`, `FieldInvalid` or `Unsupported`."""
    fields = Fields(parse_object(body))
    choice = fields.get("tool_choice")
    if choice not in (None, "none", "auto"):
        raise Unsupported(f"tool_choice {choice}" if isinstance(choice, str) else "tool_choice of one function")
    tools = fields.sequence("tools", object_item, most=1024)
    return ChatCall(
        options=read_options(fields, logprobs=_chat_logprobs(fields)),
        messages=read_messages(fields),
        tools=() if choice == "none" else tools,
        template_args=fields.mapping("chat_template_kwargs"),
        add_generation_prompt=fields.flag("add_generation_prompt", default=True),
        continue_final_message=read_continuation(fields),
        parts=has_parts(fields),
    )


def decode_completion(body: bytes) -> CompletionCall:
    """Raises `BodyNotJson`, `FieldInvalid` or `Unsupported`."""
    fields = Fields(parse_object(body))
    logprobs = fields.integer("logprobs", None, low=0, high=MOST_TOP_LOGPROBS)
    echo = fields.flag("echo")
    if echo and logprobs is not None:
        raise Unsupported("echo with logprobs, which asks for logprobs of the prompt,")
    return CompletionCall(options=read_options(fields, logprobs=logprobs), prompts=read_prompts(fields), echo=echo)


def _chat_logprobs(fields: Fields) -> int | None:
    wanted = fields.flag("logprobs")
    top = fields.integer("top_logprobs", None, low=0, high=MOST_TOP_LOGPROBS)
    if top is not None and not wanted:
        raise fields.invalid("top_logprobs", "needs logprobs to be true")
    return (top or 0) if wanted else None


def read_prompts(fields: Fields) -> tuple[str | tuple[int, ...], ...]:
    prompt = fields.get("prompt")
    if isinstance(prompt, str) and prompt:
        return (prompt,)
    if not isinstance(prompt, list) or not prompt:
        what = "is missing" if prompt in (None, "", []) else f"must not be {json_name(prompt)}"
        raise fields.invalid("prompt", f"{what}; give a text, a list of texts, token ids, or a list of those")
    if isinstance(prompt[0], int):
        return (fields.tokens("prompt", most=_MOST_TOKENS),)
    return fields.sequence("prompt", _prompt, most=MOST_PROMPTS)


def _prompt(path: str, value: object) -> str | tuple[int, ...]:
    if isinstance(value, list) and value:
        return token_items(path, value)
    if isinstance(value, str):
        return text_item(path, value)
    raise FieldInvalid(path, f"must be a text or a list of token ids, not {json_name(value)}")
