"""Kinds of prompts that engines may render or tokenize in ways of their own, and a probe or two of each.

A gateway predicts cached tokens from tokens it made itself. Where a worker makes others of one kind of prompt, the
prediction is about another prompt, and worth nothing for that kind.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import compress
from typing import Any, Final

from kvherd.core.text.calls import ChatCall, CompletionCall


class PromptClass(StrEnum):
    """What engines may render in a way of their own; a prompt may be of several classes."""

    __hash__ = str.__hash__  # an enum's own is a call of Python for every look-up

    TEXT = "text"  # a completion's text
    CHAT = "chat"  # messages, however few
    TURNS = "turns"  # a system message, or several turns
    PARTS = "parts"  # a content that is a list of parts
    SPECIAL = "special tokens"  # a special token in a message
    TEMPLATE_ARGS = "template arguments"
    PREFILL = "prefilled answer"  # the last message is the assistant's
    TOOLS = "tools"  # tools, or calls of them
    AMBIGUOUS = "ambiguous fields"  # no beginning of an answer, or template arguments that are named like fields


MUST_AGREE: Final = frozenset({PromptClass.PREFILL, PromptClass.AMBIGUOUS})
"""Classes of which engines are known to differ: not believed of a worker that tokenizes until it is seen to agree.

Of the ambiguous there is no probe: SGLang's `/tokenize` honours fields that its chat does not know.
"""


_OWN_FIELDS: Final = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"}
)
"""Template arguments that some engines take for the request's own fields."""


_OF_CHATS: Final = (
    PromptClass.CHAT,
    PromptClass.TURNS,
    PromptClass.PARTS,
    PromptClass.SPECIAL,
    PromptClass.TEMPLATE_ARGS,
    PromptClass.PREFILL,
    PromptClass.TOOLS,
    PromptClass.AMBIGUOUS,
)
_SAYING_NOTHING: Final[frozenset[PromptClass]] = frozenset()
_SAYING_SPECIAL: Final = frozenset({PromptClass.SPECIAL})
_SAYING_TOOLS: Final = frozenset({PromptClass.TOOLS})
_SAYING_BOTH: Final = _SAYING_SPECIAL | _SAYING_TOOLS


def classify(call: ChatCall | CompletionCall, special_tokens: Collection[str]) -> tuple[PromptClass, ...]:
    """Every class that the prompt is of, the one that is most likely to be to blame for a difference last."""
    if isinstance(call, CompletionCall):
        return (PromptClass.TEXT,)
    return classes_of(call, said_by(call.messages, lambda said: any(token in said for token in special_tokens)))


def said_by(messages: Sequence[Mapping[str, Any]], special_in: Callable[[str], object]) -> frozenset[PromptClass]:
    """Classes that a prompt is of as soon as one of these messages is in it. `special_in` says whether a special token
    is in a text; none has a NUL.
    """
    special = special_in("\0".join([str(one.get("content")) for one in messages]))
    for one in messages:
        if _of_tools(one):
            return _SAYING_BOTH if special else _SAYING_TOOLS
    return _SAYING_SPECIAL if special else _SAYING_NOTHING


def classes_of(call: ChatCall, said: Collection[PromptClass]) -> tuple[PromptClass, ...]:
    """As `classify`, of a chat of which nothing is read but the first message and the last: `said` is by all."""
    messages = call.messages
    open_end = call.continue_final_message
    shown = (
        True,
        len(messages) > 1 or messages[0].get("role") != "user",
        call.parts,
        PromptClass.SPECIAL in said,
        call.template_args,
        messages[-1].get("role") == "assistant" or open_end,
        call.tools or PromptClass.TOOLS in said,
        not (call.add_generation_prompt or open_end) or not _OWN_FIELDS.isdisjoint(call.template_args),
    )
    return tuple(compress(_OF_CHATS, shown))


def _of_tools(message: Mapping[str, Any]) -> bool:
    return bool(message.get("tool_calls")) or message.get("role") in ("tool", "function")


class Agreement(StrEnum):
    AGREES = "agrees"
    DIFFERS = "differs"
    UNKNOWN = "unknown"  # it was not asked, or cannot say


@dataclass(frozen=True, slots=True)
class Finding:
    """Whether a worker makes the same tokens of a class of prompts.

    `why` says in words what differs, or why that is unknown; never anything of a user's prompt.
    """

    agreement: Agreement
    why: str = ""


UNASKED: Final = Finding(Agreement.UNKNOWN, "not asked yet")

_ASKED: Final = {"role": "user", "content": "Which river runs through Köln?  Answer in 1 word, please…"}
_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "find_river",
        "description": "Find the river of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
_TURNS: Final = [
    {"role": "system", "content": "You know rivers.\n"},
    _ASKED,
    {"role": "assistant", "content": "The Rhine. "},
    {"role": "user", "content": "\tAnd through 東京?"},
]


def probes(special_tokens: Collection[str]) -> Mapping[PromptClass, Mapping[str, Any]]:
    """One request body for each class that can be asked about, less the model's name; with what usually goes wrong:
    spaces, accents, turns.
    """
    bodies: dict[PromptClass, Mapping[str, Any]] = {
        PromptClass.TEXT: {"prompt": "  Rivers of Köln, 東京 and São Paulo:\n1. "},
        PromptClass.CHAT: {"messages": [_ASKED]},
        PromptClass.TURNS: {"messages": _TURNS},
        PromptClass.PARTS: {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Köln:"}, {"type": "text", "text": "a river?"}]}
            ]
        },
        PromptClass.TEMPLATE_ARGS: {"messages": [_ASKED], "chat_template_kwargs": {"enable_thinking": False}},
        PromptClass.PREFILL: {
            "messages": [_ASKED, {"role": "assistant", "content": "The"}],
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
        PromptClass.TOOLS: {"messages": [_ASKED], "tools": [_TOOL]},
    }
    if special_tokens:
        token = min(special_tokens)
        bodies[PromptClass.SPECIAL] = {"messages": [{"role": "user", "content": f"What does {token} mean?"}]}
    return bodies


def first_difference(ours: list[int], theirs: list[int]) -> int | None:
    """The position of the first token that differs, None if they are equal."""
    if ours == theirs:
        return None
    pairs = zip(ours, theirs, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(ours), len(theirs)))
