"""Kinds of prompts that engines may render or tokenize in ways of their own, and a probe or two of each.

A gateway predicts cached tokens from tokens it made itself. Where a worker makes others of one kind of prompt, the
prediction is about another prompt, and worth nothing for that kind.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from kvherd.core.text.calls import ChatCall, CompletionCall


class PromptClass(StrEnum):
    """What engines may render in a way of their own; a prompt may be of several classes."""

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


def classify(call: ChatCall | CompletionCall, special_tokens: Collection[str]) -> tuple[PromptClass, ...]:
    """Every class that the prompt is of, the one that is most likely to be to blame for a difference last."""
    if isinstance(call, CompletionCall):
        return (PromptClass.TEXT,)
    return classes_of(call, said_by(call.messages, special_tokens))


def said_by(messages: Sequence[Mapping[str, Any]], special_tokens: Collection[str]) -> frozenset[PromptClass]:
    """Classes that a prompt is of as soon as one of these messages is in it."""
    said = "\0".join([str(one.get("content")) for one in messages])  # looked through at once: no token has a NUL
    special = any(token in said for token in special_tokens)
    tools = any(map(_of_tools, messages))
    return frozenset([PromptClass.SPECIAL] * special + [PromptClass.TOOLS] * tools)


def classes_of(call: ChatCall, said: Collection[PromptClass]) -> tuple[PromptClass, ...]:
    """As `classify`, of a chat of which nothing is read but the first message and the last: `said` is by all."""
    messages = call.messages
    open_end = call.continue_final_message
    shown = {
        PromptClass.TURNS: len(messages) > 1 or messages[0].get("role") != "user",
        PromptClass.PARTS: call.parts,
        PromptClass.SPECIAL: PromptClass.SPECIAL in said,
        PromptClass.TEMPLATE_ARGS: bool(call.template_args),
        PromptClass.PREFILL: messages[-1].get("role") == "assistant" or open_end,
        PromptClass.TOOLS: bool(call.tools) or PromptClass.TOOLS in said,
        PromptClass.AMBIGUOUS: bool(_OWN_FIELDS & set(call.template_args))
        or not (call.add_generation_prompt or open_end),
    }
    return (PromptClass.CHAT, *(each for each, is_shown in shown.items() if is_shown))


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
