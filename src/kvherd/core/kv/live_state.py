"""What one rank of an engine holds, as far as its events said: enough to say it all again to a late subscriber."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import assert_never

from kvherd.core.ids import EngineHash
from kvherd.core.kv.events import BlocksRemoved, BlocksStored, CacheCleared, KvEvent, Tier
from kvherd.core.kv.hashing import TOKEN_BYTES, token_bytes
from kvherd.core.kv.retelling import PLAIN, Held, HeldBlock, Retelling, as_store


@dataclass(slots=True)
class LiveState:
    """Every block that is held, with its copies."""

    copies: int = 0
    """How many copies of blocks are held."""
    _blocks: dict[EngineHash, HeldBlock] = field(default_factory=dict)
    _widest: int = 1
    """No block has more tokens."""
    _held: dict[EngineHash, Held] = field(default_factory=dict)
    """Only of blocks that are held otherwise than `PLAIN`: most are not, and cost nothing here."""

    def apply(self, events: Iterable[KvEvent], *, capped: bool = False) -> None:
        """Let the events happen in order. `capped`: of a block, each tier has one copy at most, until a clear."""
        for event in events:
            match event:
                case BlocksStored():
                    self._store(event, capped=capped)
                case BlocksRemoved():
                    self._remove(event)
                case CacheCleared():
                    self._blocks.clear()
                    self._held.clear()
                    self.copies, self._widest = 0, 1
                    capped = False
                case _:
                    assert_never(event)

    def __len__(self) -> int:
        """How many different blocks are held."""
        return len(self._blocks)

    def retell(self, limit: int) -> Retelling:
        """Stores that make an empty state equal to this one of now, whatever happens to it later."""
        return Retelling(self._blocks.copy(), self._held.copy(), self.copies, self._widest, limit)

    def find(self, block: EngineHash) -> BlocksStored | None:
        """The store that would tell of one copy of `block`, or None if it is not held."""
        if block not in self._blocks:
            return None
        parent, tokens = self._blocks[block]
        return as_store([block], parent, [tokens], self._held.get(block, PLAIN))

    def _store(self, event: BlocksStored, *, capped: bool) -> None:
        blocks, size = self._blocks, event.block_size * TOKEN_BYTES
        tokens = token_bytes(event.token_ids)
        plain = event.tier is Tier.DEVICE and event.lora is event.salt is None and not event.extra_keys
        held = PLAIN if plain else Held(event.lora, event.salt, (), (event.tier,))
        parent, start, before = event.parent_hash, 0, len(blocks)
        capped = capped or event.may_repeat
        for number, block in enumerate(event.block_hashes):
            if block in blocks:
                self._add_copy(block, event.tier, capped=capped)
            else:
                blocks[block] = (parent, tokens[start : start + size])
                if not plain:
                    self._hold(block, held._replace(extra_keys=event.extra_keys[number]) if event.extra_keys else held)
            parent = block
            start += size
        self.copies += len(blocks) - before
        self._widest = max(self._widest, event.block_size)

    def _add_copy(self, block: EngineHash, tier: Tier, *, capped: bool) -> None:
        held = self._held.get(block, PLAIN)
        if not (capped and tier in held.tiers):
            self._hold(block, held._replace(tiers=(*held.tiers, tier)))
            self.copies += 1

    def _remove(self, event: BlocksRemoved) -> None:
        for block in event.block_hashes:
            held = self._held.get(block, PLAIN)
            if block not in self._blocks or event.tier not in held.tiers:
                continue
            self.copies -= 1
            if len(held.tiers) == 1:
                del self._blocks[block]
                self._held.pop(block, None)
            else:
                tiers = list(held.tiers)
                tiers.remove(event.tier)
                self._hold(block, held._replace(tiers=tuple(tiers)))

    def _hold(self, block: EngineHash, held: Held) -> None:
        if held == PLAIN:
            self._held.pop(block, None)
        else:
            self._held[block] = held
