"""Logs of a long-running process: one line each, on standard error."""

import logging
import sys
from enum import StrEnum
from logging.handlers import WatchedFileHandler

from kvherd.core.errors import OptionInvalid

LINE = "%(asctime)s.%(msecs)03d %(levelname)s %(name)s: %(message)s"

IMPORTANT = frozenset({"WARNING", "ERROR", "CRITICAL"})


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def start_logging(level: LogLevel) -> None:
    """Send every logger's lines of this level and above to standard error."""
    logging.basicConfig(level=level.upper(), format=LINE, datefmt="%Y-%m-%d %H:%M:%S", stream=sys.stderr, force=True)
    logging.getLogger("uvicorn").setLevel(
        logging.WARNING
    )  # it announces a server of its own, which is none of a user's


class _AccessFile(WatchedFileHandler):
    """A disk that is full, or a directory that is gone, costs lines and never a request."""

    _said = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:
            self.handleError(record)
        else:
            self._said = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the base class names it
        if not self._said:
            self._said = True
            logging.getLogger(__name__).error(
                "the access log %s cannot be written: %r", self.baseFilename, sys.exc_info()[1]
            )


def start_access_log(where: str) -> None:
    """Write the lines about requests, and nothing else, to a file, or with `-` to standard output, bare JSON each.

    The file may be moved away: a new one is begun. Raises `OptionInvalid`.
    """
    handler: logging.Handler
    if where == "-":
        handler = logging.StreamHandler(sys.stdout)
    else:
        try:
            handler = _AccessFile(where, encoding="utf-8")
        except OSError as error:
            raise OptionInvalid("--access-log", f"cannot write {where}: {error.strerror}") from None
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("kvherd.access")
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)


def is_important(line: str) -> bool:
    """Whether a line of a part's log, or a command's last word, is one an operator must see."""
    return line.startswith("kvherd: ") or not IMPORTANT.isdisjoint(line.split(" ", 3)[:3])
