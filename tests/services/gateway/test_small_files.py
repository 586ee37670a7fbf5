"""What an operator names as a file is read whole, or refused at once."""

import os
from pathlib import Path

import pytest

from kvherd.services.gateway.fleet.small_files import read_small


def test_a_file_is_read_whole(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * 10)
    (tmp_path / "link").symlink_to(file)
    assert read_small(tmp_path / "link", most_bytes=10) == b"x" * 10


def test_a_file_that_is_too_large_is_refused_and_not_cut(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 11)
    with pytest.raises(OSError, match="it is larger than 10 bytes"):
        read_small(tmp_path / "file", most_bytes=10)


@pytest.mark.parametrize("name", ["/dev/zero", "pipe", "."])
def test_what_has_no_end_is_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match=r"no regular file|Is a directory"):
        read_small(tmp_path / name)
