"""A model's chat template: messages → prompt, in a sandbox, with what Hugging Face templates expect."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from jinja2 import Environment, Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvherd.adapters.turn_template import turn_template
from kvherd.core.errors import FieldInvalid, ModelUnsupported
from kvherd.core.text.calls import ChatCall
from kvherd.core.text.turns import UNREAD, RenderedTurns, TurnUnreadError

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
        environment = _environment()
        self._template = _compiled(environment, source)
        self._globals = dict(self._template.globals)
        self.turns = turn_template(environment, source)

    def render(self, call: ChatCall) -> str:
        """Render the messages. Raises `FieldInvalid` with the template's own reason.

        Content that is a list of text parts is joined by line ends; content that is null is empty. Special tokens in a
        message stay as they are and are parsed as such, as in Transformers and vLLM.
        """
        variables = {**self._globals, **self._variables(call)}
        try:
            # Less than `Template.render` does: these names are nobody else's.
            context = self._template.new_context(variables, shared=True)
            text = "".join(self._template.root_render_func(context))
        except Exception as error:  # a template is a foreign program and may fail in any way
            raise _refused(error) from error
        return _left_open(text, str(call.messages[-1].get("content") or "")) if call.continue_final_message else text

    def render_turns(self, call: ChatCall, begin: int) -> RenderedTurns | None:
        """Render the turns of the messages from `begin` on; of those before all but the first and the last may be
        `UNREAD`. None if only `render` can tell. Raises as that does.
        """
        if self.turns is None or call.continue_final_message or begin >= len(call.messages):
            return None
        variables = self._variables(call)
        try:
            return self.turns.render(variables, len(call.messages) - begin)
        except TurnUnreadError:
            return None
        except Exception as error:  # as in `render`
            raise _refused(error) from error

    def _variables(self, call: ChatCall) -> dict[str, Any]:
        return {
            **self._special,
            **call.template_args,
            "messages": [_message(index, message) for index, message in enumerate(call.messages)],
            "tools": [dict(tool) for tool in call.tools] or None,
            "add_generation_prompt": call.add_generation_prompt,
        }


def _refused(error: Exception) -> FieldInvalid:
    return FieldInvalid("messages", f"the chat template of this model refuses them: {error}")


def _left_open(text: str, last: str) -> str:
    """Cut what the template puts behind the last message. Raises `FieldInvalid` if it is not there as it was given."""
    core = last.strip()
    begin = text.rfind(core)
    if not core or begin < 0:
        raise FieldInvalid("continue_final_message", "the chat template does not show the last message as it is")
    open_end = last.lstrip()
    return text[: begin + len(open_end if text.startswith(open_end, begin) else core)]


_OF_DICTS: Final = frozenset(dir(dict))
_OF_LOOPS: Final = frozenset({"first", "index", "index0", "last", "length"})


class _Sandbox(ImmutableSandboxedEnvironment):
    def getattr(self, obj: object, attribute: str) -> object:
        """As it is, but soon done with what templates look at all the time."""
        kind = type(obj)
        if kind is dict and attribute not in _OF_DICTS:
            return super().getitem(obj, attribute)
        if kind is LoopContext and attribute in _OF_LOOPS:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


def _environment() -> Environment:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    return environment


def _compiled(environment: Environment, source: str) -> Template:
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
    if message is UNREAD:
        return UNREAD
    content = message.get("content")
    if not isinstance(content, str) and isinstance(content, Sequence):
        content = "\n".join(_text(f"messages[{index}].content[{at}]", part) for at, part in enumerate(content))
    return {**message, "content": "" if content is None else content}


def _text(field: str, part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise FieldInvalid(field, 'this model reads text only; a part must be {"type": "text", "text": "…"}')
