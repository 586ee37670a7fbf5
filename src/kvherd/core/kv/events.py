"""What an engine says about its KV cache, in kvherd's own words, whatever dialect it came in."""

from dataclasses import dataclass
from enum import StrEnum

from kvherd.core.ids import EngineHash, Rank

ExtraKey = str | int | bytes | tuple[str, int]
"""What beside tokens went into a block's hash: a text, a number, a digest, or (multimodal identifier, offset)."""


class Tier(StrEnum):
    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    EXTERNAL = "external"


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """A run of consecutive blocks now held, each the child of the one before, the first of `parent_hash`.

    `token_ids` has exactly `len(block_hashes) * block_size` tokens. `parent_hash` None means the root.
    `extra_keys` is empty or has one tuple a block.
    """

    block_hashes: tuple[EngineHash, ...]
    parent_hash: EngineHash | None
    token_ids: tuple[int, ...]
    block_size: int
    tier: Tier = Tier.DEVICE
    lora: str | None = None
    salt: str | None = None
    extra_keys: tuple[tuple[ExtraKey, ...], ...] = ()

    @property
    def may_repeat(self) -> bool:
        """Whether this may tell again of copies that were told: then it adds none to blocks that are held.

        vLLM announces a cached chain again to whoever asks for full reports, always from the root; no removal answers
        to that. Second copies come with a parent: a block is computed twice to have the logits of its last token.
        """
        return self.parent_hash is None


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """One copy of each block is gone from `tier`."""

    block_hashes: tuple[EngineHash, ...]
    tier: Tier = Tier.DEVICE


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """The rank holds nothing any more, in any tier."""


KvEvent = BlocksStored | BlocksRemoved | CacheCleared


@dataclass(frozen=True, slots=True)
class KvEventBatch:
    """Events published together, numbered densely per rank within one epoch. Order within the batch matters."""

    sequence: int
    timestamp_s: float
    rank: Rank
    events: tuple[KvEvent, ...]


@dataclass(frozen=True, slots=True)
class SnapshotChunk:
    """Part `index` of `count` of the publisher's state; applying chunk 0 begins with forgetting everything.

    `unknown_before` batches were never seen by whoever took it: not 0 means the state may lack blocks. Its time stamp
    is that of the last batch that the state is made of.
    """

    index: int
    count: int
    unknown_before: int
    batch: KvEventBatch
