"""Blocks whose parent is not known: remembered without credit, with all that will be needed to name them once it is."""

from dataclasses import dataclass, field

from kvherd.core.ids import EngineHash
from kvherd.core.kv.events import ExtraKey


@dataclass(frozen=True, slots=True)
class Orphan:
    parent: EngineHash
    tokens: bytes
    extra_keys: tuple[ExtraKey, ...]


@dataclass(slots=True)
class Orphans:
    """Every orphan of one cache, by its own hash and by its parent's."""

    by_hash: dict[EngineHash, Orphan] = field(default_factory=dict)
    by_parent: dict[EngineHash, dict[EngineHash, None]] = field(default_factory=dict)

    def add(self, block: EngineHash, orphan: Orphan) -> None:
        self.by_hash[block] = orphan
        self.by_parent.setdefault(orphan.parent, {})[block] = None

    def pop(self, block: EngineHash) -> Orphan:
        """Raises `KeyError` if it is none."""
        orphan = self.by_hash.pop(block)
        siblings = self.by_parent[orphan.parent]
        del siblings[block]
        if not siblings:
            del self.by_parent[orphan.parent]
        return orphan

    def children(self, parent: EngineHash) -> list[EngineHash]:
        return list(self.by_parent.get(parent, ()))

    def clear(self) -> None:
        self.by_hash.clear()
        self.by_parent.clear()
