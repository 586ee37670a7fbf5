"""The messages of a chat as a chat template wants them: plain JSON, contents as one text."""

from typing import Any

from kvherd.core.errors import BodyNotJson, FieldInvalid
from kvherd.wire.openai.body import json_name, parse_object
from kvherd.wire.openai.fields import Fields, object_item

MOST_MESSAGES = 10_000
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def read_messages(fields: Fields) -> tuple[dict[str, Any], ...]:
    """Raises `FieldInvalid` with a path such as `messages[2].content`."""
    messages = fields.sequence("messages", read_message, most=MOST_MESSAGES)
    if not messages:
        raise fields.invalid("messages", "must be a list with at least one message")
    return messages


def read_continuation(fields: Fields) -> bool:
    """`continue_final_message`, which cannot go with a new answer's beginning. Raises `FieldInvalid`."""
    wanted = fields.flag("continue_final_message")
    if wanted and fields.flag("add_generation_prompt", default=True):
        raise fields.invalid("continue_final_message", "needs add_generation_prompt to be false")
    return wanted


def has_parts(fields: Fields) -> bool:
    """Whether some message has its content as a list of parts."""
    messages = fields.get("messages")
    return isinstance(messages, list) and any(map(in_parts, messages))


def in_parts(message: object) -> bool:
    return isinstance(message, dict) and isinstance(message.get("content"), list)


def read_message(path: str, value: object) -> dict[str, Any]:
    """One of them, which is at `path`. Raises `FieldInvalid`."""
    message = object_item(path, value)
    fields = Fields(message, path)
    role = fields.required_text("role", f"is missing; one of {', '.join(ROLES)}")
    if role not in ROLES:
        raise fields.invalid("role", f"must be one of {', '.join(ROLES)}, not {role!r}")
    shaped = {name: each for name, each in message.items() if each is not None}
    shaped["content"] = _content(fields)
    if shaped.get("tool_calls"):
        shaped["tool_calls"] = list(fields.sequence("tool_calls", _tool_call, most=MOST_MESSAGES))
    return shaped


def _content(fields: Fields) -> str:
    content = fields.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        # one line break between parts, as vLLM does for templates that want text
        return "\n".join(fields.sequence("content", _part, most=MOST_MESSAGES))
    if content is not None:
        raise fields.invalid("content", f"must be a string or a list of parts, not {json_name(content)}")
    if fields.get("tool_calls") or fields.get("role") == "assistant":
        return ""
    raise fields.invalid("content", "is missing")


def _part(path: str, value: object) -> str:
    fields = Fields(object_item(path, value), path)
    kind = fields.required_text("type", 'is missing; "text" is what is taken here')
    if kind not in ("text", "refusal"):
        raise FieldInvalid(path, f"parts of type {kind!r} are not supported here; this model reads text only")
    text = fields.text(kind, None)
    if text is None:
        raise fields.invalid(kind, "is missing")
    return text


def _tool_call(path: str, value: object) -> dict[str, Any]:
    """Templates walk through the arguments, while OpenAI sends them as a JSON text."""
    call = dict(object_item(path, value))
    function = Fields(call, path).mapping("function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        call["function"] = {**function, "arguments": _arguments(f"{path}.function.arguments", arguments)}
    return call


def _arguments(path: str, text: str) -> dict[str, Any]:
    if not text.strip():
        return {}
    try:
        return parse_object(text.encode())
    except (BodyNotJson, FieldInvalid) as error:
        raise FieldInvalid(path, "must be a JSON object in a string") from error
