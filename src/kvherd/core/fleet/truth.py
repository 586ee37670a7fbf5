"""Predicted against reported cached tokens, for one worker.

Three answers: decided (right or wrong), undecided (something else happened there that may have changed what was cached
between the prediction and the prefill), unavailable (the answer did not say what was cached).
"""

from collections import Counter, deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

WINDOW: Final = 200
MOST_WRONG: Final = 2
"""1 % of the window. More than that are too many, however few were decided."""

PAUSE_S: Final = 60.0
"""An entry is rebuilt at most that often: what a rebuild does not mend, the next one will not either."""


class Verdict(StrEnum):
    RIGHT = "right"
    WRONG = "wrong"
    UNDECIDED = "undecided"
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True)
class WrongAnswer:
    """`at_s` is the time of day, in seconds since 1970."""

    predicted: int
    reported: int
    at_s: float


class Claim:
    """That so many tokens of one prompt are cached where it was sent, in blocks of `block_size`.

    `exact` False: at least so many. The worker may hold blocks nobody told of, or its ranks hold different ones. No
    dataclass, as one is made for every request.
    """

    __slots__ = ("block_size", "exact", "tokens")

    def __init__(self, tokens: int, block_size: int, exact: bool = True) -> None:
        self.tokens = tokens
        self.block_size = block_size
        self.exact = exact

    def in_blocks(self, reported: int) -> int:
        """An engine of small pages reports more finely than its blocks are credited."""
        return reported // self.block_size * self.block_size if self.block_size else reported

    def judged(self, reported: int | None, *, disturbed: str) -> tuple[Verdict, str]:
        """The verdict on an answer, and why if it is undecided. `disturbed` says what came in between, if anything."""
        if reported is None:
            return Verdict.UNAVAILABLE, ""
        if disturbed:
            return Verdict.UNDECIDED, disturbed
        told = self.in_blocks(reported)
        if told == self.tokens:
            return Verdict.RIGHT, ""
        if told > self.tokens and not self.exact:
            return Verdict.UNDECIDED, "incomplete"
        return Verdict.WRONG, ""


@dataclass(slots=True)
class Truth:
    """Counts since the beginning, and the share of wrong predictions over the last 200 decided answers.

    `tells` is whether the last usage told the cached tokens, None before the first; `hits_told`, whether any told some;
    `tells_unasked`, whether a stream that was not asked to told its usage.
    """

    decided: int = 0
    wrong: int = 0
    unavailable: int = 0
    undecided_by: Counter[str] = field(default_factory=Counter)
    predicted_tokens: int = 0
    reported_tokens: int = 0
    rebuilds: int = 0
    tells: bool | None = None
    hits_told: bool = False
    tells_unasked: bool | None = None
    last_wrong: WrongAnswer | None = None
    _window: deque[bool] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _rebuilt_s: float | None = None

    def answered(self, claim: Claim, reported: int | None, *, disturbed: str = "", at_s: float = 0.0) -> Verdict:
        """`reported` is what the answer's usage said, None if it said nothing; `at_s` the time of day."""
        verdict, why = claim.judged(reported, disturbed=disturbed)
        match verdict:
            case Verdict.UNAVAILABLE:
                self.unavailable += 1
            case Verdict.UNDECIDED:
                self.undecided_by[why] += 1
            case Verdict.RIGHT | Verdict.WRONG:
                self._decide(claim, reported or 0, wrong=verdict is Verdict.WRONG, at_s=at_s)
        return verdict

    def used(self, cached: int | None) -> None:
        """An answer said what it cost, with or without the cached tokens."""
        self.tells = cached is not None
        self.hits_told = self.hits_told or bool(cached)

    def restarted(self) -> None:
        """Another process may tell otherwise."""
        self.tells, self.hits_told, self.tells_unasked = None, False, None

    @property
    def undecided(self) -> int:
        return self.undecided_by.total()

    @property
    def recent(self) -> int:
        """How many decided answers the error rate is of."""
        return len(self._window)

    @property
    def error_rate(self) -> float:
        """0 while nothing is decided."""
        return sum(self._window) / len(self._window) if self._window else 0.0

    @property
    def too_wrong(self) -> bool:
        """Above 1 % of the window: the index is not to be trusted there."""
        return sum(self._window) > MOST_WRONG

    def rebuild_due(self, now_s: float) -> bool:
        return self.too_wrong and (self._rebuilt_s is None or now_s - self._rebuilt_s >= PAUSE_S)

    def rebuilt(self, now_s: float) -> None:
        """The worker's entry starts from zero, and so does its window."""
        self.rebuilds += 1
        self._rebuilt_s = now_s
        self._window.clear()

    @property
    def available(self) -> bool:
        """Whether this worker was ever seen to report its cached tokens."""
        return self.decided + self.undecided > 0

    def _decide(self, claim: Claim, reported: int, *, wrong: bool, at_s: float) -> None:
        self.decided += 1
        self.predicted_tokens += claim.tokens
        self.reported_tokens += reported
        self._window.append(wrong)
        if wrong:
            self.wrong += 1
            self.last_wrong = WrongAnswer(claim.tokens, reported, at_s)
