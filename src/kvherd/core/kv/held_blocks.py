"""The blocks that one cache holds, by its engine's own hashes, and the names those hashes stand for."""

from dataclasses import dataclass, field
from typing import Final, TypeAlias

from kvherd.core.ids import EngineHash, PrefixHash
from kvherd.core.kv.credits import Credits
from kvherd.core.kv.events import BlocksRemoved, BlocksStored, Tier
from kvherd.core.kv.hashing import TOKEN_BYTES, Namer, token_bytes
from kvherd.core.kv.orphans import Orphan, Orphans

Copies: TypeAlias = dict[Tier, int]
"""How many copies a tier has; a tier without any is absent."""

ONE_ON_DEVICE: Final[Copies] = {Tier.DEVICE: 1}


@dataclass(slots=True)
class HeldBlocks:
    """Blocks of one size, each with a name of its own."""

    namer: Namer
    credits: Credits
    capped: bool = False
    _names: dict[EngineHash, PrefixHash] = field(default_factory=dict)
    _orphans: Orphans = field(default_factory=Orphans)
    _copies: dict[EngineHash, Copies] = field(default_factory=dict)
    """Only of blocks that are held otherwise than once, on the device: most are not, and cost nothing here."""

    def store(self, event: BlocksStored) -> None:
        tokens = token_bytes(event.token_ids)
        parent = self._parent_name(event)
        if parent is None:
            self._store_orphans(event, tokens, event.block_size * TOKEN_BYTES)
            return
        names = self.namer.hasher.extend(parent, tokens, event.block_size * TOKEN_BYTES, event.extra_keys)
        capped = self.capped or event.may_repeat
        if event.tier is Tier.DEVICE and not self._orphans.by_hash:
            self._store_on_device(event.block_hashes, names, capped=capped)
            return
        for block, name in zip(event.block_hashes, names, strict=True):
            self._store_named(block, name, event.tier, capped=capped)

    def remove(self, event: BlocksRemoved) -> None:
        """Blocks that are not held are ignored: they were stored before anyone listened."""
        tier, names, copies = event.tier, self._names, self._copies
        for block in event.block_hashes:
            if tier is Tier.DEVICE and block in names and block not in copies:
                self.credits.take(names.pop(block))
            elif block in names or block in self._orphans.by_hash:
                self._remove_copy(block, tier)

    def cap(self) -> None:
        self.capped = True
        for block, copies in list(self._copies.items()):
            self._keep_copies(block, dict.fromkeys(copies, 1))

    def release(self) -> None:
        """Take back the credit of every block."""
        for block, name in self._names.items():
            if self._on_device(block):
                self.credits.take(name)

    def beyond_device(self) -> bool:
        """Whether anything is held in another tier too, or only there."""
        return any(tier is not Tier.DEVICE for copies in self._copies.values() for tier in copies)

    def contents(self) -> dict[EngineHash, Copies]:
        """Every block held, named or not, and its copies."""
        blocks = (*self._names, *self._orphans.by_hash)
        return {block: dict(self._copies.get(block, ONE_ON_DEVICE)) for block in blocks}

    def _parent_name(self, event: BlocksStored) -> PrefixHash | None:
        if event.parent_hash is None:
            return self.namer.root(event.lora, event.salt)
        return self._names.get(event.parent_hash)

    def _store_on_device(self, blocks: tuple[EngineHash, ...], names: list[PrefixHash], *, capped: bool) -> None:
        """What nearly every store is, in one loop: a copy on the device, and no orphan that might wait for it."""
        known, masks, bit, changes = self._names, self.credits.masks, self.credits.bit, self.credits.changes
        for block, name in zip(blocks, names, strict=True):
            if block in known:
                self._add_copy(block, Tier.DEVICE, known[block], capped=capped)
                continue
            known[block] = name
            mask = masks.get(name, 0)
            if mask & bit:
                self.credits.give(name)
            else:
                masks[name] = mask | bit
                self.credits.count += 1
                changes.note(name)

    def _store_named(self, block: EngineHash, name: PrefixHash, tier: Tier, *, capped: bool) -> None:
        if block in self._names:
            self._add_copy(block, tier, self._names[block], capped=capped)
            return
        self._names[block] = name
        if block in self._orphans.by_hash:
            self._orphans.pop(block)
            if self._on_device(block):
                self.credits.give(name)
            self._add_copy(block, tier, name, capped=capped)
        elif tier is not Tier.DEVICE:
            self._copies[block] = {tier: 1}
        else:
            self.credits.give(name)
        self._adopt(block)

    def _store_orphans(self, event: BlocksStored, tokens: bytes, block_bytes: int) -> None:
        """Remember what cannot be named yet; from the first block that is named already, go on naming."""
        assert event.parent_hash is not None
        parent = event.parent_hash
        for number, block in enumerate(event.block_hashes):
            own = tokens[number * block_bytes : (number + 1) * block_bytes]
            extra_keys = event.extra_keys[number] if event.extra_keys else ()
            name = self._names.get(parent)
            if name is not None:
                named = self.namer.hasher.extend(name, own, block_bytes, (extra_keys,))
                self._store_named(block, named[0], event.tier, capped=self.capped)
            elif block in self._names:
                self._add_copy(block, event.tier, self._names[block], capped=self.capped)
            elif block in self._orphans.by_hash:
                self._add_copy(block, event.tier, None, capped=self.capped)
            else:
                self._orphans.add(block, Orphan(parent, own, extra_keys))
                if event.tier is not Tier.DEVICE:
                    self._copies[block] = {event.tier: 1}
            parent = block

    def _adopt(self, block: EngineHash) -> None:
        """Name the orphans behind a block that has just been named."""
        named = [block]
        while named:
            parent = named.pop()
            for child in self._orphans.children(parent):
                orphan = self._orphans.pop(child)
                (name,) = self.namer.hasher.extend(
                    self._names[parent], orphan.tokens, len(orphan.tokens), (orphan.extra_keys,)
                )
                self._names[child] = name
                if self._on_device(child):
                    self.credits.give(name)
                named.append(child)

    def _add_copy(self, block: EngineHash, tier: Tier, name: PrefixHash | None, *, capped: bool) -> None:
        copies = self._copies.get(block) or dict(ONE_ON_DEVICE)
        had = copies.get(tier, 0)
        copies[tier] = max(had, 1) if capped else had + 1
        if tier is Tier.DEVICE and not had and name is not None:
            self.credits.give(name)
        self._keep_copies(block, copies)

    def _remove_copy(self, block: EngineHash, tier: Tier) -> None:
        copies = self._copies.get(block) or dict(ONE_ON_DEVICE)
        had = copies.pop(tier, 0)
        if had > 1:
            copies[tier] = had - 1
        elif had == 1 and tier is Tier.DEVICE and block in self._names:
            self.credits.take(self._names[block])
        self._keep_copies(block, copies)
        if not copies:
            self._forget(block)

    def _keep_copies(self, block: EngineHash, copies: Copies) -> None:
        if copies and copies != ONE_ON_DEVICE:
            self._copies[block] = copies
        else:
            self._copies.pop(block, None)

    def _forget(self, block: EngineHash) -> None:
        if self._names.pop(block, None) is None:
            self._orphans.pop(block)

    def _on_device(self, block: EngineHash) -> bool:
        return Tier.DEVICE in self._copies.get(block, ONE_ON_DEVICE)
