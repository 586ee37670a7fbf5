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


def start_access_log(where: str) -> None:
    """Write the lines about requests, and nothing else, to a file, or with `-` to standard output, bare JSON each.

    The file may be moved away: a new one is begun. Raises `OptionInvalid`.
    """
    handler: logging.Handler
    if where == "-":
        handler = logging.StreamHandler(sys.stdout)
    else:
        try:
            handler = WatchedFileHandler(where, encoding="utf-8")
        except OSError as error:
            raise OptionInvalid("--access-log", f"cannot write {where}: {error.strerror}") from None
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("kvherd.access")
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)


def is_important(line: str) -> bool:
    """Whether a line of a part's log, or a command's last word, is one an operator must see."""
    return line.startswith("kvherd: ") or not IMPORTANT.isdisjoint(line.split(" ", 3)[:3])
