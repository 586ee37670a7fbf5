"""A peek reads little, and refuses what it cannot read."""

import pytest

from kvherd.core.errors import BodyNotJson, FieldInvalid
from kvherd.wire.openai.routing import peek, peek_around, with_messages


def test_a_peek_reads_what_routing_needs() -> None:
    seen = peek(b'{"model": "m", "stream": true, "n": 2, "messages": [{"role": "user"}], "other": 1}')
    assert (seen.model, seen.streams, seen.n, bytes(seen.messages)) == ("m", True, 2, b'[{"role": "user"}]')


def test_null_and_absent_are_the_same() -> None:
    assert not peek(b'{"model": "m", "stream": null}').streams
    assert peek(b"{}").model is None


@pytest.mark.parametrize(("body", "field"), [(b'{"model": 5}', "model"), (b"[]", "body")])
def test_a_field_of_the_wrong_type_is_named(body: bytes, field: str) -> None:
    with pytest.raises(FieldInvalid) as caught:
        peek(body)
    assert caught.value.field == field


def test_no_json_is_said_with_its_place() -> None:
    with pytest.raises(BodyNotJson) as caught:
        peek(b'{"model": "m",\n!}')
    assert (caught.value.line, caught.value.column) == (2, 1)


@pytest.mark.parametrize("prompt", ["\\ud800", "\\udc00", "\\ud83d x", "\\udc00\\ud83d"])
def test_half_a_character_is_called_that(prompt: str) -> None:
    with pytest.raises(BodyNotJson, match="is half of a character"):
        peek(b'{"model":"m","prompt":"%b"}' % prompt.encode())


@pytest.mark.parametrize(
    ("before", "behind", "known"),
    [
        (b'{"model": "m", "messages": ', b', "user": "ann"}', True),
        (b'{"model": "m", "metadata": {"messages": ', b"}}", False),
        (b'{"model": "m", "metadata": {"messages": ', b'}, "messages": []}', False),
        (b'{"model": "m", "messages": ', b', "m\\u0065ssages": []}', False),
        (b'{"model": "m", "user": "\\"messages', b'"}', False),
        (b'{"model": "m", "messages": ', b', "n": "1"}', False),
        (b'{"model": "m", "messages": ', b"", False),
    ],
)
def test_what_stands_around_messages_is_told_where_they_are_a_bodys_own(
    before: bytes, behind: bytes, known: bool
) -> None:
    told = peek_around(before, behind, b"3f0c")
    assert (told is not None) == known
    if told is not None:
        messages = b'[{"role": "user", "content": "a"}]'
        seen, whole = with_messages(told, messages), peek(before + messages + behind)
        assert (seen.model, seen.user, bytes(seen.messages)) == (whole.model, whole.user, bytes(whole.messages))
