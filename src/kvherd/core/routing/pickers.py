"""How one of several candidates is taken, given their costs. Chance comes in as dice."""

from collections.abc import Callable, Sequence
from hashlib import blake2b
from math import log
from typing import Protocol

from kvherd.core.ids import WorkerId
from kvherd.core.routing.candidate import Ask, Candidate

Dice = Callable[[], float]
"""Throws a number in 0..1, 1 excluded."""


class Costed:
    """A candidate, what each scorer charges for it, by name, in seconds, and all of that by its weight."""

    __slots__ = ("candidate", "costs", "total_s")

    def __init__(self, candidate: Candidate, costs: list[tuple[str, float]], total_s: float) -> None:
        self.candidate = candidate
        self.costs = costs
        self.total_s = total_s

    @property
    def load(self) -> float:
        return self.candidate.load / self.candidate.weight


class Picker(Protocol):
    def __call__(self, costed: Sequence[Costed], ask: Ask, dice: Dice) -> Costed:
        """Take one of `costed`, which is not empty."""
        ...


def best(costed: Sequence[Costed], ask: Ask, dice: Dice) -> Costed:
    """The cheapest; among equals the least loaded, among those chance, by weight."""
    first = costed[0]
    least_s, equals = first.total_s, [first]
    for at in range(1, len(costed)):
        one = costed[at]
        if one.total_s < least_s:
            least_s, equals = one.total_s, [one]
        elif one.total_s == least_s:
            equals.append(one)
    if len(equals) > 1:
        least = min([one.load for one in equals])
        equals = [one for one in equals if one.load == least]
    throw = dice()
    return equals[0] if len(equals) == 1 else _by_weight(equals, throw)


def two_choices(costed: Sequence[Costed], ask: Ask, dice: Dice) -> Costed:
    """The better of two taken by chance: nearly as good as the best, and it does not send a whole burst to one."""
    if len(costed) == 1:
        return costed[0]
    first = int(dice() * len(costed))
    second = int(dice() * (len(costed) - 1))
    return best([costed[first], costed[second + (second >= first)]], ask, dice)


class InTurn:
    """Each in turn, by the order of their names, whoever comes and goes meanwhile; with weights, as often as these say,
    evenly spread.
    """

    def __init__(self) -> None:
        self._last: tuple[str, int] = ("", -1)
        self._owed: dict[tuple[str, int], float] = {}

    def __call__(self, costed: Sequence[Costed], ask: Ask, dice: Dice) -> Costed:
        if any(one.candidate.weight != costed[0].candidate.weight for one in costed):
            return self._most_owed(costed)
        after = [one for one in costed if _name(one) > self._last]
        chosen = min(after or costed, key=_name)
        self._last = _name(chosen)
        return chosen

    def next_of(self, able: list[WorkerId]) -> WorkerId:
        """The same for names of workers that have no ranks and count alike; `able` is not empty."""
        last = self._last[0]
        first = after = able[0]
        for name in able:
            first = min(first, name)
            if name > last and (name < after or after <= last):
                after = name
        chosen = after if after > last else first
        self._last = (chosen, -1)
        return chosen

    def _most_owed(self, costed: Sequence[Costed]) -> Costed:
        """At each turn everyone is owed its weight, and who is served pays what all were owed."""
        self._owed = {_name(one): self._owed.get(_name(one), 0.0) + one.candidate.weight for one in costed}
        chosen = max(sorted(costed, key=_name), key=lambda one: self._owed[_name(one)])
        self._owed[_name(chosen)] -= sum(one.candidate.weight for one in costed)
        return chosen


def by_affinity(costed: Sequence[Costed], ask: Ask, dice: Dice) -> Costed:
    """The same one for the same affinity; of N workers one that leaves moves 1/N of the asks (rendezvous hashing).

    An ask without affinity goes to the best.
    """
    if not ask.affinity:
        return best(costed, ask, dice)
    return max(costed, key=lambda one: _lot(ask.affinity, one))


def _name(one: Costed) -> tuple[str, int]:
    rank = one.candidate.rank
    return one.candidate.worker, -1 if rank is None else rank


def _by_weight(equals: Sequence[Costed], throw: float) -> Costed:
    left = throw * sum(one.candidate.weight for one in equals)
    for one in equals:
        left -= one.candidate.weight
        if left < 0:
            return one
    return equals[-1]


def _lot(affinity: str, one: Costed) -> float:
    """A chance c of this pair, as ln c / weight: each is the largest as often as its weight says."""
    drawn = blake2b(repr((affinity, _name(one))).encode(), digest_size=8).digest()
    chance = (int.from_bytes(drawn, "big") + 1) / (2**64 + 1)
    return log(chance) / one.candidate.weight
