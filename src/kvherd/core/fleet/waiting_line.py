"""A line of those who wait: fair between names by their weights, and within a name the shortest first.

Each name has a clock. Who is taken puts the clock of its name forward by its cost, divided by the name's weight; the
name whose clock is least is next, so that in a long line each is served in proportion to its weight. A name that comes
to the line is where the line is: of the time when it wanted nothing it keeps no claim, and of what it had lately the
debt. When nobody waits any more, all are even.

Within a name who costs least goes first, and each second of waiting counts like `ageing` seconds less of cost. So
nobody is overtaken by those who come more than its cost divided by `ageing` after it.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

_LEAST_COST_S = 0.001
"""What is for nothing would never put a clock forward."""


@dataclass(frozen=True, slots=True, order=True)
class Ticket(Generic[T]):
    """A place in a line. In a name, places are in order of `due` and then of coming."""

    due: float
    number: int
    name: str
    weight: float
    cost_s: float
    item: T


class WaitingLine(Generic[T]):
    """Time is the caller's: `now_s` never goes back."""

    def __init__(self, *, ageing: float = 1.0) -> None:
        self.ageing = ageing
        self._waiting: dict[str, list[Ticket[T]]] = {}
        self._clocks: dict[str, float] = {}
        self._at = 0.0
        self._number = 0
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def join(self, item: T, *, name: str = "", weight: float = 1.0, cost_s: float = 1.0, now_s: float) -> Ticket[T]:
        """Wait in line. Answers with what `leave` wants."""
        self._number += 1
        self._length += 1
        due = cost_s + self.ageing * now_s
        ticket = Ticket(due, self._number, name, weight, max(cost_s, _LEAST_COST_S), item)
        if name not in self._waiting:
            self._forget_paid()
            self._waiting[name] = []
            self._clocks[name] = max(self._at, self._clocks.get(name, 0.0))
        insort(self._waiting[name], ticket)
        return ticket

    def take(self) -> Ticket[T] | None:
        """Whose turn it is leaves the line; None if nobody waits."""
        if not self._waiting:
            return None
        name = min(self._waiting, key=self._standing)
        ticket = self._waiting[name][0]
        self._at = self._clocks[name]
        self._clocks[name] += ticket.cost_s / ticket.weight
        self._remove(ticket, 0)
        return ticket

    def leave(self, ticket: Ticket[T]) -> bool:
        """Give up a place. Whether it was still in line: harmless for one that is not."""
        line = self._waiting.get(ticket.name, [])
        place = bisect_left(line, ticket)
        if place == len(line) or line[place] is not ticket:
            return False
        self._remove(ticket, place)
        return True

    def _standing(self, name: str) -> tuple[float, int]:
        return self._clocks[name], self._waiting[name][0].number

    def _remove(self, ticket: Ticket[T], place: int) -> None:
        line = self._waiting[ticket.name]
        del line[place]
        if not line:
            del self._waiting[ticket.name]
            if not self._waiting:
                self._clocks.clear()
        self._length -= 1

    def _forget_paid(self) -> None:
        """The clocks of names that neither wait nor are ahead of the line."""
        waiting, at = self._waiting, self._at
        self._clocks = {name: clock for name, clock in self._clocks.items() if name in waiting or clock > at}
