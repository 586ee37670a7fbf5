"""How one of several candidates is taken, given their costs. Chance comes in as dice."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

from kvherd.core.routing.candidate import Ask, Candidate

Dice = Callable[[], float]
"""Throws a number in 0..1, 1 excluded."""


@dataclass(frozen=True, slots=True)
class Costed:
    """A candidate and what each scorer charges for it, by name, in seconds."""

    candidate: Candidate
    costs: tuple[tuple[str, float], ...] = ()

    @property
    def total_s(self) -> float:
        return sum(cost for _, cost in self.costs)


class Picker(Protocol):
    def __call__(self, costed: Sequence[Costed], ask: Ask, dice: Dice) -> Costed:
        """Take one of `costed`, which is not empty."""
        ...


def best(costed: Sequence[Costed], ask: Ask, dice: Dice) -> Costed:
    """The cheapest; among equals the least loaded, among those chance."""
    cheapest = min((one.total_s, one.candidate.load) for one in costed)
    equals = [one for one in costed if (one.total_s, one.candidate.load) == cheapest]
    return equals[int(dice() * len(equals))]


def two_choices(costed: Sequence[Costed], ask: Ask, dice: Dice) -> Costed:
    """The better of two taken by chance: nearly as good as the best, and it does not send a whole burst to one."""
    if len(costed) == 1:
        return costed[0]
    first = int(dice() * len(costed))
    second = int(dice() * (len(costed) - 1))
    return best([costed[first], costed[second + (second >= first)]], ask, dice)


class InTurn:
    """Each in turn, by the order of their names, whoever comes and goes meanwhile."""

    def __init__(self) -> None:
        self._last: tuple[str, int] = ("", -1)

    def __call__(self, costed: Sequence[Costed], ask: Ask, dice: Dice) -> Costed:
        after = [one for one in costed if _name(one) > self._last]
        chosen = min(after or costed, key=_name)
        self._last = _name(chosen)
        return chosen


def by_affinity(costed: Sequence[Costed], ask: Ask, dice: Dice) -> Costed:
    """The same one for the same affinity; of N workers one that leaves moves 1/N of the asks (rendezvous hashing).

    An ask without affinity goes to the best.
    """
    if not ask.affinity:
        return best(costed, ask, dice)
    return max(costed, key=lambda one: _weight(ask.affinity, one))


def _name(one: Costed) -> tuple[str, int]:
    rank = one.candidate.rank
    return one.candidate.worker, -1 if rank is None else rank


def _weight(affinity: str, one: Costed) -> bytes:
    return blake2b(repr((affinity, _name(one))).encode(), digest_size=8).digest()
