"""What one cache holds, by its engine's own hashes, and the names those hashes stand for."""

from dataclasses import dataclass, field
from typing import Final

from kvherd.core.ids import EngineHash, PrefixHash
from kvherd.core.kv.events import BlocksRemoved, BlocksStored, ExtraKey, Tier
from kvherd.core.kv.hashing import TOKEN_BYTES, PrefixHasher, token_bytes

Copies = dict[Tier, int]
"""How many copies a tier has; a tier without any is absent."""

_ONE_ON_DEVICE: Final[Copies] = {Tier.DEVICE: 1}


@dataclass(frozen=True, slots=True)
class _Orphan:
    """A block whose parent is not known: all that will be needed to name it once the parent is."""

    parent: EngineHash
    tokens: bytes
    extra_keys: tuple[ExtraKey, ...]


@dataclass(slots=True)
class Holding:
    """One holder's blocks. `masks` is shared by all holders: name → one bit for each that has it on its device."""

    hasher: PrefixHasher
    model: str
    bit: int
    masks: dict[PrefixHash, int]
    credited: int = 0
    capped: bool = False
    """Whether more than one copy of a block in one tier counts as one."""
    _names: dict[EngineHash, PrefixHash] = field(default_factory=dict)
    _orphans: dict[EngineHash, _Orphan] = field(default_factory=dict)
    _children: dict[EngineHash, dict[EngineHash, None]] = field(default_factory=dict)
    _copies: dict[EngineHash, Copies] = field(default_factory=dict)
    """Only of blocks that are held otherwise than once, on the device: most are not, and cost nothing here."""
    _twins: dict[PrefixHash, int] = field(default_factory=dict)
    """Names that further engine hashes stand for too, and how many."""

    def store(self, event: BlocksStored) -> None:
        tokens = token_bytes(event.token_ids)
        block_bytes = event.block_size * TOKEN_BYTES
        parent = self._parent_name(event)
        if parent is None:
            self._store_orphans(event, tokens, block_bytes)
            return
        names = self.hasher.extend(parent, tokens, block_bytes, event.extra_keys)
        for block, name in zip(event.block_hashes, names, strict=True):
            self._store_named(block, name, event.tier)

    def remove(self, event: BlocksRemoved) -> None:
        """Blocks that are not held are ignored: they were stored before anyone listened."""
        tier = event.tier
        for block in event.block_hashes:
            if block not in self._names and block not in self._orphans:
                continue
            if tier is Tier.DEVICE and block not in self._copies:
                self._forget(block)
            else:
                self._remove_copy(block, tier)

    def cap(self) -> None:
        """Count at most one copy of a block in each tier, until `clear`."""
        self.capped = True
        for block, copies in list(self._copies.items()):
            self._copies[block] = dict.fromkeys(copies, 1)
            self._keep_copies(block, self._copies[block])

    def clear(self) -> None:
        masks, keep = self.masks, ~self.bit
        for block, name in self._names.items():
            if self._on_device(block) and name in masks:
                self._write_mask(name, masks[name] & keep)
        for held in (self._names, self._orphans, self._children, self._copies, self._twins):
            held.clear()
        self.credited = 0
        self.capped = False

    def contents(self) -> dict[EngineHash, Copies]:
        """Every block held, named or not, and its copies."""
        blocks = (*self._names, *self._orphans)
        return {block: dict(self._copies.get(block, _ONE_ON_DEVICE)) for block in blocks}

    def _parent_name(self, event: BlocksStored) -> PrefixHash | None:
        if event.parent_hash is None:
            return self.hasher.root(model=self.model, block_size=event.block_size, lora=event.lora, salt=event.salt)
        return self._names.get(event.parent_hash)

    def _store_named(self, block: EngineHash, name: PrefixHash, tier: Tier) -> None:
        if block in self._names:
            self._add_copy(block, tier, name)
            return
        orphan = self._orphans.pop(block, None)
        self._names[block] = name
        if orphan is not None:
            self._leave_parent(block, orphan.parent)
            if self._on_device(block):
                self._credit(name)
            self._add_copy(block, tier, name)
        elif tier is not Tier.DEVICE:
            self._copies[block] = {tier: 1}
        else:
            self._credit(name)
        if block in self._children:
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
                named = self.hasher.extend(name, own, block_bytes, (extra_keys,))
                self._store_named(block, named[0], event.tier)
            elif block in self._names:
                self._add_copy(block, event.tier, self._names[block])
            elif block in self._orphans:
                self._add_copy(block, event.tier, None)
            else:
                self._orphans[block] = _Orphan(parent, own, extra_keys)
                self._children.setdefault(parent, {})[block] = None
                if event.tier is not Tier.DEVICE:
                    self._copies[block] = {event.tier: 1}
            parent = block

    def _adopt(self, block: EngineHash) -> None:
        """Name the orphans behind a block that has just been named."""
        named = [block]
        while named:
            parent = named.pop()
            for child in self._children.pop(parent, ()):
                orphan = self._orphans.pop(child)
                (name,) = self.hasher.extend(
                    self._names[parent], orphan.tokens, len(orphan.tokens), (orphan.extra_keys,)
                )
                self._names[child] = name
                if self._on_device(child):
                    self._credit(name)
                named.append(child)

    def _add_copy(self, block: EngineHash, tier: Tier, name: PrefixHash | None) -> None:
        copies = self._copies.setdefault(block, dict(_ONE_ON_DEVICE))
        had = copies.get(tier, 0)
        copies[tier] = 1 if self.capped else had + 1
        if tier is Tier.DEVICE and not had and name is not None:
            self._credit(name)
        self._keep_copies(block, copies)

    def _remove_copy(self, block: EngineHash, tier: Tier) -> None:
        copies = self._copies.setdefault(block, dict(_ONE_ON_DEVICE))
        had = copies.pop(tier, 0)
        if had > 1:
            copies[tier] = had - 1
        elif had == 1 and tier is Tier.DEVICE and block in self._names:
            self._discredit(self._names[block])
        if copies:
            self._keep_copies(block, copies)
        else:
            del self._copies[block]
            self._forget_uncredited(block)

    def _keep_copies(self, block: EngineHash, copies: Copies) -> None:
        if copies == _ONE_ON_DEVICE:
            del self._copies[block]

    def _forget(self, block: EngineHash) -> None:
        """The only copy, on the device, is gone."""
        if block in self._names:
            self._discredit(self._names[block])
        self._forget_uncredited(block)

    def _forget_uncredited(self, block: EngineHash) -> None:
        if self._names.pop(block, None) is None:
            self._leave_parent(block, self._orphans.pop(block).parent)

    def _leave_parent(self, block: EngineHash, parent: EngineHash) -> None:
        siblings = self._children[parent]
        del siblings[block]
        if not siblings:
            del self._children[parent]

    def _on_device(self, block: EngineHash) -> bool:
        return Tier.DEVICE in self._copies.get(block, _ONE_ON_DEVICE)

    def _credit(self, name: PrefixHash) -> None:
        mask = self.masks.get(name, 0)
        self.credited += 1
        if mask & self.bit:
            self._twins[name] = self._twins.get(name, 0) + 1
        else:
            self.masks[name] = mask | self.bit

    def _discredit(self, name: PrefixHash) -> None:
        self.credited -= 1
        twins = self._twins.get(name, 0)
        if twins > 1:
            self._twins[name] = twins - 1
        elif twins == 1:
            del self._twins[name]
        else:
            self._write_mask(name, self.masks[name] & ~self.bit)

    def _write_mask(self, name: PrefixHash, mask: int) -> None:
        if mask:
            self.masks[name] = mask
        else:
            del self.masks[name]
