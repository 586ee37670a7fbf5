"""Logs of a long-running process: one line each, on standard error, and never waiting for who reads that."""

import logging
import os
import sys
from enum import StrEnum

from kvherd.adapters.outlet import Outlet

LINE = "%(asctime)s.%(msecs)03d %(levelname)s %(name)s: %(message)s"

IMPORTANT = frozenset({"WARNING", "ERROR", "CRITICAL"})


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


MOST_WAITING_BYTES = 1 << 20


class UnwaitedLog(logging.Handler):
    """Lines to a descriptor. While nobody reads them a bounded part waits; the rest is counted in `lost`, and that is
    said in a line of its own once there is room.
    """

    def __init__(self, file: int) -> None:
        super().__init__()
        self.lost = self._told = 0
        self._outlet = Outlet(file)

    def emit(self, record: logging.LogRecord) -> None:
        line = f"{self.format(record)}\n".encode(errors="backslashreplace")
        try:
            self._outlet.write()
            if self._outlet.waiting_bytes + len(line) > MOST_WAITING_BYTES:
                self.lost += 1
                return
            if self.lost > self._told:
                line = b"kvherd: nobody read this log; %d lines are lost\n%b" % (self.lost - self._told, line)
                self._told = self.lost
            self._outlet.write(line)
        except OSError:  # it is closed at the other end, or its disk is full: there is nobody to tell
            self.lost += 1

    def flush(self) -> None:
        """As far as it is taken."""
        try:
            self._outlet.write()
        except OSError:
            self.lost += 1


def start_logging(level: LogLevel) -> UnwaitedLog:
    """Send every logger's lines of this level and above to standard error; to nobody if that was closed."""
    closed = sys.stderr is None  # its number may be of another file by now
    handler = UnwaitedLog(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC) if closed else sys.stderr.fileno())
    logging.basicConfig(level=level.upper(), format=LINE, datefmt="%Y-%m-%d %H:%M:%S", handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel(
        logging.WARNING
    )  # it announces a server of its own, which is none of a user's
    return handler


def is_important(line: str) -> bool:
    """Whether a line of a part's log, or a command's last word, is one an operator must see."""
    return line.startswith("kvherd: ") or not IMPORTANT.isdisjoint(line.split(" ", 3)[:3])
