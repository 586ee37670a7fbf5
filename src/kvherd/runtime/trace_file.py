"""A trace on disk, written as it comes, so that a long profile costs no memory.

Until it is finished its name ends in `.part`: who finds a file without it has a whole one. What is left of a process
that was killed is a `.part` that opens all the same.
"""

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from kvherd.wire import chrome_trace

BUFFER_BYTES = 2**18
COPIED_BYTES = 2**20


class TraceFile:
    """Any call may raise `OSError`; `discard` it then."""

    def __init__(self, path: Path) -> None:
        """Raises `FileExistsError` rather than write over another."""
        self.path = path
        if path.exists():
            raise FileExistsError(None, "a trace of this name is there already", str(path))
        self._part = path.with_name(f"{path.name}.part")
        self._file = self._part.open("xb", buffering=BUFFER_BYTES)
        self._between = chrome_trace.BEGIN

    def append(self, events: Iterable[bytes]) -> None:
        for event in events:
            self._file.write(self._between)
            self._file.write(event)
            self._between = chrome_trace.BETWEEN

    def append_file(self, path: Path) -> None:
        """All events of another trace, which is whole."""
        with path.open("rb") as source:
            left_bytes = os.fstat(source.fileno()).st_size - len(chrome_trace.BEGIN) - len(chrome_trace.END)
            source.seek(len(chrome_trace.BEGIN))
            if left_bytes > 0:  # 0 and less is a trace without events
                self._file.write(self._between)
                self._between = chrome_trace.BETWEEN
            while left_bytes > 0 and (piece := source.read(min(left_bytes, COPIED_BYTES))):
                left_bytes -= self._file.write(piece)

    def finish(self) -> None:
        """All of it is there, under its own name."""
        self._file.write(self._between.replace(chrome_trace.BETWEEN, b"") + chrome_trace.END)
        self._file.close()
        self._part.rename(self.path)

    def discard(self) -> None:
        """Leave nothing behind. Raises nothing."""
        with suppress(OSError):  # what it could not write is not wanted any more; it is closed all the same
            self._file.close()
        self._part.unlink(missing_ok=True)


def merge_traces(sources: Sequence[Path], target: Path) -> bool:
    """Make one trace of several, if all are there and nobody else does it; whether `target` was made here.

    Whoever finishes one of the sources calls this after it: the last to finish finds all of them. Raises `OSError`.
    """
    if not all(source.exists() for source in sources) or target.exists():
        return False
    try:
        merged = TraceFile(target)
    except FileExistsError:
        return False
    try:
        for source in sources:
            merged.append_file(source)
        merged.finish()
    except OSError:
        merged.discard()
        raise
    return True


def make_directory(path: Path) -> None:
    """Make it, and its parents, unless it is there. Raises `OSError`, also if nothing could be written into it."""
    path.mkdir(parents=True, exist_ok=True)
    if not os.access(path, os.W_OK | os.X_OK):
        raise PermissionError(None, "it is not writable", str(path))
