"""Turns of messages that are a role and a text: where a template only shows the text (`Tokenizer.only_shown`), what
stands around it is rendered once for each role, and not again for each message.
"""

import re
from array import array
from collections.abc import Iterable, Sequence
from secrets import token_hex
from typing import Any, Final, NamedTuple

from kvherd.core.text.calls import ChatCall
from kvherd.core.text.parity import PromptClass
from kvherd.ports.completions import Tokenizer
from kvherd.services.gateway.reading.encodings import EncodingCache

_BLANK: Final = "\x1f"
"""Counts as white space when a text is stripped, and stands in no template."""


class PlainTurn(NamedTuple):
    """Around the text of a message of one role, which may be `stripped`; `ending` stands behind the last turn."""

    before: str
    after: str
    ending: str
    stripped: bool

    def shown(self, content: str) -> str:
        return self.before + (content.strip() if self.stripped else content) + self.after


def is_plain(message: dict[str, Any]) -> bool:
    """A role and a text that is not blank, and nothing else."""
    content = message.get("content")
    return isinstance(content, str) and len(message) == 2 and not (not content or content.isspace())


def plain_turn(tokenizer: Tokenizer, call: ChatCall) -> PlainTurn | None:
    """Of the last message of a call, which is plain and is not shown by what stands before all turns, nor in the first
    of them; None if it cannot be told. `call` may have messages that are `UNREAD`.
    """
    last, name = call.messages[-1], token_hex(16)
    marked = ChatCall(
        options=call.options,
        messages=(*call.messages[:-1], {**last, "content": f"{_BLANK}{name}{_BLANK}"}),
        tools=call.tools,
        template_args=call.template_args,
        add_generation_prompt=call.add_generation_prompt,
        parts=call.parts,
    )
    rendered = tokenizer.render_turns(marked, len(call.messages) - 1)
    if rendered is None or len(rendered.turns) != 1:
        return None
    whole = rendered.turns[0]
    stripped = _BLANK not in whole
    parts = whole.split(name if stripped else f"{_BLANK}{name}{_BLANK}")
    if len(parts) != 2 or name in rendered.ending or name in parts[0] + parts[1] or _BLANK in parts[0] + parts[1]:
        return None
    return PlainTurn(parts[0], parts[1], rendered.ending, stripped)


class LastAsked:
    """All that a prompt is made of but the text of its last message, which is plain: `tokens` of what stands before the
    last cut in front of it, `lead` between that cut and the text, and `behind` the text, from a cut on. Cuts are right
    for any text without one of `firsts`, where special tokens begin; None: of no text that can be said in advance.
    """

    __slots__ = (
        "_after_chars",
        "_begins",
        "_behind",
        "_behind_ids",
        "_behind_starts",
        "_firsts",
        "_lead",
        "_stripped",
        "_tokens",
        "classes",
    )

    def __init__(
        self,
        *,
        lead: str,
        begins: bool,
        behind: str,
        behind_ids: Sequence[int],
        behind_starts: list[int],
        firsts: list[str] | None,
        after_chars: int,
        stripped: bool,
        classes: tuple[PromptClass, ...],
        tokens: "array[int]",
    ) -> None:
        self._lead = lead
        self._begins = begins
        self._behind = behind
        self._behind_ids = list(behind_ids)
        self._behind_starts = behind_starts
        self._firsts = firsts
        self._after_chars = after_chars
        self._stripped = stripped
        self.classes = classes
        self._tokens = tokens

    def token_ids(self, content: str, tokenizer: Tokenizer, encodings: EncodingCache) -> "array[int] | None":
        """The tokens of a prompt that ends with this text; None if that has to be looked at closely."""
        if not content or content.isspace():
            return None
        begun = self._lead + (content.strip() if self._stripped else content)
        text = begun + self._behind
        if not self._plainly_cut(content):
            special = encodings.special(tokenizer)
            if special.search(content) is not None or starts_in(special, text) != self.starts(len(begun)):
                return None
        tokenizer.check_length(text, after_chars=self._after_chars)
        encoded = encodings.encode_segment(tokenizer, begun)
        return None if encoded is None else self._tokens + array("I", encoded + self._behind_ids)

    def _plainly_cut(self, content: str) -> bool:
        """Whether no special token can begin in it, nor in front of it and end there."""
        if self._firsts is None:
            return False
        return all(first not in content for first in self._firsts)

    def starts(self, length: int) -> list[int]:
        """Where special tokens have to begin for its cuts to be right."""
        behind = [length + start for start in self._behind_starts]
        return [0, *behind] if self._begins else behind


def starts_in(special: re.Pattern[str], text: str) -> list[int]:
    return [found.start() for found in special.finditer(text)]


def last_asked(
    tokenizer: Tokenizer,
    encodings: EncodingCache,
    turn: PlainTurn,
    *,
    tokens: "array[int]",
    chars: int,
    open_end: str,
    classes: tuple[PromptClass, ...],
) -> LastAsked | None:
    """Behind a text of which `tokens` are known, up to a cut after `chars`, and `open_end` behind that; None if cuts
    there depend on what the message says.
    """
    special = encodings.special(tokenizer)
    before, behind = open_end + turn.before, turn.after + turn.ending
    cut = encodings.last_cut(tokenizer, before)
    lead, behind_starts = before[cut:], starts_in(special, behind)
    lead_starts = starts_in(special, lead)
    if lead_starts not in ([], [0]) or behind_starts[:1] != [0]:
        return None
    led, behind_ids = encodings.encode_more(tokenizer, before[:cut]), encodings.encode_more(tokenizer, behind)
    if led is None or behind_ids is None:
        return None
    return LastAsked(
        lead=lead,
        begins=bool(lead_starts),
        behind=behind,
        behind_ids=behind_ids,
        behind_starts=behind_starts,
        firsts=_firsts(tokenizer.special_tokens, lead),
        after_chars=chars + cut,
        stripped=turn.stripped,
        classes=classes,
        tokens=tokens + array("I", led),
    )


def _firsts(special_tokens: Iterable[str], lead: str) -> list[str] | None:
    """The characters that special tokens begin with; None if what stands at the end of `lead` may become one."""
    for token in special_tokens:
        if any(lead.endswith(token[:length]) for length in range(1, len(token))):
            return None
    return sorted({token[0] for token in special_tokens if token})
