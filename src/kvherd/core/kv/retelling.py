"""A state of many blocks as few stores, made when they are sent: a million blocks at once would take seconds."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from struct import unpack
from typing import Final, NamedTuple, TypeAlias

from kvherd.core.ids import EngineHash
from kvherd.core.kv.events import BlocksStored, ExtraKey, Tier
from kvherd.core.kv.hashing import TOKEN_BYTES
from kvherd.core.kv.pieces import BLOCK_OVERHEAD_TOKENS


class Held(NamedTuple):
    """What a block was computed under, and the tier of each of its copies."""

    lora: str | None
    salt: str | None
    extra_keys: tuple[ExtraKey, ...]
    tiers: tuple[Tier, ...]


PLAIN: Final = Held(None, None, (), (Tier.DEVICE,))

HeldBlock: TypeAlias = tuple[EngineHash | None, bytes]
"""Its parent and its tokens. A plain tuple, and never changed: a copy of the mapping they are in is a copy of all."""


@dataclass(frozen=True, slots=True)
class Retelling:
    """Pieces of the blocks' copies: none before its parent, if that is held too; neighbours of a chain in one store.

    `held` has the blocks that are held otherwise than `PLAIN`. No block has more tokens than `widest`. A piece weighs
    `limit` at most, unless a single block weighs more.
    """

    blocks: dict[EngineHash, HeldBlock]
    held: dict[EngineHash, Held]
    copies: int
    widest: int
    limit: int

    @property
    def count(self) -> int:
        """How many pieces there are; an empty state is told in one, which is empty."""
        return max(1, -(-self.copies // self._at_once))

    @property
    def _at_once(self) -> int:
        return max(1, self.limit // (self.widest + BLOCK_OVERHEAD_TOKENS))

    def __iter__(self) -> Iterator[tuple[BlocksStored, ...]]:
        copies = self._copies()
        for _ in range(self.count):
            piece, run = list[BlocksStored](), _Run()
            for block, tier, again in islice(copies, self._at_once):
                parent, tokens = self.blocks[block]
                held = self.held.get(block, PLAIN)
                # A run from the root adds no second copies.
                if not run.goes_on(parent, len(tokens), held, tier) or (again and run.parent is None):
                    piece += run.end()
                    run = _Run(parent, len(tokens), held, tier)
                run.blocks.append(block)
                run.tokens.append(tokens)
                run.extra_keys.append(held.extra_keys)
            yield (*piece, *run.end())

    def _copies(self) -> Iterator[tuple[EngineHash, Tier, bool]]:
        """First one copy of every block, then, marked, the second of those that have one, and so on."""
        several: list[EngineHash] = []
        for block in self._parents_first():
            tiers = self.held.get(block, PLAIN).tiers
            yield block, tiers[0], False
            if len(tiers) > 1:
                several.append(block)
        number = 1
        while several:
            for block in several:
                yield block, self.held[block].tiers[number], True
            number += 1
            several = [block for block in several if len(self.held[block].tiers) > number]

    def _parents_first(self) -> Iterator[EngineHash]:
        """From the latest block up to the first one that is told already, then down: that makes the longest runs."""
        blocks = self.blocks
        told: set[EngineHash] = set()
        for latest in reversed(blocks):
            line: list[EngineHash] = []
            step: EngineHash | None = latest
            while step is not None and step not in told and step in blocks:
                line.append(step)
                told.add(step)
                step = blocks[step][0]
            yield from reversed(line)


@dataclass(slots=True)
class _Run:
    """Blocks of one chain, each the child of the one before."""

    parent: EngineHash | None = None
    size_bytes: int = 0
    held: Held = PLAIN
    tier: Tier = Tier.DEVICE
    blocks: list[EngineHash] = field(default_factory=list)
    tokens: list[bytes] = field(default_factory=list)
    extra_keys: list[tuple[ExtraKey, ...]] = field(default_factory=list)

    def goes_on(self, parent: EngineHash | None, size_bytes: int, held: Held, tier: Tier) -> bool:
        return (
            bool(self.blocks)
            and parent == self.blocks[-1]
            and tier is self.tier
            and size_bytes == self.size_bytes
            and (held is self.held or held[:2] == self.held[:2])
        )

    def end(self) -> tuple[BlocksStored, ...]:
        """The run as a store, if it has any block."""
        if not self.blocks:
            return ()
        told = as_store(self.blocks, self.parent, self.tokens, self.held)
        keys = tuple(self.extra_keys) if any(self.extra_keys) else ()
        return (replace(told, tier=self.tier, extra_keys=keys),)


def as_store(
    blocks: Sequence[EngineHash], parent: EngineHash | None, tokens: Sequence[bytes], held: Held
) -> BlocksStored:
    """A store of one copy of each of these blocks of one size; `held` has the extra keys of the first."""
    size = len(tokens[0]) // TOKEN_BYTES
    return BlocksStored(
        block_hashes=tuple(blocks),
        parent_hash=parent,
        token_ids=unpack(f"<{size * len(blocks)}I", b"".join(tokens)),
        block_size=size,
        tier=held.tiers[0],
        lora=held.lora,
        salt=held.salt,
        extra_keys=(held.extra_keys,) if held.extra_keys else (),
    )
