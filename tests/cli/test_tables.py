"""What a person sees in a terminal, wide or narrow, and a program in a pipe."""

import re
import sys

import pytest

from kvherd.cli.tables import print_table

HEADINGS = ("WORKER", "KIND", "STATE", "RUNNING", "KV", "EPOCH", "BLOCKS", "LAG MS", "TRUTH")
ANN = ("http://127.0.0.1:21002", "kvherd-http", "up", 12, "live", "f5d868f1", 1234, "1.5/15.6", None)
BOB = (
    "grpc://10.0.0.7:51000",
    "sglang-grpc",
    "down",
    0,
    "quarantined: the events begin anew",
    "",
    0,
    None,
    "3 decided",
)


def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: columns > 0)
    print_table(HEADINGS, [ANN, BOB], numeric=frozenset({"RUNNING", "BLOCKS"}))
    plain = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    return [line.rstrip() for line in plain.splitlines()]


def test_a_wide_terminal_has_a_row_for_each(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    heading, first, second = shown(capsys, monkeypatch, 160)
    assert heading.split()[:3] == ["WORKER", "KIND", "STATE"]
    assert first.startswith("http://127.0.0.1:21002  kvherd-http  up")
    assert "quarantined: the events begin anew" in second


def test_a_narrow_terminal_has_a_paragraph_for_each_and_no_word_is_cut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shown(capsys, monkeypatch, 80) == [
        "http://127.0.0.1:21002",
        "  kind kvherd-http   state up   running 12   kv live   epoch f5d868f1",
        "  blocks 1234   lag ms 1.5/15.6   truth -",
        "grpc://10.0.0.7:51000",
        "  kind sglang-grpc   state down   running 0",
        "  kv quarantined: the events begin anew   epoch -   blocks 0   lag ms -",
        "  truth 3 decided",
    ]


def test_a_pipe_has_a_row_for_each_however_wide_it_would_be(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(shown(capsys, monkeypatch, 0)) == 3


@pytest.mark.parametrize("columns", [10, 20, 40, 60, 80, 100, 120])
def test_no_word_is_cut_that_has_room(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    text = "\n".join(shown(capsys, monkeypatch, columns))
    for word in ("f5d868f1", "1.5/15.6", "up", "down", "1234", "anew"):
        assert word in text
