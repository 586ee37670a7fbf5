"""What one rank of an engine holds, as far as its events said: enough to say it all again to a late subscriber."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from struct import unpack
from typing import assert_never

from kvherd.core.ids import EngineHash
from kvherd.core.kv.events import BlocksRemoved, BlocksStored, CacheCleared, ExtraKey, KvEvent, Tier
from kvherd.core.kv.hashing import TOKEN_BYTES, token_bytes


@dataclass(slots=True)
class _Block:
    parent: EngineHash | None
    tokens: bytes
    lora: str | None
    salt: str | None
    extra_keys: tuple[ExtraKey, ...]
    copies: dict[Tier, int]


@dataclass(slots=True)
class LiveState:
    """Every block that is held, with its copies."""

    _blocks: dict[EngineHash, _Block] = field(default_factory=dict)

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
                    capped = False
                case _:
                    assert_never(event)

    def __len__(self) -> int:
        """How many different blocks are held."""
        return len(self._blocks)

    @property
    def copies(self) -> int:
        """How many copies of blocks are held."""
        return sum(sum(block.copies.values()) for block in self._blocks.values())

    def events(self) -> Iterator[BlocksStored]:
        """Stores that make an empty state equal to this one: parents before children, one event a copy.

        The state must not change before the iterator is exhausted.
        """
        for block in self._parents_first():
            held = self._blocks[block]
            for tier, count in held.copies.items():
                for _ in range(count):
                    yield _as_event(block, held, tier)

    def _store(self, event: BlocksStored, *, capped: bool) -> None:
        tokens = token_bytes(event.token_ids)
        size = event.block_size * TOKEN_BYTES
        parent = event.parent_hash
        for number, block in enumerate(event.block_hashes):
            held = self._blocks.get(block)
            if held is None:
                own = tokens[number * size : (number + 1) * size]
                extra_keys = event.extra_keys[number] if event.extra_keys else ()
                self._blocks[block] = _Block(parent, own, event.lora, event.salt, extra_keys, {event.tier: 1})
            else:
                held.copies[event.tier] = 1 if capped else held.copies.get(event.tier, 0) + 1
            parent = block

    def _remove(self, event: BlocksRemoved) -> None:
        for block in event.block_hashes:
            held = self._blocks.get(block)
            if held is None or event.tier not in held.copies:
                continue
            if held.copies[event.tier] > 1:
                held.copies[event.tier] -= 1
                continue
            del held.copies[event.tier]
            if not held.copies:
                del self._blocks[block]

    def _parents_first(self) -> Iterator[EngineHash]:
        """Blocks in the order they came, but none before a parent that is held too."""
        told: set[EngineHash] = set()
        for block in self._blocks:
            line: list[EngineHash] = []
            step: EngineHash | None = block
            while step is not None and step in self._blocks and step not in told:
                line.append(step)
                told.add(step)
                step = self._blocks[step].parent
            yield from reversed(line)


def _as_event(block: EngineHash, held: _Block, tier: Tier) -> BlocksStored:
    size = len(held.tokens) // TOKEN_BYTES
    return BlocksStored(
        block_hashes=(block,),
        parent_hash=held.parent,
        token_ids=unpack(f"<{size}I", held.tokens),
        block_size=size,
        tier=tier,
        lora=held.lora,
        salt=held.salt,
        extra_keys=(held.extra_keys,) if held.extra_keys else (),
    )
