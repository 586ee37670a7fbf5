"""Whole chunks, told by their length."""

from kvherd.wire.http_chunks import STARTS, content


def test_every_piece_that_is_one_chunk_is_known_and_its_content_too() -> None:
    known = 0
    for size in range(1, 1100):
        data = b"x" * size
        piece = b"%x\r\n%b\r\n" % (size, data)
        if len(piece) < len(STARTS):
            known += 1
            assert piece.startswith(STARTS[len(piece)])
        assert content(piece) == data
    assert known > 1000


def test_no_piece_of_another_length_begins_as_a_chunk_would() -> None:
    for size in range(1, 1017):
        first_line = b"%x\r\n" % size
        whole = len(first_line) + size + 2
        for length in range(len(first_line), len(STARTS)):
            assert (STARTS[length] == first_line) == (length == whole)


def test_the_last_chunk_is_none() -> None:
    assert not b"0\r\n\r\n".startswith(STARTS[5])
