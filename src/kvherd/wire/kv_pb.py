"""Batches of KV events as the field's gRPC messages (`smg.grpc.common`), and what travels beside them as metadata.

A 64-bit hash travels as its bit pattern in a signed field. `load_only` batches carry no events and no number of their
own: they decode to None. The epoch and the cursors of several ranks have no field and go in metadata:

    kvherd-epoch: 32 hexadecimal digits            in a call, in the initial metadata, and in the trailers of a refusal
    kvherd-cursors: 0=4294967297,1=8589934593      in a call: rank = last batch admitted
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from smg_grpc_proto.generated import common_pb2 as pb

from kvherd.core.errors import FieldInvalid
from kvherd.core.ids import EngineHash, Epoch, Rank
from kvherd.core.kv.events import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    ExtraKey,
    KvEvent,
    KvEventBatch,
    SnapshotChunk,
    Tier,
)
from kvherd.core.kv.normalize import CacheGroups, medium_of, namespace, tier_of
from kvherd.core.kv.stream import BatchUntranslatable

EPOCH_KEY: Final = "kvherd-epoch"
CURSORS_KEY: Final = "kvherd-cursors"

_SIGN: Final = 2**63
_HASHES: Final = 2**64
_TIERS: Final = {
    Tier.DEVICE: pb.KV_CACHE_TIER_DEVICE,
    Tier.HOST: pb.KV_CACHE_TIER_HOST,
    Tier.DISK: pb.KV_CACHE_TIER_DISK,
    Tier.EXTERNAL: pb.KV_CACHE_TIER_EXTERNAL,
}
_LEVELS: Final = tuple(_TIERS)
_FROM_TIER: Final = {number: tier for tier, number in _TIERS.items()}

# --- metadata ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SubscribeCall:
    """What a subscriber asks for: the arguments of `KvStream.subscribe`."""

    start_sequence_number: int
    cursors: dict[Rank, int]
    epoch: Epoch | None


def decode_subscribe(start_sequence_number: int, metadata: Iterable[tuple[str, str | bytes]]) -> SubscribeCall:
    """Raises `FieldInvalid` for metadata that is not of the form above."""
    cursors: dict[Rank, int] = {}
    epoch = None
    for key, value in metadata:
        text = value.decode("ascii", "replace") if isinstance(value, bytes) else value
        if key == EPOCH_KEY:
            epoch = Epoch(text)
        elif key == CURSORS_KEY:
            cursors = dict(_cursor(part) for part in text.split(",") if part)
    return SubscribeCall(start_sequence_number, cursors, epoch)


def encode_subscribe(cursors: Mapping[Rank, int], epoch: Epoch | None) -> tuple[int, list[tuple[str, str]]]:
    """The start number and the metadata of a call.

    A single cursor is the start number too, for servers that do not know the metadata; they cannot resume several.
    """
    metadata = [] if epoch is None else [(EPOCH_KEY, str(epoch))]
    if cursors:
        metadata.append((CURSORS_KEY, ",".join(f"{rank}={last}" for rank, last in sorted(cursors.items()))))
    start = next(iter(cursors.values())) if len(cursors) == 1 else 0
    return start, metadata


def epoch_in(metadata: Iterable[tuple[str, str | bytes]] | None) -> Epoch | None:
    """The epoch that a server told; None for a foreign one."""
    return decode_subscribe(0, [(key, value) for key, value in metadata or () if key == EPOCH_KEY]).epoch


_CURSOR: Final = re.compile("[0-9]{1,9}=[0-9]{1,20}")


def _cursor(part: str) -> tuple[Rank, int]:
    rank, _, last = part.partition("=")
    if not _CURSOR.fullmatch(part):
        raise FieldInvalid(CURSORS_KEY, f"{part[:40]!r} is not RANK=NUMBER")
    return Rank(int(rank)), int(last)


# --- batches out ---------------------------------------------------------------------------------------------


def encode_item(item: KvEventBatch | SnapshotChunk) -> pb.KvEventBatch:
    """A batch or a part of a snapshot as a `KvEventBatch` message."""
    match item:
        case SnapshotChunk(index, count, unknown_before, batch):
            message = encode_batch(batch)
            blocks = sum(len(event.block_hashes) for event in batch.events if isinstance(event, BlocksStored))
            message.snapshot.CopyFrom(
                pb.KvSnapshotChunk(index=index, count=count, blocks=blocks, unknown_before=unknown_before)
            )
            return message
        case KvEventBatch():
            return encode_batch(item)


def encode_batch(batch: KvEventBatch) -> pb.KvEventBatch:
    return pb.KvEventBatch(
        sequence_number=batch.sequence,
        timestamp=batch.timestamp_s,
        dp_rank=batch.rank,
        events=[_event(number, event) for number, event in enumerate(batch.events, start=1)],
    )


def _event(number: int, event: KvEvent) -> pb.KvCacheEvent:
    match event:
        case BlocksStored():
            return pb.KvCacheEvent(event_id=number, stored=_stored(event))
        case BlocksRemoved():
            removed = pb.KvBlocksRemoved(
                block_hashes=[_signed(block) for block in event.block_hashes],
                tier=_TIERS[event.tier],
                medium=medium_of(event.tier),
                cache_level=_LEVELS.index(event.tier),
            )
            return pb.KvCacheEvent(event_id=number, removed=removed)
        case CacheCleared():
            return pb.KvCacheEvent(event_id=number, cleared=pb.KvCacheCleared())


def _stored(event: BlocksStored) -> pb.KvBlocksStored:
    size = event.block_size
    level = _LEVELS.index(event.tier)
    return pb.KvBlocksStored(
        parent_block_hash=None if event.parent_hash is None else _signed(event.parent_hash),
        tier=_TIERS[event.tier],
        medium=medium_of(event.tier),
        lora_name=event.lora,
        cache_salt=event.salt,
        blocks=[
            pb.KvBlock(
                block_hash=_signed(block),
                token_ids=event.token_ids[number * size : (number + 1) * size],
                block_size=size,
                cache_level=level,
                extra_keys=[_extra_key(key) for key in event.extra_keys[number]] if event.extra_keys else (),
            )
            for number, block in enumerate(event.block_hashes)
        ],
    )


def _extra_key(key: ExtraKey) -> pb.KvBlockExtraKey:
    match key:
        case str():
            return pb.KvBlockExtraKey(text=key)
        case bytes():
            return pb.KvBlockExtraKey(blob=key)
        case int():
            return pb.KvBlockExtraKey(number=key)
        case (identifier, offset):
            return pb.KvBlockExtraKey(multimodal=pb.KvMultimodalKey(identifier=identifier, offset=offset))


def _signed(unsigned: int) -> int:
    return unsigned - _HASHES if unsigned >= _SIGN else unsigned


# --- batches in ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class KvPbDecoder:
    """Decodes one stream, in order: for each rank it remembers which cache groups count."""

    _groups: dict[Rank, CacheGroups]

    def __init__(self) -> None:
        self._groups = {}

    def decode(self, message: pb.KvEventBatch) -> KvEventBatch | SnapshotChunk | None:
        """None for a message that carries no batch. Raises `BatchUntranslatable`."""
        if message.HasField("load") and message.load.load_only:
            return None
        rank = Rank(message.dp_rank if message.HasField("dp_rank") else 0)
        groups = self._groups.setdefault(rank, CacheGroups())
        events = tuple(event for one in message.events for event in _decode_event(one, groups))
        batch = KvEventBatch(message.sequence_number, message.timestamp, rank, events)
        if not message.HasField("snapshot"):
            return batch
        chunk = message.snapshot
        return SnapshotChunk(chunk.index, max(chunk.count, 1), chunk.unknown_before, batch)


def _decode_event(message: pb.KvCacheEvent, groups: CacheGroups) -> Iterator[KvEvent]:
    match message.WhichOneof("data"):
        case "stored":
            yield from _decode_stored(message.stored, groups)
        case "removed":
            removed = message.removed
            group = removed.group_idx if removed.HasField("group_idx") else None
            if removed.locality != pb.KV_CACHE_LOCALITY_REMOTE and groups.removed(group):
                yield BlocksRemoved(tuple(map(_unsigned, removed.block_hashes)), _tier(removed))
        case "cleared":
            yield CacheCleared()
        case _:
            raise BatchUntranslatable("an event of an unknown kind")


def _decode_stored(stored: pb.KvBlocksStored, groups: CacheGroups) -> Iterator[BlocksStored]:
    """One event for each run of blocks of one tier: foreign blocks may each name their own."""
    group = stored.group_idx if stored.HasField("group_idx") else None
    kind = stored.kv_cache_spec_kind if stored.HasField("kv_cache_spec_kind") else None
    counts = groups.stored(group, kind)
    if counts is None:
        raise BatchUntranslatable(f"cache group {group} does not say its kind")
    if not counts or stored.locality == pb.KV_CACHE_LOCALITY_REMOTE or not stored.blocks:
        return
    size = stored.blocks[0].block_size
    if any(block.block_size != size or len(block.token_ids) != size or size <= 0 for block in stored.blocks):
        raise BatchUntranslatable(f"a store of blocks of {size} tokens in which a block has another number")
    tier = _tier(stored) if stored.HasField("tier") or stored.HasField("medium") else _tier(stored.blocks[0])
    at_root = not stored.HasField("parent_block_hash")
    lora = _lora(stored)
    space = namespace(
        [tuple(map(_decode_extra_key, block.extra_keys)) for block in stored.blocks],
        lora=lora,
        salt=stored.cache_salt if stored.HasField("cache_salt") else None,
        at_root=at_root,
    )
    yield BlocksStored(
        block_hashes=tuple(_unsigned(block.block_hash) for block in stored.blocks),
        parent_hash=None if at_root else _unsigned(stored.parent_block_hash),
        token_ids=tuple(token for block in stored.blocks for token in block.token_ids),
        block_size=size,
        tier=tier,
        lora=space.lora,
        salt=space.salt,
        extra_keys=space.extra_keys,
    )


def _lora(stored: pb.KvBlocksStored) -> str | None:
    if stored.HasField("lora_name"):
        return str(stored.lora_name)
    first = stored.blocks[0]
    return f"lora_id={first.lora_id}" if first.HasField("lora_id") else None


def _tier(message: pb.KvBlocksStored | pb.KvBlocksRemoved | pb.KvBlock) -> Tier:
    """By tier, else by medium, else by level, else the device; what is unknown is external."""
    fields = message.DESCRIPTOR.fields_by_name
    if "tier" in fields and message.HasField("tier") and message.tier:
        return _FROM_TIER.get(message.tier, Tier.EXTERNAL)
    if "medium" in fields and message.HasField("medium"):
        return tier_of(message.medium)
    if message.DESCRIPTOR is not pb.KvBlocksStored.DESCRIPTOR and message.HasField("cache_level"):
        level = message.cache_level
        return _LEVELS[level] if 0 <= level < len(_LEVELS) else Tier.EXTERNAL
    return Tier.DEVICE


def _decode_extra_key(message: pb.KvBlockExtraKey) -> ExtraKey:
    match message.WhichOneof("key"):
        case "text":
            return str(message.text)
        case "blob":
            return bytes(message.blob)
        case "number":
            return int(message.number)
        case "multimodal":
            return str(message.multimodal.identifier), int(message.multimodal.offset)
        case _:
            raise BatchUntranslatable("an extra key of an unknown kind")


def _unsigned(signed: int) -> EngineHash:
    return EngineHash(signed % _HASHES)
