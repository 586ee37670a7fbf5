"""Conversations that grow: what was made of the first messages of a chat is not made again for the next turn of it.

    messages as they came   system │ user │ assistant │ user          looked up byte by byte, the longest that is known
    their text              opening · turn · turn · turn  …  ending    rendered from the first unknown one on
    its tokens              ─────────────────┤ cut before a special token      encoded from the last cut on
    the names of its blocks ───────────────┤ full blocks                       named from the last full one on

What comes out is what rendering and encoding the whole would give: a text that a later message could still change is
not remembered (`Tokenizer.turns_ahead`), tokens only up to a cut that stays one however the text goes on.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, TypeAlias

from kvherd.core.ids import PrefixHash
from kvherd.core.kv.hashing import TOKEN_BYTES, PrefixHasher, token_bytes
from kvherd.core.text.calls import ChatCall
from kvherd.core.text.parity import PromptClass, classes_of, said_by
from kvherd.core.text.turns import UNREAD, RenderedTurns
from kvherd.ports.completions import Tokenizer
from kvherd.services.gateway.reading.encodings import EncodingCache
from kvherd.services.gateway.reading.frames import FRAMES_BYTES, LOOK, Frames
from kvherd.services.gateway.reading.plain_turns import LastAsked, PlainTurn, is_plain, last_asked, plain_turn
from kvherd.wire.openai.conversation import decode_messages, message_starts, split_messages
from kvherd.wire.openai.plain_messages import PlainMessage, last_message
from kvherd.wire.openai.routing import Peek, with_messages

LIMIT_BYTES: Final = 64 * 1024 * 1024
_OWN_BYTES: Final = 1024
_BLOCK_BYTES: Final = 4
"""What a beginning costs beside what it holds, and the name of a block for each of its tokens."""
_TAIL: Final = 32
_NAMESPACES: Final = 4


@dataclass(slots=True, eq=False)
class Beginning:
    """The first `count` messages of a chat, `prefix` in their body as far as the next. `read` has those of them that a
    template may look at again.

    `tokens` are those of its text up to a cut, `chars` characters of it, and `open_end` is the text behind, as far as
    it is known for good: that of `turns` messages, of which the opening took the first `taken`. What `plain` has, by
    role, is of all that begin alike: None for a role of which nothing is known in advance.
    """

    count: int = 0
    prefix: bytes = b""
    read: tuple[dict[str, Any], ...] = ()
    classes: frozenset[PromptClass] = frozenset()
    opening: str = ""
    turns: int = 0
    taken: int = 0
    tokens: "array[int]" = field(default_factory=lambda: array("I"))
    chars: int = 0
    open_end: str = ""
    chains: dict[tuple[str, str | None, int, str | None], list[PrefixHash]] = field(default_factory=dict)
    plain: dict[str, PlainTurn | None] = field(default_factory=dict)
    asked: dict[str, LastAsked | None] = field(default_factory=dict)
    """By the role of the message behind it."""

    def chain(
        self, hasher: PrefixHasher, model: str, block_size: int, *, lora: str | None, salt: str | None
    ) -> list[PrefixHash]:
        """Name the full blocks of `tokens`."""
        key = model, lora, block_size, salt
        names = self.chains.get(key)
        if names is None or len(names) < len(self.tokens) // block_size:
            known = names or []
            before = known[-1] if known else hasher.root(model=model, block_size=block_size, lora=lora, salt=salt)
            more = hasher.extend(before, token_bytes(self.tokens[len(known) * block_size :]), block_size * TOKEN_BYTES)
            names = known + more
            if len(self.chains) >= _NAMESPACES:
                self.chains.clear()
            self.chains[key] = names
        return names

    @property
    def size_bytes(self) -> int:
        text = len(self.open_end) + len(self.opening)
        return len(self.prefix) + (TOKEN_BYTES + _BLOCK_BYTES) * len(self.tokens) + 2 * text + _OWN_BYTES


class Told(NamedTuple):
    """A chat's prompt. Its tokens begin with those of `beginning`."""

    token_ids: "array[int]"
    classes: tuple[PromptClass, ...]
    beginning: Beginning


class Recalled:
    """A chat that is known but for the text of its last message. `name`: of its tokenizer and frame; in `key`, too."""

    __slots__ = ("beginning", "key", "last", "name")

    def __init__(self, name: tuple[int, int], key: "_Key", beginning: Beginning, last: PlainMessage) -> None:
        self.name = name
        self.key = key
        self.beginning = beginning
        self.last = last


_Key: TypeAlias = tuple[int, int, int, bytes]
"""Tokenizer, frame, bytes before the next message, the last of them: whoever has the same is compared in full."""


def _key(name: tuple[int, int], at: int, messages: bytes) -> _Key:
    begin = at - _TAIL if at > _TAIL else 0
    return (*name, at, messages[begin:at])


class Conversations:
    """Remembers beginnings, the latest used, `limit_bytes` of them altogether. One hasher names their blocks."""

    def __init__(
        self, encodings: EncodingCache, *, limit_bytes: int = LIMIT_BYTES, frames_bytes: int = FRAMES_BYTES
    ) -> None:
        self._encodings = encodings
        self._limit = limit_bytes
        self._bytes = 0
        self._known: OrderedDict[_Key, Beginning] = OrderedDict()
        self._frames = Frames(frames_bytes)

    def recall(self, body: bytes) -> tuple[Peek, Recalled] | None:
        """What `peek` tells of a body, and what `read` is to have of it, without reading what was read before: around
        its messages, and all of these but the last, stands what stood there in a body that was read as a whole. None if
        that cannot be told.
        """
        known = self._frames.around(body)
        if known is None:
            return None
        around, messages = known
        found = self._found(around.name, messages)
        return None if found is None else (with_messages(around.peeked, messages), found)

    def read(self, body: bytes, messages: bytes, tokenizer: Tokenizer, recalled: Recalled | None = None) -> Told | None:
        """The prompt of a chat, whose body has `messages`; None if the whole has to be rendered, or a thread to encode.

        Raises a `CallerError` where rendering the whole would.
        """
        if recalled is not None and recalled.name[0] == id(tokenizer):
            told = self._told_at_once(recalled, tokenizer)
            if told is not None:
                return told
        ahead = tokenizer.turns_ahead
        frame = None if ahead is None else self._frames.of(body, messages)
        if ahead is None or frame is None:
            return None
        name = id(tokenizer), frame.number
        found = self._found(name, messages)
        told = None if found is None else self._told_at_once(found, tokenizer)
        if told is not None:
            self._frames.note(name, body, messages)
            return told
        return self._read_from(name, ahead, frame.call, messages, tokenizer)

    def _read_from(
        self, name: tuple[int, int], ahead: int, frame: ChatCall, messages: bytes, tokenizer: Tokenizer
    ) -> Told | None:
        """`read`, from the longest beginning on that is known."""
        raw = split_messages(messages)
        if not raw:
            return None
        begins = message_starts(raw, messages)
        known = self._longest(name, begins, messages)
        fresh = decode_messages(raw, begin=known.count)
        call = _call(frame, known, fresh)
        rendered = _rendered(tokenizer, call, known)
        first = len(raw) - len(rendered.turns) if rendered is not None else 0
        if rendered is None or (known.count and (known.opening, known.turns) != (rendered.opening, first)):
            return None
        if not known.count:
            known = Beginning(opening=rendered.opening, turns=first, taken=first, open_end=rendered.opening)
        special_in = self._encodings.special(tokenizer).search
        kept = known.classes if len(fresh) == 1 else known.classes | _said(fresh[:-1], special_in)
        classes = classes_of(call, kept | _said(fresh[-1:], special_in))
        turns = len(raw) - 1 - ahead
        if turns > known.turns:
            more = self._more(tokenizer, known, rendered.turns[known.turns - first : turns - first])
            if more is None:
                return None
            known = replace(
                more,
                count=len(raw) - 1,
                prefix=messages[: begins[-1]],
                read=_still_read(call, turns),
                classes=kept,
                turns=turns,
                asked={},
            )
            self._remember(name, known)
        rest = known.open_end + "".join(rendered.turns[known.turns - first :]) + rendered.ending
        tokenizer.check_length(rest, after_chars=known.chars)
        encoded = self._encodings.encode_more(tokenizer, rest)
        if encoded is None:
            return None
        told = Told(known.tokens + array("I", encoded), classes, known)
        if len(fresh) == 1:
            self._expect(tokenizer, call, told)
        return told

    def _found(self, name: tuple[int, int], messages: bytes) -> Recalled | None:
        """Where nothing but the text of the last message is new, and one like it was read before."""
        begin = messages.find(b"{")
        if begin < 0:
            return None
        at = messages.rfind(messages[begin : begin + LOOK])
        key = _key(name, at, messages)
        known = self._known.get(key)
        if known is None or not known.asked or not messages.startswith(known.prefix):
            return None
        last = last_message(messages[at:])
        return None if last is None else Recalled(name, key, known, last)

    def _told_at_once(self, found: Recalled, tokenizer: Tokenizer) -> Told | None:
        asked = found.beginning.asked.get(found.last.role)
        token_ids = None if asked is None else asked.token_ids(found.last.content, tokenizer, self._encodings)
        if asked is None or token_ids is None:
            return None
        if found.key in self._known:
            self._known.move_to_end(found.key)
        return Told(token_ids, asked.classes, found.beginning)

    def _expect(self, tokenizer: Tokenizer, call: ChatCall, told: Told) -> None:
        """The beginning of this call may be asked something else again."""
        known, last = told.beginning, call.messages[-1]
        behind_first = known.turns == known.count > known.taken
        if not behind_first or not tokenizer.only_shown or not is_plain(last) or last["role"] in known.asked:
            return
        turn = _plain_turn(tokenizer, call, known)
        asked = None
        if turn is not None and PromptClass.SPECIAL not in told.classes:
            asked = last_asked(
                tokenizer,
                self._encodings,
                turn,
                tokens=known.tokens,
                chars=known.chars,
                open_end=known.open_end,
                classes=told.classes,
            )
        known.asked[last["role"]] = asked

    def _longest(self, name: tuple[int, int], begins: list[int], messages: bytes) -> Beginning:
        """The longest known beginning that leaves a message to be read; one of nothing if there is none."""
        for count in range(len(begins) - 1, 0, -1):
            at = begins[count]
            key = _key(name, at, messages)
            known = self._known.get(key)
            if known is not None and messages.startswith(known.prefix):
                self._known.move_to_end(key)
                return known
        return Beginning()

    def _more(self, tokenizer: Tokenizer, known: Beginning, turns: Sequence[str]) -> Beginning | None:
        """The same with more of its text; None if encoding that takes a thread."""
        text = known.open_end + "".join(turns)
        cut = self._encodings.last_cut(tokenizer, text)
        encoded = self._encodings.encode_more(tokenizer, text[:cut])
        if encoded is None:
            return None
        tokens, chains = known.tokens + array("I", encoded), dict(known.chains)
        return replace(known, tokens=tokens, chars=known.chars + cut, open_end=text[cut:], chains=chains)

    def _remember(self, name: tuple[int, int], known: Beginning) -> None:
        key = _key(name, len(known.prefix), known.prefix)
        before = self._known.pop(key, None)
        self._bytes += known.size_bytes - (before.size_bytes if before is not None else 0)
        self._known[key] = known
        while self._bytes > self._limit:
            self._bytes -= self._known.popitem(last=False)[1].size_bytes


def _call(frame: ChatCall, known: Beginning, fresh: Sequence[tuple[dict[str, Any], bool]]) -> ChatCall:
    return ChatCall(
        options=frame.options,
        messages=(*known.read, *[message for message, _ in fresh]),
        tools=frame.tools,
        template_args=frame.template_args,
        add_generation_prompt=frame.add_generation_prompt,
        parts=PromptClass.PARTS in known.classes or _any_in_parts(fresh),
    )


def _rendered(tokenizer: Tokenizer, call: ChatCall, known: Beginning) -> RenderedTurns | None:
    """The turns behind a beginning: without the template where it has nothing to add to what it made before."""
    if known.turns == known.count > known.taken:
        turns, ending = [], ""
        for message in call.messages[known.count :]:
            turn = known.plain.get(message["role"]) if is_plain(message) else None
            if turn is None:
                break
            turns.append(turn.shown(message["content"]))
            ending = turn.ending
        else:
            return RenderedTurns(known.opening, turns, ending)
    return tokenizer.render_turns(call, known.turns)


def _plain_turn(tokenizer: Tokenizer, call: ChatCall, known: Beginning) -> PlainTurn | None:
    role = call.messages[-1]["role"]
    if role not in known.plain:
        known.plain[role] = plain_turn(tokenizer, call)
    return known.plain[role]


def _said(fresh: Sequence[tuple[dict[str, Any], bool]], special_in: Callable[[str], object]) -> frozenset[PromptClass]:
    said = said_by([message for message, _ in fresh], special_in)
    return said | {PromptClass.PARTS} if _any_in_parts(fresh) else said


def _any_in_parts(fresh: Sequence[tuple[dict[str, Any], bool]]) -> bool:
    return True in [parts for _, parts in fresh]


def _still_read(call: ChatCall, turns: int) -> tuple[dict[str, Any], ...]:
    """All messages but the last, less those that no template looks at again when `turns` are rendered."""
    kept = [one if at == 0 or at >= turns - 1 else UNREAD for at, one in enumerate(call.messages[:-1])]
    return tuple(kept)
