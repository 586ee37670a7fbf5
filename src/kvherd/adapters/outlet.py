"""A descriptor that lines are written to and whose reader is never waited for.

A pipe that nobody reads takes 64 KiB, and then whoever writes to it stands still. So a pipe is opened anew, for a
description of its own that does not block: to unblock the one that is there would do so to everybody else who has it,
a shell among them. What cannot be opened anew (a socket, a pipe of another user) is asked first whether it would take
as little as fits for certain.
"""

import contextlib
import os
import select
import stat
from typing import Final

_FOR_CERTAIN_BYTES: Final = select.PIPE_BUF


class Outlet:
    """`write` takes all it is given; what the descriptor does not take now is `waiting` and goes before what comes
    later. How much that may be is for the caller to bound. The descriptor stays the caller's; `close` is for the rest.
    """

    __slots__ = ("_file", "_opened", "_poll", "_rest", "_whole")

    def __init__(self, file: int) -> None:
        mode = os.fstat(file).st_mode
        self._file = file
        self._opened = False
        self._rest = b""
        self._poll = select.poll()
        if stat.S_ISFIFO(mode) and os.get_blocking(file):
            with contextlib.suppress(OSError):
                self._file = os.open(f"/proc/self/fd/{file}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                self._opened = True
        self._whole = stat.S_ISREG(mode) or not os.get_blocking(self._file)
        self._poll.register(self._file, select.POLLOUT)

    @property
    def waiting_bytes(self) -> int:
        return len(self._rest)

    @property
    def waiting_lines(self) -> int:
        return self._rest.count(b"\n")

    def write(self, data: bytes = b"") -> None:
        """Whole lines. Raises `OSError`; what waited is lost then, and so is this."""
        rest = memoryview(self._rest + data)
        self._rest = b""
        while rest:
            if not self._whole and not self._poll.poll(0):
                break
            try:
                written = os.write(self._file, rest if self._whole else rest[:_FOR_CERTAIN_BYTES])
            except BlockingIOError:
                break
            rest = rest[written:]
        self._rest = bytes(rest)

    def close(self) -> None:
        if self._opened:
            os.close(self._file)
            self._opened = False
