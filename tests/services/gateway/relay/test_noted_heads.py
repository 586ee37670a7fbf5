"""The beginning of an answer is not written anew where its headers came before, and is never another's."""

import pytest

from kvherd.services.gateway.relay import responder
from kvherd.services.gateway.relay.responder import HeaderUnsafe, _Noted
from kvherd.wire.http_heads import Block


def noted() -> _Noted:
    return _Noted(Block([(b"content-type", b"application/json")]))


def test_each_answer_begins_with_its_status_its_headers_and_what_is_added() -> None:
    one, other = noted(), noted()
    for _ in range(2):
        for status, line in ((200, b"200 OK"), (429, b"429 Too Many Requests")):
            for more in ((), ((b"x-a", b"1"),), ((b"x-a", b"2"), (b"x-b", b"3"))):
                added = b"".join(b"%b: %b\r\n" % header for header in more)
                for each in (one, other):
                    assert each.knows(status, more)
                    assert each.head == b"HTTP/1.1 %b\r\ncontent-type: application/json\r\n%b" % (line, added)


def test_what_cannot_be_added_is_not_taken_for_what_was_before() -> None:
    each = noted()
    assert each.knows(200, ((b"x-a", b"1"),))
    before = each.head
    for _ in range(2):
        with pytest.raises(HeaderUnsafe):
            each.knows(200, ((b"x-a", b"1\r\nx-b: 2"),))
        assert not each.knows(200, ((b"content-type", b"text/plain"),))
    assert each.knows(200, ((b"x-a", b"1"),))
    assert each.head == before


def test_what_was_added_is_remembered_within_bounds() -> None:
    each = noted()
    for number in range(3000):
        assert each.knows(200, ((b"x-a", b"%d" % number), (b"x-b", b"x" * (number % 500))))
        assert b"x-a: %d\r\n" % number in each.head
    assert len(responder._said) <= 1024
    assert max(map(len, responder._said.values())) <= 256
