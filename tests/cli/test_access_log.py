"""Where the lines about requests go."""

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvherd.cli.logs import start_access_log
from kvherd.core.errors import OptionInvalid

ACCESS = logging.getLogger("kvherd.access")


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = (ACCESS.handlers, ACCESS.propagate, ACCESS.level)
    yield
    for handler in ACCESS.handlers:
        handler.close()
    ACCESS.handlers, ACCESS.propagate, level = before
    ACCESS.setLevel(level)


def lines(path: Path) -> list[int]:
    return [json.loads(line)["n"] for line in path.read_text().splitlines()]


def test_a_file_has_bare_json_and_is_begun_anew_when_it_was_moved_away(tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    start_access_log(str(path))
    ACCESS.info('{"n": 1}')
    path.rename(tmp_path / "old.jsonl")
    ACCESS.info('{"n": 2}')
    assert (lines(tmp_path / "old.jsonl"), lines(path)) == ([1], [2])


def test_standard_output_may_have_them(capsys: pytest.CaptureFixture[str]) -> None:
    start_access_log("-")
    ACCESS.info('{"n": 1}')
    assert capsys.readouterr().out == '{"n": 1}\n'


def test_a_file_that_cannot_be_is_a_usage_error() -> None:
    with pytest.raises(OptionInvalid, match="--access-log: cannot write /nowhere/at/all: No such file"):
        start_access_log("/nowhere/at/all")


def test_a_directory_that_is_gone_costs_lines_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "logs" / "access.jsonl"
    path.parent.mkdir()
    start_access_log(str(path))
    shutil.rmtree(path.parent)
    ACCESS.info('{"n": 1}')
    ACCESS.info('{"n": 2}')
    assert sum("cannot be written" in line for line in caplog.messages) == 1
    path.parent.mkdir()
    ACCESS.info('{"n": 3}')
    assert lines(path) == [3]
