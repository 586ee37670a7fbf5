"""The queue: requests that do not run yet, or had to give their blocks back, by turn."""

from bisect import bisect_right, insort
from collections.abc import Iterator

from kvherd.core.scheduler.sequence import Sequence


def _turn(sequence: Sequence) -> int:
    return sequence.serial


class WaitingQueue:
    """Always in order of turn: one that was preempted comes back to where it was."""

    def __init__(self) -> None:
        self._queue: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._queue)

    def add(self, sequence: Sequence) -> None:
        insort(self._queue, sequence, key=_turn)

    def remove(self, sequence: Sequence) -> None:
        self._queue.remove(sequence)

    def before(self, serial: float) -> list[Sequence]:
        """Those whose turn came before `serial`."""
        return self._queue[: self.count_before(serial)]

    def count_before(self, serial: float) -> int:
        return bisect_right(self._queue, serial, key=_turn)
