"""The file of an access log: lines are kept for a moment and written together, since one write each would cost more
than relaying a request does.
"""

import asyncio
import contextlib
import errno
import logging
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from kvherd.adapters.outlet import Outlet
from kvherd.core.errors import OptionInvalid

log: Final = logging.getLogger(__name__)

HELD_S: Final = 0.2
MOST_WAITING: Final = 10_000
"""Lines that are held while nobody reads."""
_MOST_HELD: Final = 1000
_FLAGS: Final = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK


class AccessFile:
    """An async context manager. `where` is a path, or `-` for standard output.

    Raises `OptionInvalid` if it cannot be written. A file that was moved away is begun anew. A disk that is full, a
    directory that is gone later, a pipe that nobody reads: they cost lines, which are counted in `lost`, and never a
    request, nor a moment of the loop; that is logged once.
    """

    def __init__(self, where: str) -> None:
        self.lost = 0
        self._path = None if where == "-" else Path(where)
        self._lines: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None
        self._failing = False
        self._file = -1
        if where == "-" and sys.stdout is None:
            raise OptionInvalid("--access-log", "standard output is closed; name a file")
        try:
            self._outlet: Outlet | None = self._open()
        except OSError as error:
            why = "nobody reads that pipe; begin its reader first" if error.errno == errno.ENXIO else error.strerror
            raise OptionInvalid("--access-log", f"cannot write {where}: {why}") from None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.flush()
        if self._timer is not None:
            self._timer.cancel()
        left = len(self._lines) + (self._outlet.waiting_lines if self._outlet is not None else 0)
        if left:
            self._lose(left, "nobody reads it")
        self._close()

    def write(self, line: bytes) -> None:
        """One line, without its end."""
        held = len(self._lines)
        if held >= MOST_WAITING:
            self._lose(1, "nobody reads it")
            return
        self._lines.append(line)
        if held + 1 == _MOST_HELD:
            self.flush()
        elif self._timer is None:
            self._timer = self._loop.call_later(HELD_S, self.flush)

    def flush(self) -> None:
        """Write what is held, as far as it is taken."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._lines and (self._outlet is None or not self._outlet.waiting_bytes):
            return
        lost = len(self._lines) + (self._outlet.waiting_lines if self._outlet is not None else 0)
        try:
            outlet = self._followed()
            outlet.write()
            if not outlet.waiting_bytes:
                data = b"\n".join((*self._lines, b""))
                self._lines.clear()
                outlet.write(data)
        except OSError as error:
            self._lines.clear()
            self._lose(lost, error.strerror or str(error))
            return
        if outlet.waiting_bytes:
            self._timer = self._loop.call_later(HELD_S, self.flush)
        elif self._failing:
            self._failing = False
            log.warning("the access log %s is written again; %d lines are lost so far", self._path or "-", self.lost)

    def _lose(self, lines: int, why: str) -> None:
        self.lost += lines
        if not self._failing:
            log.error("the access log %s cannot be written: %s", self._path or "-", why)
        self._failing = True

    def _followed(self) -> Outlet:
        """What the name is of by now. Raises `OSError`."""
        if self._outlet is not None:
            if self._path is None:
                return self._outlet
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(self._path.stat(), os.fstat(self._file)):
                    return self._outlet
            self.lost += self._outlet.waiting_lines
            self._close()
        self._outlet = outlet = self._open()
        return outlet

    def _open(self) -> Outlet:
        self._file = sys.stdout.fileno() if self._path is None else os.open(self._path, _FLAGS, 0o640)
        return Outlet(self._file)

    def _close(self) -> None:
        if self._outlet is not None:
            self._outlet.close()
            if self._path is not None:
                os.close(self._file)
            self._outlet = None
