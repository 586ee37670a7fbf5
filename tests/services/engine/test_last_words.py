import logging

from kvherd.services.engine.last_words import LONGEST_LINE, LastWords


def test_lines_keep_their_level_however_they_are_cut() -> None:
    words = LastWords()
    heard = [each for chunk in (b"INFO rank 0", b" is up\nWARN", b"ING odd\n") for each in words.hear(chunk)]
    assert heard == [(logging.INFO, "rank 0 is up"), (logging.WARNING, "odd")]
    assert words.last == ""


def test_the_critical_line_is_the_last_word() -> None:
    words = LastWords()
    assert len(list(words.hear(b"WARNING odd\nCRITICAL port 1 is in use\nINFO bye\n"))) == 3
    assert words.last == "port 1 is in use"


def test_of_a_crash_the_last_line_says_most() -> None:
    words = LastWords()
    lines = list(words.hear(b"Traceback (most recent call last):\n  File x\n\nModuleNotFoundError: no zmq\n"))
    assert [level for level, _ in lines] == [logging.WARNING] * 3
    assert words.last == "ModuleNotFoundError: no zmq"


def test_a_line_without_end_takes_no_memory() -> None:
    words = LastWords()
    for _ in range(10):
        assert list(words.hear(b"x" * 100_000)) == []
    assert len(words._partial) == LONGEST_LINE
