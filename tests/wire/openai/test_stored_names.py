"""Names under which engines keep answers, out of bodies and out of answers in any pieces."""

import json

import pytest

from kvherd.core.errors import FieldInvalid
from kvherd.wire.openai.stored import ToldNames, continued

DEEP = b"[" * 5000 + b"]" * 5000
CREATED = {"type": "response.created", "response": {"id": "resp_1", "status": "in_progress"}}
STREAM = b": hello\r\n\r\nevent: response.created\r\ndata: " + json.dumps(CREATED).encode() + b"\r\n\r\n"
WHOLE = b'{"output": [{"id": "msg_9"}], "conversation": {"id": "conv_2"}, "id": "resp_1"}'


@pytest.mark.parametrize(
    ("body", "past"),
    [
        (b'{"input": "hi"}', None),
        (b'{"previous_response_id": null, "conversation": null}', None),
        (b'{"previous_response_id": "resp_1"}', ("/v1/responses", "resp_1")),
        (b'{"conversation": "conv_2"}', ("/v1/conversations", "conv_2")),
        (b'{"conversation": {"id": "conv_2"}}', ("/v1/conversations", "conv_2")),
        (b'{"previous_response_id": "resp_1", "conversation": "conv_2"}', ("/v1/responses", "resp_1")),
        (b'{"previous_response_id": 5}', None),
        (b"{", None),
        (b"", None),
        (b'{"previous_response_id": "resp_1", "x": ' + DEEP + b"}", None),
    ],
)
def test_what_a_body_goes_on_from(body: bytes, past: tuple[str, str] | None) -> None:
    assert continued(body) == past


@pytest.mark.parametrize("name", ["../flush_cache", "a/b", "a?b", "a b", "a\r\nX: 1", "ä", "a" * 257])
@pytest.mark.parametrize("field", ["previous_response_id", "conversation"])
def test_what_would_be_another_path_is_no_name(field: str, name: str) -> None:
    with pytest.raises(FieldInvalid, match=field):
        continued(json.dumps({field: name}).encode())


def told(*pieces: bytes, stream: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What was found before the end, and after it."""
    names = ToldNames(stream=stream)
    for piece in pieces:
        names.feed(piece)
    before = names.found
    names.end()
    return before, names.found


def test_an_answer_cut_anywhere_tells_its_own_name_and_its_conversation_s() -> None:
    for at in range(len(WHOLE)):
        assert told(WHOLE[:at], WHOLE[at:], stream=False) == ((), ("resp_1", "conv_2"))


def test_a_stream_cut_anywhere_tells_its_name_with_its_first_event() -> None:
    for at in range(len(STREAM)):
        pieces = (STREAM[:at], STREAM[at:], b'data: {"type": "response.output_text.delta", "item_id": "msg_9"}\n\n')
        assert told(*pieces, stream=True) == (("resp_1",), ("resp_1",))
    assert told(*(bytes([byte]) for byte in STREAM), stream=True)[0] == ("resp_1",)


@pytest.mark.parametrize("answer", [b"", b"[]", b"{", b'{"id": 5}', b'{"id": "a/b"}', b'{"object": "list"}'])
def test_an_answer_without_a_name_tells_none(answer: bytes) -> None:
    assert told(answer, stream=False)[1] == ()
    assert told(b"data: " + answer + b"\n\n", stream=True)[1] == ()


def test_an_answer_without_end_is_not_kept() -> None:
    names = ToldNames(stream=False)
    for _ in range(100):
        names.feed(b" " * 65536)
    names.feed(WHOLE)
    names.end()
    assert names.found == ()


def test_an_answer_nested_without_end_tells_no_name() -> None:
    told = ToldNames(stream=False)
    told.feed(b'{"id": "resp_1", "x": ' + DEEP + b"}")
    told.end()
    assert told.found == ()
