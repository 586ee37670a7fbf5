"""Logs of a long-running process: one line each, on standard error."""

import logging
import sys
from enum import StrEnum

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


def is_important(line: str) -> bool:
    """Whether a line of a part's log, or a command's last word, is one an operator must see."""
    return line.startswith("kvherd: ") or not IMPORTANT.isdisjoint(line.split(" ", 3)[:3])
