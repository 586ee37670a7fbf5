"""Converted weights on disk, once for each model file, mapped read-only so that engines share the pages.

    <cache>/weights-<digest>.bin     every array, one after the other, each at a page's start
    <cache>/weights-<digest>.json    name → shape, order, offset; written last, so its presence means the rest is whole
    <cache>/weights-<digest>.lock    held while converting, and while removing

The digest is of the model file's size, time of change and first bytes, and of `FORMAT`.

Who converts also removes what nobody will read again: entries of older formats, of the same path as it was before, and
what a conversion left that was killed. Engines that have such an entry mapped keep it until they end.
"""

import fcntl
import hashlib
import logging
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvherd.core.errors import StartFailed
from kvherd.runtime.weights import Floats, Weights, from_named

FORMAT = 2
LOCK_DEADLINE_S = 120.0
_PAGE = 4096
_log = logging.getLogger(__name__)


class Placed(msgspec.Struct, frozen=True):
    """Where an array lies. `transposed` says that its columns, not its rows, are contiguous."""

    shape: tuple[int, int]
    transposed: bool
    offset: int


class Index(msgspec.Struct, frozen=True):
    layers: int
    size_bytes: int
    arrays: dict[str, Placed]
    format: int = 1
    source: str = ""


@dataclass(frozen=True, slots=True)
class WeightCache:
    """A directory of converted weights."""

    directory: Path

    def load(self, model: Path, convert: Callable[[], Weights]) -> Weights:
        """The weights of `model`, converted by `convert` if no earlier start has done so.

        Of several processes that start at once one converts and the others wait for it; one that waits for more
        than `LOCK_DEADLINE_S` raises `StartFailed`. Where the directory cannot be written the weights stay in memory.
        """
        stem = self.directory / f"weights-{_digest(model)}"
        found = _mapped(stem)
        if found is not None:
            return found
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with _locked(stem.with_suffix(".lock")):
                found = _mapped(stem)
                if found is None:
                    source = str(model.resolve())
                    _remove(stem)
                    _write(stem, convert(), source)
                    found = _mapped(stem)
                    _remove_old(stem, source)
        except OSError as error:
            _log.warning("weights are not cached: %s", error)
            return convert()
        return found if found is not None else convert()


def _digest(model: Path) -> str:
    facts = model.stat()
    digest = hashlib.sha256(f"{FORMAT} {facts.st_size} {facts.st_mtime_ns}".encode())
    with model.open("rb") as file:
        digest.update(file.read(1 << 20))
    return digest.hexdigest()[:32]


def _mapped(stem: Path) -> Weights | None:
    """Map a whole entry; None if there is none, or if someone damaged it."""
    try:
        index = msgspec.json.decode(stem.with_suffix(".json").read_bytes(), type=Index)
        file = _map(stem.with_suffix(".bin"))
        if len(file) != index.size_bytes:
            return None
        return from_named({name: _view(file, placed) for name, placed in index.arrays.items()}, index.layers)
    except (OSError, ValueError, KeyError, msgspec.MsgspecError):
        return None


def _map(path: Path) -> NDArray[np.uint8]:
    """Map a file read-only, with its page table filled at once: page by page it costs the first request a second."""
    with path.open("rb") as file:
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        return np.frombuffer(mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ), dtype=np.uint8)


def _view(file: NDArray[np.uint8], placed: Placed) -> Floats:
    rows, columns = placed.shape[::-1] if placed.transposed else placed.shape
    size = rows * columns * 4
    flat = file[placed.offset : placed.offset + size].view(np.float32)
    array = flat.reshape(rows, columns)
    return array.T if placed.transposed else array


def _write(stem: Path, weights: Weights, source: str) -> None:
    arrays: dict[str, Placed] = {}
    offset = 0
    with _replacing(stem.with_suffix(".bin")) as path, path.open("wb") as file:
        for name, array in weights.named().items():
            transposed = not array.flags.c_contiguous
            arrays[name] = Placed((array.shape[0], array.shape[1]), transposed, offset)
            file.write(np.ascontiguousarray(array.T if transposed else array).data)
            offset += -(-array.nbytes // _PAGE) * _PAGE
            file.truncate(offset)
            file.seek(offset)
    with _replacing(stem.with_suffix(".json")) as path:
        path.write_bytes(msgspec.json.encode(Index(len(weights.layers), offset, arrays, FORMAT, source)))


def _remove_old(kept: Path, source: str) -> None:
    """Remove entries that no start reads any more; one that is being made now is left to its maker."""
    names = {path.name.partition(".")[0] for path in kept.parent.glob("weights-*.*")}
    for stem in (kept.with_name(name) for name in names - {kept.name}):
        try:
            with _locked(stem.with_suffix(".lock"), within_s=0.0):
                if _is_old(stem, source):
                    _remove(stem)
                    stem.with_suffix(".lock").unlink(missing_ok=True)
        except (OSError, StartFailed) as error:
            _log.info("left %s where it is: %s", stem, error)


def _remove(stem: Path) -> None:
    stem.with_suffix(".json").unlink(missing_ok=True)  # first: without it nobody takes the rest for whole
    for path in stem.parent.glob(f"{stem.name}.*"):  # also what a conversion left that was killed
        if path.suffix != ".lock":
            path.unlink(missing_ok=True)


def _is_old(stem: Path, source: str) -> bool:
    try:
        index = msgspec.json.decode(stem.with_suffix(".json").read_bytes(), type=Index)
    except FileNotFoundError:
        return True  # a conversion that never ended
    except msgspec.MsgspecError:
        return False  # of a later format, maybe
    return index.format < FORMAT or (index.format == FORMAT and index.source == source)


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A file to write that takes the place of `path` when all went well, and vanishes when not."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    os.close(handle)
    try:
        yield Path(name)
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)


@contextmanager
def _locked(path: Path, within_s: float | None = None) -> Iterator[None]:
    """Hold the lock at `path`; the kernel gives it back when its holder dies. Raises `StartFailed` when it is late."""
    patience_s = LOCK_DEADLINE_S if within_s is None else within_s
    deadline = time.monotonic() + patience_s
    while True:
        with path.open("w") as file:
            if _lock(file, deadline) and _is_at(file, path):
                yield
                return
        if time.monotonic() > deadline:
            raise StartFailed("the engine", f"another process has held {path} for {patience_s:g} s")


def _lock(file: IO[str], deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)
        else:
            return True


def _is_at(file: IO[str], path: Path) -> bool:
    """Whether it still has this name: who held the lock may have removed it, and then it locks nothing."""
    try:
        return os.fstat(file.fileno()).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False
