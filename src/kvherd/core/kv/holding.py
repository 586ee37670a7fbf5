"""What one cache holds: blocks as they are, small pages folded, and each size by itself.

No chain goes from one size to another, so whatever a publisher mixes, a block of another size is an orphan there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvherd.core.ids import EngineHash
from kvherd.core.kv.bigrams import next_token
from kvherd.core.kv.credits import Credits
from kvherd.core.kv.events import BlocksRemoved, BlocksStored, Tier
from kvherd.core.kv.hashing import TOKEN_BYTES, Namer, PrefixHasher
from kvherd.core.kv.held_blocks import HeldBlocks
from kvherd.core.kv.held_pages import HeldPages
from kvherd.core.kv.pages import folded_block


@dataclass(slots=True)
class Holding:
    """One holder's blocks. `capped`: more than one copy of a block in one tier counts as one."""

    hasher: PrefixHasher
    model: str
    credits: Credits
    capped: bool = False
    bigrams: bool = False
    """Whether its blocks are of pairs of tokens (`core/kv/bigrams`)."""
    _sizes: dict[int, HeldBlocks | HeldPages] = field(default_factory=dict)

    def store(self, event: BlocksStored) -> None:
        if event.extra_keys and not self.bigrams:
            self.bigrams = next_token(event.extra_keys[0]) is not None
        (self._sizes.get(event.block_size) or self._open(event.block_size)).store(event)

    def remove(self, event: BlocksRemoved) -> None:
        for held in self._sizes.values():
            held.remove(event)

    def cap(self) -> None:
        """Count at most one copy of a block in each tier, until `clear`."""
        self.capped = True
        for held in self._sizes.values():
            held.cap()

    def clear(self) -> None:
        for held in self._sizes.values():
            held.release()
        self._sizes.clear()
        self.capped = self.bigrams = False

    def beyond_device(self) -> bool:
        """Whether anything is held in another tier than the device's."""
        return any(held.beyond_device() for held in self._sizes.values())

    def contents(self) -> Mapping[EngineHash, Mapping[Tier, int]]:
        """Every block or page held, named or not, and its copies."""
        return {block: copies for held in self._sizes.values() for block, copies in held.contents().items()}

    def _open(self, size: int) -> HeldBlocks | HeldPages:
        folded = folded_block(size)
        namer = Namer(self.hasher, self.model, folded)
        if folded == size:
            self._sizes[size] = HeldBlocks(namer, self.credits, self.capped)
        else:
            self._sizes[size] = HeldPages(namer, self.credits, size * TOKEN_BYTES, self.capped)
        return self._sizes[size]
