"""The chats that the load asks and the engines know: deterministic, so that every process makes the same ones.

Each has the exact size in bytes. All but its last question is the same every time it is asked, as in a chat that goes
on; the question has a number that the load changes. What is the same is what a cache of encodings can know: 93 % of
1 KB, more of a longer one.
"""

import json
import random
from dataclasses import dataclass

COUNT = 16
NUMBER = b"00000000"
_QUESTION = f"Question {NUMBER.decode()}: which of them came first, and how do we know?"
_TEXT = (
    "river city history light market bridge winter letter garden music teacher window mountain paper silver engine "
    "council harbour forest machine summer record picture village journey answer evening captain science kitchen the "
    "of and to in is was for on that with as by at from it his her they were had which one all would there their"
)
_WORDS = _TEXT.split()


@dataclass(frozen=True)
class Conversation:
    """`body` is the JSON, `number_at` where its question has its number."""

    body: bytes
    number_at: int


def conversations(size: int, *, stream: bool = False, max_tokens: int | None = None) -> list[Conversation]:
    return [_conversation(number, size, stream=stream, max_tokens=max_tokens) for number in range(COUNT)]


def name_of(number: int) -> str:
    return f"Conversation {number:02}"


def _conversation(number: int, size: int, *, stream: bool, max_tokens: int | None) -> Conversation:
    dice = random.Random(number)
    messages = [{"role": "system", "content": f"{name_of(number)}. You are a friend who answers in one sentence."}]
    while len(_body(messages, stream, max_tokens)) + 700 < size:
        role = "assistant" if messages[-1]["role"] == "user" else "user"
        messages.append({"role": role, "content": _text(dice, 500)})
    room = size - len(_body(messages, stream, max_tokens))
    messages[0]["content"] += " " + _text(dice, room - 1)
    body = _body(messages, stream, max_tokens)
    assert len(body) == size, (len(body), size)
    return Conversation(body, body.index(NUMBER))


def _body(messages: list[dict[str, str]], stream: bool, max_tokens: int | None) -> bytes:
    fields: dict[str, object] = {"model": "m", "stream": stream}
    if max_tokens is not None:
        fields["max_tokens"] = max_tokens
    fields["messages"] = [*messages, {"role": "user", "content": _QUESTION}]
    return json.dumps(fields).encode()


def _text(dice: random.Random, length: int) -> str:
    words: list[str] = []
    while sum(map(len, words)) + len(words) < length + 1:
        words.append(dice.choice(_WORDS))
    return " ".join(words)[:length].ljust(length, "s")
