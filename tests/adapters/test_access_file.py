"""Where the lines about requests go."""

import asyncio
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvherd.adapters.access_file import HELD_S, MOST_WAITING, AccessFile
from kvherd.core.errors import OptionInvalid


async def pause() -> None:
    await asyncio.sleep(2 * HELD_S)


async def test_lines_are_written_together_a_moment_later_and_all_of_them_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    async with AccessFile(str(path)) as log:
        log.write(b"1")
        log.write(b"2")
        assert path.read_bytes() == b""
        await pause()
        assert path.read_bytes() == b"1\n2\n"
        log.write(b"3")
    assert path.read_bytes() == b"1\n2\n3\n"


async def test_what_is_held_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    async with AccessFile(str(path)) as log:
        for number in range(2500):
            log.write(b"%d" % number)
        assert path.read_bytes().count(b"\n") == 2000


async def test_a_file_that_was_moved_away_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    async with AccessFile(str(path)) as log:
        log.write(b"1")
        await pause()
        path.rename(tmp_path / "old.jsonl")
        log.write(b"2")
        await pause()
    assert ((tmp_path / "old.jsonl").read_bytes(), path.read_bytes()) == (b"1\n", b"2\n")


async def test_a_directory_that_is_gone_costs_lines_and_no_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "logs" / "access.jsonl"
    path.parent.mkdir()
    async with AccessFile(str(path)) as log:
        shutil.rmtree(path.parent)
        for line in (b"1", b"2"):
            log.write(line)
            await pause()
        assert sum("cannot be written: No such file" in line for line in caplog.messages) == 1
        path.parent.mkdir()
        log.write(b"3")
        await pause()
        assert path.read_bytes() == b"3\n"


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A pipe by name, and where it can be read."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reads = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    yield path, reads
    os.close(reads)


LONG = 2 * MOST_WAITING


async def test_a_pipe_that_nobody_reads_costs_lines_that_are_counted_and_no_moment(
    pipe: tuple[Path, int], caplog: pytest.LogCaptureFixture
) -> None:
    path, reads = pipe
    async with AccessFile(str(path)) as log:
        for number in range(LONG):
            log.write(b"%099d" % number)
        await pause()
        lost = log.lost
        assert 0 < lost < LONG
        assert [line for line in caplog.messages if "cannot be written: nobody reads it" in line] == caplog.messages
        assert len(caplog.messages) == 1
        got = b""
        while got.count(b"\n") < LONG - lost:
            got += os.read(reads, 1 << 20)
            await pause()
        assert log.lost == lost
        assert [int(line) for line in got.splitlines()] == list(range(LONG - lost)), "the first, whole and in order"
        assert f"is written again; {lost} lines are lost so far" in caplog.messages[-1]
        log.write(b"last")
    assert os.read(reads, 100) == b"last\n"


async def test_a_stop_waits_for_no_reader_and_counts_what_is_lost_by_that(pipe: tuple[Path, int]) -> None:
    path, reads = pipe
    async with AccessFile(str(path)) as log:
        for number in range(2_000):
            log.write(b"%099d" % number)
        await pause()
        assert log.lost == 0, "they wait"
    written = os.read(reads, 1 << 20).count(b"\n")
    assert 0 < written < 2_000
    assert log.lost == 2_000 - written


async def test_a_reader_that_leaves_and_comes_again_costs_what_was_written_meanwhile(pipe: tuple[Path, int]) -> None:
    path, reads = pipe
    async with AccessFile(str(path)) as log:
        os.close(reads)
        log.write(b"1")
        await pause()
        assert log.lost == 1
        assert os.open(path, os.O_RDONLY | os.O_NONBLOCK) == reads
        log.write(b"2")
    assert os.read(reads, 100) == b"2\n"


def test_a_pipe_without_a_reader_is_a_usage_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OptionInvalid, match="nobody reads that pipe; begin its reader first"):
        AccessFile(str(tmp_path / "pipe"))


def test_a_file_that_cannot_be_is_a_usage_error() -> None:
    with pytest.raises(OptionInvalid, match="--access-log: cannot write /nowhere/at/all: No such file"):
        AccessFile("/nowhere/at/all")


def test_a_standard_output_that_is_closed_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    with pytest.raises(OptionInvalid, match="--access-log: standard output is closed; name a file"):
        AccessFile("-")


async def test_standard_output_may_have_them(capfd: pytest.CaptureFixture[str]) -> None:
    async with AccessFile("-") as log:
        log.write(b"{}")
    assert capfd.readouterr().out == "{}\n"
