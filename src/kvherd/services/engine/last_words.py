"""Lines of a child's log, and the last of them that says why it cannot go on: a critical one, or a crash's last."""

import logging
from collections.abc import Iterator

LONGEST_LINE = 4096

_LEVELS = {name: getattr(logging, name) for name in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")}


class LastWords:
    """Each line is `LEVEL text`; other lines (a crash of the interpreter) are warnings. Bounded whatever comes."""

    def __init__(self) -> None:
        self.last = ""
        self._partial = b""

    def hear(self, chunk: bytes) -> Iterator[tuple[int, str]]:
        """Yield the level and text of each line that is complete now."""
        *lines, rest = (self._partial + chunk).split(b"\n")
        self._partial = rest[-LONGEST_LINE:]
        for line in lines:
            word, _, text = line[-LONGEST_LINE:].decode(errors="replace").strip().partition(" ")
            level = _LEVELS.get(word)
            if level is None:
                text = f"{word} {text}".strip()
            if text and level in {None, logging.CRITICAL}:
                self.last = text
            if text:
                yield level or logging.WARNING, text
