"""A model's chat template: messages → prompt, in a sandbox, with what Hugging Face templates expect."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvherd.core.errors import FieldInvalid, ModelUnsupported
from kvherd.core.text.calls import ChatCall

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


class ChatTemplate:
    """One compiled template. Pure and safe in threads."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        """`special` gives templates `bos_token`, `eos_token` and their like. Raises `ModelUnsupported`."""
        self.source = source
        self._special = dict(special)
        self._template = _compiled(source)

    def render(self, call: ChatCall) -> str:
        """Render the messages. Raises `FieldInvalid` with the template's own reason.

        Content that is a list of text parts is joined by line ends; content that is null is empty. Special tokens in a
        message stay as they are and are parsed as such, as in Transformers and vLLM.
        """
        variables = {
            **self._special,
            **call.template_args,
            "messages": [_message(index, message) for index, message in enumerate(call.messages)],
            "tools": [dict(tool) for tool in call.tools] or None,
            "add_generation_prompt": call.add_generation_prompt,
        }
        try:
            text = self._template.render(variables)
        except Exception as error:  # a template is a foreign program and may fail in any way
            raise FieldInvalid("messages", f"the chat template of this model refuses them: {error}") from error
        return _left_open(text, str(call.messages[-1].get("content") or "")) if call.continue_final_message else text


def _left_open(text: str, last: str) -> str:
    """Cut what the template puts behind the last message. Raises `FieldInvalid` if it is not there as it was given."""
    core = last.strip()
    begin = text.rfind(core)
    if not core or begin < 0:
        raise FieldInvalid("continue_final_message", "the chat template does not show the last message as it is")
    open_end = last.lstrip()
    return text[: begin + len(open_end if text.startswith(open_end, begin) else core)]


def _compiled(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ModelUnsupported("its chat template", str(error)) from error


def _refuse(reason: str) -> str:
    raise TemplateError(reason)


def _to_json(value: object, indent: int | None = None) -> str:
    """Plain JSON: jinja2's own filter escapes characters for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = "\n".join(_text(f"messages[{index}].content[{at}]", part) for at, part in enumerate(content))
    return {**message, "content": "" if content is None else content}


def _text(field: str, part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise FieldInvalid(field, 'this model reads text only; a part must be {"type": "text", "text": "…"}')
