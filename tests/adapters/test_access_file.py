"""Where the lines about requests go."""

import asyncio
import shutil
from pathlib import Path

import pytest

from kvherd.adapters.access_file import HELD_S, AccessFile
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


def test_a_file_that_cannot_be_is_a_usage_error() -> None:
    with pytest.raises(OptionInvalid, match="--access-log: cannot write /nowhere/at/all: No such file"):
        AccessFile("/nowhere/at/all")


async def test_standard_output_may_have_them(capfd: pytest.CaptureFixture[str]) -> None:
    async with AccessFile("-") as log:
        log.write(b"{}")
    assert capfd.readouterr().out == "{}\n"
