"""Messages made into an answer as they come: what is known of tokens changes the cost of it and no byte."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from kvherd.adapters.completions import OpenAiCompletions
from kvherd.adapters.grpc_receivers import Pushed
from kvherd.adapters.model_files import locate
from kvherd.adapters.tokenizer import load_tokenizer
from kvherd.core.errors import FrameInvalid
from kvherd.core.ids import RequestId
from kvherd.testing.workers import FakeResponder
from kvherd.wire.openai.requests import decode_chat, decode_completion
from kvherd.wire.usual_chunk import TokenTexts, UsualChunks, spelling
from kvherd.wire.worker_pb import ResponseReader

TOKENIZER = load_tokenizer(locate("tiny"))
EOS = TOKENIZER.special_tokens["<|endoftext|>"]
COMPLETIONS = OpenAiCompletions(TOKENIZER, "herd", 4096, now_s=lambda: 1.0)
TEXT = 'Naïve "quotes", a\\b\n\t, 北京, 🐑🐑 and aaaa '
REQUEST = "r-1"


class Answer:
    """One call's answer in the making."""

    def __init__(self, texts: TokenTexts | None, *, on_first: Callable[[], None] | None = None, **fields: Any) -> None:
        body = json.dumps({"model": "herd", "stream": True, "max_tokens": 999} | fields).encode()
        call = decode_completion(body) if "prompt" in fields else decode_chat(body)
        self.answer = COMPLETIONS.streamed(call, request=RequestId(REQUEST))
        self.responder = FakeResponder()
        self.pushed = Pushed(
            ResponseReader([EOS]),
            self.answer,
            self.responder,
            chunks=UsualChunks(REQUEST, [EOS]),
            texts=texts,
            head=[(b"content-type", b"text/event-stream")],
            on_first_token=on_first,
        )
        self.made = 0

    def say(self, *token_ids: int, **fields: Any) -> None:
        self.made += len(token_ids)
        told = {"prompt_tokens": 8, "completion_tokens": self.made, "cached_tokens": 4} | fields
        self._send(chunk=pb.GenerateStreamChunk(token_ids=token_ids, **told))

    def finish(self, *repeated: int, reason: str = "length") -> None:
        counts = {"prompt_tokens": 8, "completion_tokens": self.made, "cached_tokens": 4}
        self._send(complete=pb.GenerateComplete(output_ids=repeated, finish_reason=reason, **counts))

    def _send(self, **message: Any) -> None:
        self.pushed.message(pb.GenerateResponse(request_id=REQUEST, **message).SerializeToString())

    @property
    def said(self) -> bytes:
        return self.responder.body

    @property
    def text(self) -> str:
        events = [json.loads(event[6:]) for event in self.said.decode().split("\n\n") if event]
        return "".join(event["choices"][0]["delta"].get("content", "") for event in events)


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
CALLS: list[dict[str, Any]] = [
    CHAT,
    {"prompt": "hi"},
    {"prompt": "hi", "echo": True},
    CHAT | {"stop": ["🐑 and", "never"]},
    CHAT | {"skip_special_tokens": False},
    CHAT | {"stream_options": {"include_usage": True}},
    {"prompt": 'text":"content":""'},
]
SPECIAL = sorted(TOKENIZER.special_tokens.values())


@pytest.mark.parametrize("fields", CALLS, ids=str)
@given(
    steps=st.lists(
        st.lists(st.sampled_from([*TOKENIZER.encode(TEXT), *range(256), *SPECIAL]), max_size=3).map(tuple), max_size=40
    )
)
def test_an_answer_is_the_same_byte_by_byte_whatever_is_known_of_its_tokens(
    fields: dict[str, Any], steps: list[tuple[int, ...]]
) -> None:
    shared = token_texts(skip=fields.get("skip_special_tokens", True))
    answers = []
    for texts in (None, shared, shared):
        answer = Answer(texts, **fields)
        for token_ids in steps:
            answer.say(*token_ids)
        answer.finish(*steps[-1:][0] if steps else ())
        assert answer.pushed.finished
        answers.append(answer.said + answer.answer.end())
    assert answers[0] == answers[1] == answers[2]


def test_a_known_token_is_not_decoded_again() -> None:
    texts = token_texts()
    texts.known[spelling(65)] = b"known"
    answer = Answer(texts, **CHAT)
    answer.say(65)  # opens the answer
    answer.say(65)
    assert answer.text == TOKENIZER.decode([65]) + "known"


def test_a_part_of_a_character_is_never_known_and_what_is_known_does_not_break_one() -> None:
    texts = token_texts()
    answer = Answer(texts, **CHAT)
    for token_id in [*b"a\xf0\x9f\x90\x91a\xf0\x9fa"]:
        answer.say(*_bytes_of(token_id))
    answer.finish()
    assert answer.text == "a🐑a\N{REPLACEMENT CHARACTER}a"
    assert set(texts.known.values()) <= {b"a"}


def test_logprobs_that_were_asked_for_are_told_of_every_token() -> None:
    texts = token_texts()
    texts.known[spelling(65)] = b"known"
    answer = Answer(texts, logprobs=True, **CHAT)
    for _ in range(3):
        answer.say(65, output_logprobs=pb.OutputLogProbs(token_logprobs=[-0.5], token_ids=[65]))
    assert answer.said.count(b'"logprob":-0.5') == 3
    assert b"known" not in answer.said


def test_what_the_last_message_repeats_is_counted_from_the_messages_that_were_known_too() -> None:
    answer = Answer(token_texts(), **CHAT)
    for _ in range(5):
        answer.say(65)
    answer.made += 1
    answer.finish(*[65] * 6)
    assert answer.text == TOKENIZER.decode([65]) * 6
    assert answer.answer.plan.usage().completion_tokens == 6


def test_the_first_token_is_told_once_and_when_it_comes() -> None:
    told: list[int] = []
    answer = Answer(token_texts(), on_first=lambda: told.append(answer.made), **CHAT)
    answer.say()
    assert told == []
    for _ in range(4):
        answer.say(65)
    assert told == [1]


def test_a_message_with_a_tail_that_is_none_is_found_out_by_the_end() -> None:
    answer = Answer(token_texts(), **CHAT)
    answer.say(65)
    answer.say(65)
    broken = b"\n\x03r-1\x12\x06\n\x01\x41\x10\x08\x1f"
    answer.pushed.message(broken)
    with pytest.raises(FrameInvalid, match="a response that is none"):
        answer.finish()


def token_texts(*, skip: bool = True) -> TokenTexts:
    spelt = TOKENIZER.spelt(skip_special_tokens=skip)
    assert spelt is not None
    return TokenTexts(spelt)


def _bytes_of(byte: int) -> Sequence[int]:
    token = next(token for token in range(TOKENIZER.vocab_size) if TOKENIZER.token_bytes(token) == bytes([byte]))
    return [token]
