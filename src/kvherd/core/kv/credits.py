"""Which names one holder has on its device, as a bit in masks that all holders share."""

from dataclasses import dataclass, field

from kvherd.core.ids import PrefixHash


@dataclass(slots=True)
class Credits:
    """`masks`: name → one bit for each holder that has it on its device; a name that nobody has is absent."""

    masks: dict[PrefixHash, int]
    bit: int
    count: int = 0
    """Blocks with credit. Several may stand for one name."""
    twins: dict[PrefixHash, int] = field(default_factory=dict)
    """Names that further blocks stand for too, and how many."""

    def give(self, name: PrefixHash) -> None:
        mask = self.masks.get(name, 0)
        self.count += 1
        if mask & self.bit:
            self.twins[name] = self.twins.get(name, 0) + 1
        else:
            self.masks[name] = mask | self.bit

    def take(self, name: PrefixHash) -> None:
        self.count -= 1
        twins = self.twins.get(name, 0)
        if twins > 1:
            self.twins[name] = twins - 1
        elif twins == 1:
            del self.twins[name]
        else:
            mask = self.masks[name] & ~self.bit
            if mask:
                self.masks[name] = mask
            else:
                del self.masks[name]
