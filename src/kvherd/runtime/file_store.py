"""Blocks in files of one directory, which engines share: on one machine, or on a file system that several mount.

    <directory>/<first two digits>/<name>.kv     a header, then the bytes

The header tells the length, and a digest of the name and the bytes: a file that was cut short, changed or moved is
removed by who reads it. A file appears whole, by its last name. It is read and written without waiting for the disk to
have it, so a loss of power may cost blocks, never wrong bytes. Files used longest ago are removed when there are too
many bytes.
"""

import logging
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from kvherd.core.errors import OptionInvalid
from kvherd.core.ids import BlockName

SUFFIX = ".kv"
UNFINISHED_S = 600.0
"""A file that has no last name yet after this time lost its writer."""
_MAGIC = b"kvherd block 2\n"
_DIGEST_BYTES = 16
_HEADER_BYTES = len(_MAGIC) + 8 + _DIGEST_BYTES
_log = logging.getLogger(__name__)


class FileBlockStore:
    """Implements `BlockStore`. `most_bytes` is what this and other processes leave there together, or a little more:
    each looks at the whole again when it has written a sixteenth of that.
    """

    def __init__(self, directory: Path, *, most_bytes: int) -> None:
        """Raises `OptionInvalid` if the directory cannot be made or written."""
        self._directory = directory
        self._most_bytes = most_bytes
        self._unchecked_bytes = most_bytes  # the first put looks at what is there
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory):
                pass
        except OSError as error:
            reason = f"{directory} cannot be written: {error.strerror or error}"
            raise OptionInvalid("--storage-dir", reason) from error

    def find(self, names: Sequence[BlockName], *, timeout_s: float) -> int:
        deadline_s = time.monotonic() + timeout_s
        for index, name in enumerate(names):
            if time.monotonic() > deadline_s or not self._path(name).is_file():
                return index
        return len(names)

    def read(self, names: Sequence[BlockName], into: Sequence[memoryview], *, timeout_s: float) -> list[bool]:
        deadline_s = time.monotonic() + timeout_s
        verified = [False] * len(names)
        for index, (name, buffer) in enumerate(zip(names, into, strict=True)):
            if time.monotonic() > deadline_s or not self._read(self._path(name), buffer):
                break
            verified[index] = True
        return verified

    def put(self, names: Sequence[BlockName], blocks: Sequence[memoryview], *, timeout_s: float) -> list[bool]:
        deadline_s = time.monotonic() + timeout_s
        kept = [False] * len(names)
        for index, (name, block) in enumerate(zip(names, blocks, strict=True)):
            if time.monotonic() > deadline_s:
                break
            try:
                self._put(self._path(name), block)
                kept[index] = True
            except OSError as error:
                _log.warning("%s keeps no more blocks: %s", self._directory, error.strerror or error)
                break
        return kept

    def _path(self, name: BlockName) -> Path:
        return self._directory / name[:2] / f"{name}{SUFFIX}"

    def _read(self, path: Path, buffer: memoryview) -> bool:
        try:
            with path.open("rb", buffering=0) as file:
                header = file.read(_HEADER_BYTES)
                filled = file.readinto(buffer)
                right = header == _header(path, buffer) and filled == buffer.nbytes and not file.read(1)
            if right:
                os.utime(path)  # what is used is kept
                return True
            _log.warning("removed %s: its bytes are not what was written", path)
            path.unlink(missing_ok=True)
        except FileNotFoundError:
            return False
        except OSError as error:
            _log.warning("%s cannot be read: %s", path, error.strerror or error)
        return False

    def _put(self, path: Path, block: memoryview) -> None:
        with suppress(FileNotFoundError):
            os.utime(path)
            return
        if self._unchecked_bytes >= self._most_bytes // 16:
            self._make_room()
        path.parent.mkdir(exist_ok=True)
        handle, unfinished = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_header(path, block))
                file.write(block)
            Path(unfinished).replace(path)
        except BaseException:
            Path(unfinished).unlink(missing_ok=True)
            raise
        self._unchecked_bytes += block.nbytes + _HEADER_BYTES

    def _make_room(self) -> None:
        """Remove what was used longest ago until an eighth is free, if there is too much; others may do so too."""
        self._unchecked_bytes = 0
        files = []
        for path in self._directory.glob("??/*"):
            try:
                facts = path.stat()
            except FileNotFoundError:
                continue
            if path.suffix == SUFFIX:
                files.append((facts.st_mtime_ns, facts.st_size, path))
            elif time.time() - facts.st_mtime > UNFINISHED_S:
                path.unlink(missing_ok=True)
        total_bytes = sum(size_bytes for _, size_bytes, _ in files)
        if total_bytes < self._most_bytes:
            return
        for _, size_bytes, path in sorted(files):
            if total_bytes <= self._most_bytes * 7 // 8:
                return
            path.unlink(missing_ok=True)
            total_bytes -= size_bytes


def _header(path: Path, block: memoryview) -> bytes:
    """Of the name as well: bytes that came to stand under another name are not that block's."""
    digest = blake2b(path.name.encode(), digest_size=_DIGEST_BYTES)
    digest.update(block)
    return _MAGIC + block.nbytes.to_bytes(8, "big") + digest.digest()
