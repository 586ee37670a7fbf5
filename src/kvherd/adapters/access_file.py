"""The file of an access log: lines are kept for a moment and written together, since one write each would cost more
than relaying a request does.
"""

import asyncio
import contextlib
import logging
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from kvherd.core.errors import OptionInvalid

log: Final = logging.getLogger(__name__)

HELD_S: Final = 0.2
_MOST_HELD: Final = 1000
_FLAGS: Final = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC


class AccessFile:
    """An async context manager. `where` is a path, or `-` for standard output.

    Raises `OptionInvalid` if it cannot be written. A file that was moved away is begun anew. A disk that is full, or a
    directory that is gone later, costs lines and never a request; that is logged once.
    """

    def __init__(self, where: str) -> None:
        self._path = None if where == "-" else Path(where)
        self._lines: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None
        self._failing = False
        try:
            self._file = self._open()
        except OSError as error:
            raise OptionInvalid("--access-log", f"cannot write {where}: {error.strerror}") from None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.flush()
        if self._path is not None and self._file >= 0:
            os.close(self._file)

    def write(self, line: bytes) -> None:
        """One line, without its end."""
        self._lines.append(line)
        if len(self._lines) >= _MOST_HELD:
            self.flush()
        elif self._timer is None:
            self._timer = self._loop.call_later(HELD_S, self.flush)

    def flush(self) -> None:
        """Write what is held."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._lines:
            return
        data = memoryview(b"\n".join((*self._lines, b"")))
        self._lines.clear()
        try:
            self._follow_the_name()
            while data:
                written = os.write(self._file, data)
                data = data[written:]
        except OSError as error:
            if not self._failing:
                log.error("the access log %s cannot be written: %s", self._path or "-", error.strerror)  # noqa: TRY400
            self._failing = True
        else:
            self._failing = False

    def _follow_the_name(self) -> None:
        """Raises `OSError`."""
        if self._path is None:
            return
        with contextlib.suppress(FileNotFoundError):
            if self._file >= 0 and os.path.samestat(self._path.stat(), os.fstat(self._file)):
                return
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._file = self._open()

    def _open(self) -> int:
        return sys.stdout.fileno() if self._path is None else os.open(self._path, _FLAGS, 0o640)
