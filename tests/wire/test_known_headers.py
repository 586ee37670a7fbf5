"""Headers that come again say the same as any others."""

import pytest

from kvherd.wire.http_heads import Block, Header, KnownHeaders, first, lines, with_more, without

TOLD: list[Header] = [(b"host", b"h"), (b"x-a", b"1"), (b"x-a", b"2"), (b"accept", b"*")]
OWN: tuple[Header, ...] = ((b"x-request-id", b"r"), (b"x-a", b"3"))
PLAIN = [*TOLD, *OWN]


@pytest.fixture
def known() -> KnownHeaders:
    return KnownHeaders(Block(TOLD), OWN)


def test_they_are_a_sequence_of_the_block_and_what_is_their_own(known: KnownHeaders) -> None:
    assert list(known) == PLAIN
    assert len(known) == len(PLAIN)
    assert [known[at] for at in range(len(PLAIN))] == PLAIN
    assert known[-1] == PLAIN[-1]
    assert list(known[1:3]) == PLAIN[1:3]
    assert (b"x-a", b"3") in known


@pytest.mark.parametrize("name", [b"host", b"x-a", b"x-request-id", b"absent"])
def test_the_first_of_a_name_is_found_and_all_of_a_name_taken_out(known: KnownHeaders, name: bytes) -> None:
    for _ in range(2):  # what is kept from the first time is right as well
        assert first(known, name) == first(PLAIN, name)
        assert list(without(known, name)) == without(PLAIN, name)
        assert first(without(known, name), name) is None
    assert list(known) == PLAIN


@pytest.mark.parametrize("left_out", [frozenset[bytes](), frozenset({b"x-a"}), frozenset({b"host", b"x-request-id"})])
def test_they_are_written_as_any_others(known: KnownHeaders, left_out: frozenset[bytes]) -> None:
    for _ in range(2):
        assert lines(known, left_out) == lines(PLAIN, left_out)
    assert lines(PLAIN, frozenset({b"x-a"})) == b"host: h\r\naccept: *\r\nx-request-id: r\r\n"


@pytest.mark.parametrize("left_out", [frozenset[bytes](), frozenset({b"content-length"}), frozenset({b"x-request-id"})])
def test_what_was_written_beforehand_is_what_would_be_written(left_out: frozenset[bytes]) -> None:
    own = ((b"content-length", b"3"), (b"x-request-id", b"r"), (b"traceparent", b"t"))
    known = KnownHeaders(Block(TOLD), (), b"x-request-id: r\r\ntraceparent: t\r\n", 3)
    assert list(known) == [*TOLD, *own]
    assert lines(known, left_out) == lines([*TOLD, *own], left_out)
    for name in (b"x-a", b"traceparent", b"content-length"):
        assert lines(without(known, name), left_out) == lines(without([*TOLD, *own], name), left_out)


def test_more_come_behind_and_leave_the_others_alone(known: KnownHeaders) -> None:
    more = with_more(known, [(b"x-b", b"4")])
    assert list(more) == with_more(PLAIN, [(b"x-b", b"4")])
    assert list(known) == PLAIN
