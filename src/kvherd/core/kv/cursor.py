"""One rank's place in the sequence of one publisher's life, and the judge of what may come next.

Numbers alone cannot tell a repeated batch from a new life that counts from 0 again, so every admitted batch leaves a
mark (any fingerprint of its bytes), and what comes under an old number is compared with it.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

MARKS_KEPT: Final = 16_384
"""A replay may run thousands of batches ahead of the live stream; those that then come late are still the same ones."""
BIRTH: Final = -1
"""`last` of a publisher that has sent nothing yet: number 0 is next."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """It is the next one; the cursor stands on it now."""


@dataclass(frozen=True, slots=True)
class Repeated:
    """It was admitted before; leave it out."""


@dataclass(frozen=True, slots=True)
class Missing:
    """Batches `first`..`last` did not come; the cursor did not move."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Restarted:
    """It is from another life of the publisher; the cursor did not move, and will not: begin a new one."""


_ADMITTED: Final = Admitted()

Verdict = Admitted | Repeated | Missing | Restarted


@dataclass(slots=True)
class RankCursor:
    """Admits every batch of one life once and in order.

    `last` is the number of the last admitted batch; None before the first, when any number may come.
    """

    last: int | None = None
    _marks: OrderedDict[int, int] = field(default_factory=OrderedDict)

    def judge(self, sequence: int, mark: int) -> Verdict:
        """Say what `sequence` is, and step onto it if it is next."""
        if self.last is None or sequence == self.last + 1:
            self._step(sequence, mark)
            return _ADMITTED
        if sequence > self.last:
            return Missing(self.last + 1, sequence - 1)
        return Repeated() if self.proves(sequence, mark) else Restarted()

    def proves(self, sequence: int, mark: int) -> bool:
        """Whether a batch is one that was admitted here, so that its sender is the same publisher."""
        return self._marks.get(sequence) == mark

    def precedes(self, sequence: int) -> bool:
        """Whether it is older than all that is remembered here: there is nothing to compare it with."""
        return bool(self._marks) and sequence < next(iter(self._marks))

    def _step(self, sequence: int, mark: int) -> None:
        self.last = sequence
        self._marks[sequence] = mark
        if len(self._marks) > MARKS_KEPT:
            self._marks.popitem(last=False)
