"""Engines' own KV events, as vLLM, SGLang and kvherd's engine publish them: strict where a mistake would corrupt.

    payload = [timestamp, events, rank]                     rank may be absent or null
    event   = {"type": "BlockStored", …}                    vLLM 0.24 and later, SGLang, kvherd
            | ["BlockStored", hashes, parent, …]            vLLM 0.16 to 0.22, trailing defaults omitted

SGLang's hashes are signed, its blocks are pages of as little as one token, and under drafting heads of the Eagle family
each token is a pair, `[token, next]`. What vLLM's offloading says of other tiers may lack the tokens: it is understood
of blocks that are known, and says nothing of others, which is no loss to anybody's credit.

Unknown keys are ignored. Bytes that are not msgpack raise `FrameInvalid`; a batch that says what kvherd cannot repeat
without loss raises `BatchUntranslatable`. Nothing else is raised, whatever the bytes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Final, cast

import msgspec

from kvherd.core.errors import FrameInvalid
from kvherd.core.ids import EngineHash, Rank
from kvherd.core.kv.bigrams import bigram_key
from kvherd.core.kv.events import BlocksRemoved, BlocksStored, CacheCleared, ExtraKey, KvEvent, Tier
from kvherd.core.kv.live_state import LiveState
from kvherd.core.kv.normalize import CacheGroups, medium_of, namespace, tier_of
from kvherd.core.kv.stream import BatchUntranslatable
from kvherd.wire.kv_messages import Cleared, Pair, PairedStored, PlainStored, Stored, Token, WireHash, read

_HASH_BYTES: Final = 8
_HASHES: Final = 2**64
_encoder: Final = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class PublishedBatch:
    """What a publisher sent under one sequence number. `rank` None: it did not say."""

    timestamp_s: float
    events: tuple[KvEvent, ...]
    rank: Rank | None


@dataclass(slots=True)
class KvDecoder:
    """Decodes the batches of one publisher, one rank, in order: it remembers which cache groups count."""

    _groups: CacheGroups = field(default_factory=CacheGroups)

    def decode(self, payload: bytes, known: LiveState | None = None) -> PublishedBatch:
        """`known` is the state before this batch: blocks may be named that are described there.

        Raises `FrameInvalid` for what is no msgpack, `BatchUntranslatable` for what cannot be repeated.
        """
        try:
            told = read(payload)
        except msgspec.ValidationError as error:
            raise BatchUntranslatable(str(error)) from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise FrameInvalid("KV event", str(error)) from error
        rank = None if told.rank is None else Rank(told.rank)
        events: list[KvEvent] = []
        for one in told.events:
            if isinstance(one, Cleared):
                events.append(CacheCleared())
            elif one.locality == "REMOTE":
                pass  # a shared pool's blocks: no statement about this engine
            elif isinstance(one, Stored):
                events += self._stores(one, known)
            elif self._groups.removed(one.group_idx):
                events.append(BlocksRemoved(_hashes(one.block_hashes), tier_of(one.medium)))
        return PublishedBatch(told.timestamp_s, tuple(events), rank)

    def _stores(self, event: PlainStored | PairedStored, known: LiveState | None) -> Sequence[BlocksStored]:
        tier = tier_of(event.medium)
        counts = self._groups.stored(event.group_idx, event.kv_cache_spec_kind)
        if counts is not False and tier is not Tier.DEVICE and _only_names(event):
            return list(_recognized(event, tier, known))
        if counts is None:
            raise BatchUntranslatable(f"cache group {event.group_idx} does not say its kind; vLLM 0.24 and later do")
        return (_stored(event, tier),) if counts and (event.block_hashes or event.token_ids) else ()


def decode_batch(payload: bytes) -> PublishedBatch:
    """Decode one batch by itself; a stream of them wants one `KvDecoder`. Raises as `KvDecoder.decode`."""
    return KvDecoder().decode(payload)


def encode_batch(timestamp_s: float, events: Sequence[KvEvent], rank: Rank) -> bytes:
    """Write a batch as vLLM 0.32 does, in its map layout."""
    return _encoder.encode([timestamp_s, [_as_map(event) for event in events], rank])


def _only_names(event: PlainStored | PairedStored) -> bool:
    """Whether blocks are named without what they hold, or without the extra keys that went into their hashes."""
    return not event.token_ids or (event.extra_keys is None and event.group_idx is not None)


def _recognized(event: PlainStored | PairedStored, tier: Tier, known: LiveState | None) -> Iterator[BlocksStored]:
    for block in _hashes(event.block_hashes):
        described = None if known is None else known.find(block)
        if described is not None:
            yield replace(described, tier=tier)


def _stored(event: PlainStored | PairedStored, tier: Tier) -> BlocksStored:
    count = len(event.block_hashes)
    if event.block_size <= 0:
        raise BatchUntranslatable(f"a store with block size {event.block_size}")
    if len(event.token_ids) != count * event.block_size:
        raise BatchUntranslatable(
            f"a store of {count} blocks of {event.block_size} tokens with {len(event.token_ids)} tokens"
        )
    lora, salt, extra_keys = _namespace(event, count)
    token_ids = cast("tuple[Token | Pair, ...]", event.token_ids)
    if token_ids and isinstance(token_ids[0], tuple):
        pairs = cast("tuple[Pair, ...]", token_ids)
        if any(pair[1] != after[0] for pair, after in pairwise(pairs)):
            raise BatchUntranslatable("a store of pairs of tokens that do not follow one another")
        nexts = [(bigram_key(pair[1]),) for pair in pairs[event.block_size - 1 :: event.block_size]]
        before = extra_keys or ((),) * count
        extra_keys = tuple((*keys, *own) for keys, own in zip(before, nexts, strict=True))
        token_ids = tuple(pair[0] for pair in pairs)
    return BlocksStored(
        block_hashes=_hashes(event.block_hashes),
        parent_hash=None if event.parent_block_hash is None else _hashes((event.parent_block_hash,))[0],
        token_ids=cast("tuple[int, ...]", token_ids),
        block_size=event.block_size,
        tier=tier,
        lora=lora,
        salt=salt,
        extra_keys=extra_keys,
    )


def _namespace(
    event: PlainStored | PairedStored, count: int
) -> tuple[str | None, str | None, tuple[tuple[ExtraKey, ...], ...]]:
    """LoRA, salt, and the rest of what went into the hash of each block."""
    if event.extra_keys and len(event.extra_keys) != count:
        raise BatchUntranslatable(f"a store of {count} blocks with extra keys for {len(event.extra_keys)}")
    lora = event.lora_name
    if lora is None and event.lora_id is not None:
        lora = f"lora_id={event.lora_id}"  # an adapter without its name: no request asks for this one
    if not event.extra_keys or not any(event.extra_keys):
        return lora, event.cache_salt, ()
    extra_keys = [_extra_keys(keys) for keys in event.extra_keys]
    space = namespace(extra_keys, lora=lora, salt=event.cache_salt, at_root=event.parent_block_hash is None)
    return space.lora, space.salt, space.extra_keys


def _hashes(wire: tuple[WireHash, ...]) -> tuple[EngineHash, ...]:
    """Unsigned 64 bits of signed or unsigned numbers, or of digests' ends."""
    numbers = [one % _HASHES if isinstance(one, int) else _digest_end(one) for one in wire]
    return cast("tuple[EngineHash, ...]", tuple(numbers))


def _digest_end(digest: bytes) -> int:
    if len(digest) < _HASH_BYTES:
        raise BatchUntranslatable(f"a block hash of {len(digest)} bytes")
    return int.from_bytes(digest[-_HASH_BYTES:], "big")


def _extra_keys(keys: Sequence[Any] | None) -> tuple[ExtraKey, ...]:
    return tuple(_extra_key(key) for key in keys or ())


def _extra_key(key: object) -> ExtraKey:
    match key:
        case bool():
            raise BatchUntranslatable("an extra key that is a truth value")
        case str() | bytes():
            return key
        case int():
            return _signed(key)
        case [str() as identifier, int() as offset]:
            return identifier, _signed(offset)
        case _:
            raise BatchUntranslatable(f"an extra key of type {type(key).__name__}")


def _signed(number: int) -> int:
    if not -(2**63) <= number < 2**63:
        raise BatchUntranslatable("an extra key beyond 64 signed bits")
    return number


def _as_map(event: KvEvent) -> dict[str, object]:
    match event:
        case BlocksStored():
            return {
                "type": "BlockStored",
                "block_hashes": event.block_hashes,
                "parent_block_hash": event.parent_hash,
                "token_ids": event.token_ids,
                "block_size": event.block_size,
                "lora_id": None,
                "medium": medium_of(event.tier),
                "lora_name": event.lora,
                "extra_keys": [_keys_of(event, number) for number in range(len(event.block_hashes))],
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }
        case BlocksRemoved():
            return {
                "type": "BlockRemoved",
                "block_hashes": event.block_hashes,
                "medium": medium_of(event.tier),
                "group_idx": 0,
            }
        case CacheCleared():
            return {"type": "AllBlocksCleared"}


def _keys_of(event: BlocksStored, number: int) -> list[ExtraKey] | None:
    """A block's extra keys in vLLM's order: adapter, multimodal items and digests, salt."""
    keys: list[ExtraKey] = [] if event.lora is None else [event.lora]
    if event.extra_keys:
        keys += event.extra_keys[number]
    if event.salt is not None and event.parent_hash is None and number == 0:
        keys.append(event.salt)
    return keys or None
