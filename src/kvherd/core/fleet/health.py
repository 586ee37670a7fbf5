"""A judge of one worker's health, from probes and from what requests met on their way."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Up:
    """It answered last time."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """It failed lately, too few times to be sure; it still serves."""

    reason: str


@dataclass(frozen=True, slots=True)
class Down:
    """It takes no request until a probe succeeds."""

    reason: str


Health = Up | Suspect | Down

_UP: Final = Up()


@dataclass(slots=True)
class HealthJudge:
    """Counts failures in a row: the first makes a worker `Suspect`, `down_after` of them `Down`.

    A connection that is refused is proof enough: nobody listens there, so the worker is `Down` at once.
    Only a successful probe or answer makes it `Up` again.
    """

    down_after: int = 3
    _failures: int = 0
    _reason: str = ""

    @property
    def down(self) -> bool:
        return self._failures >= self.down_after

    @property
    def verdict(self) -> Health:
        if self._failures == 0:
            return _UP
        if self._failures < self.down_after:
            return Suspect(self._reason)
        return Down(self._reason)

    def succeeded(self) -> Health:
        self._failures = 0
        return self.verdict

    def failed(self, reason: str, *, certain: bool = False) -> Health:
        """`certain`: what was seen leaves no doubt, such as a refused connection."""
        self._failures = self.down_after if certain else self._failures + 1
        self._reason = reason
        return self.verdict
