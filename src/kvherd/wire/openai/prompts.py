"""What of a body becomes its prompt, for a gateway that predicts what another renders.

Unlike `requests.py` it reads nothing else: an option that kvherd's own engine refuses is the worker's to judge. But a
field that changes the prompt, or the part of the cache that it is looked up in, in a way that no gateway can repeat,
makes every prediction wrong: of such a body nothing is told.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from kvherd.core.text.calls import CallOptions, ChatCall
from kvherd.wire.openai.body import parse_object
from kvherd.wire.openai.fields import Fields, object_item
from kvherd.wire.openai.messages import has_parts, read_continuation, read_messages
from kvherd.wire.openai.requests import read_prompts

_CHANGING: Final[Mapping[str, tuple[Any, ...]]] = {
    # a template, or a text around the prompt, that only the engine applies
    "chat_template": (),
    "documents": ([],),
    "functions": ([],),
    "reasoning": (),
    "reasoning_effort": (),
    "suffix": ("",),
    "task": (),
    "thinking": (),
    # tokens that are cut off or put before
    "truncate_prompt_tokens": (),
    "session_params": ({},),
    # what is no text
    "image_data": ([],),
    "video_data": ([],),
    "audio_data": ([],),
    "input_embeds": ([],),
    "prompt_embeds": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    # a part of the cache that no event tells
    "extra_key": (),
    "lora_path": (),
    "lora_id": (),
}
"""Fields of vLLM and SGLang, by the values that change nothing; null never does."""


def decode_chat_prompt(body: bytes) -> ChatCall | None:
    """The call as far as it is rendered; None if the engine alone knows its prompt. Raises as `decode_chat` does."""
    fields = Fields(parse_object(body))
    frame = read_frame(fields)
    return None if frame is None else replace(frame, messages=read_messages(fields), parts=has_parts(fields))


def read_frame(fields: Fields) -> ChatCall | None:
    """The call but for its messages; None if the engine alone knows its prompt. Raises as `decode_chat` does."""
    choice, tools = fields.get("tool_choice"), fields.sequence("tools", object_item, most=1024)
    # Of tools that may not be called, or of which one must be, each engine shows the model others.
    if _changed(fields) or fields.get("input_ids") or fields.get("add_special_tokens"):
        return None
    if tools and choice not in (None, "auto", "required"):
        return None
    return ChatCall(
        options=CallOptions(model=""),
        messages=(),
        tools=tools,
        template_args=fields.mapping("chat_template_kwargs"),
        add_generation_prompt=fields.flag("add_generation_prompt", default=True),
        continue_final_message=read_continuation(fields),
    )


def decode_completion_prompts(body: bytes) -> tuple[str | tuple[int, ...], ...]:
    """Its prompts, none if the engine alone knows them. Raises as `decode_completion` does."""
    fields = Fields(parse_object(body))
    if _changed(fields) or fields.get("add_special_tokens") is False:
        return ()
    return read_prompts(fields)


def decode_generate_prompts(body: bytes) -> tuple[str | tuple[int, ...], ...]:
    """The same of SGLang's `/generate`."""
    fields = Fields(parse_object(body))
    if _changed(fields):
        return ()
    kind, given = (str, fields.get("text")) if fields.get("input_ids") is None else (tuple, fields.get("input_ids"))
    prompts = read_prompts(Fields({"prompt": given}))
    return prompts if all(isinstance(one, kind) for one in prompts) else ()


def _changed(fields: Fields) -> bool:
    values = ((fields.get(name), harmless) for name, harmless in _CHANGING.items())
    return any(value is not None and value not in harmless for value, harmless in values)
