"""Finds stop strings in text that comes in pieces, and holds back only what may still become one."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Passed:
    """`text` may be shown. `matched` is the stop string that came right after it, if one did: the answer's end."""

    text: str
    matched: str | None = None


class StopMatcher:
    """The stop string that is complete first wins; of several complete at once, the longest.

    What `feed` and `finish` return does not depend on how the text was cut into pieces, put together. The cost is
    linear in the text.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._runs = [_Run(stop) for stop in sorted(stops, key=len, reverse=True)]
        self._held = ""

    def feed(self, text: str) -> Passed:
        """Take further text. Nothing may be fed after a match."""
        if not self._runs:
            return Passed(text)
        text, known = self._held + text, len(self._held)
        for position in range(known, len(text)):
            matched = self._advance(text[position])
            if matched is not None:
                self._held = ""
                return Passed(text[: position + 1 - len(matched)], matched)
        begun = max(run.length for run in self._runs)
        self._held = text[len(text) - begun :]
        return Passed(text[: len(text) - begun])

    def finish(self) -> str:
        """Return what was held back: no more text comes, so it did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        matched = None
        for run in self._runs:
            if run.advance(character) and matched is None:
                matched = run.stop
        return matched


class _Run:
    """How much of one stop string the text ends with (Knuth, Morris and Pratt)."""

    __slots__ = ("_falls", "length", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        self._falls = _falls(stop)

    def advance(self, character: str) -> bool:
        length = self.length
        while length and self.stop[length] != character:
            length = self._falls[length]
        self.length = length + (self.stop[length] == character)
        return self.length == len(self.stop)


def _falls(stop: str) -> list[int]:
    """For each length, the longest shorter beginning of `stop` that its first `length` characters end with."""
    falls = [0, 0]
    length = 0
    for character in stop[1:]:
        while length and stop[length] != character:
            length = falls[length]
        length += stop[length] == character
        falls.append(length)
    return falls
