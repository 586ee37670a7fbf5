"""Which names one holder has on its device, as a bit in masks that all holders share."""

from dataclasses import dataclass, field
from typing import Final

from kvherd.core.ids import PrefixHash

_MOST_CHANGES: Final = 4096


class Changes:
    """The names that some holder got or lost, in that order: the latest of them."""

    __slots__ = ("_forgotten", "_names")

    def __init__(self) -> None:
        self._names: list[PrefixHash] = []
        self._forgotten = 0

    def note(self, name: PrefixHash) -> None:
        if len(self._names) >= _MOST_CHANGES:
            self._forgotten += len(self._names)
            self._names.clear()
        self._names.append(name)

    @property
    def count(self) -> int:
        """How many there have been."""
        return self._forgotten + len(self._names)

    def since(self, count: int, most: int) -> list[PrefixHash] | None:
        """Those behind the first `count`; None if they are more than `most`, or not all known any more."""
        begin = count - self._forgotten
        return self._names[begin:] if begin >= 0 and len(self._names) - begin <= most else None


@dataclass(slots=True)
class Credits:
    """`masks`: name → one bit for each holder that has it on its device; a name that nobody has is absent."""

    masks: dict[PrefixHash, int]
    bit: int
    count: int = 0
    """Blocks with credit. Several may stand for one name."""
    twins: dict[PrefixHash, int] = field(default_factory=dict)
    """Names that further blocks stand for too, and how many."""
    changes: Changes = field(default_factory=Changes)
    """Of `masks`: whoever changes these notes it there."""

    def give(self, name: PrefixHash) -> None:
        mask = self.masks.get(name, 0)
        self.count += 1
        if mask & self.bit:
            self.twins[name] = self.twins.get(name, 0) + 1
        else:
            self.masks[name] = mask | self.bit
            self.changes.note(name)

    def take(self, name: PrefixHash) -> None:
        self.count -= 1
        twins = self.twins.get(name, 0)
        if twins > 1:
            self.twins[name] = twins - 1
        elif twins == 1:
            del self.twins[name]
        else:
            self.changes.note(name)
            mask = self.masks[name] & ~self.bit
            if mask:
                self.masks[name] = mask
            else:
                del self.masks[name]
