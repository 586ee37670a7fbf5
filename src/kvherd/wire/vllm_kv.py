"""vLLM's KV events, which SGLang and kvherd's engine publish too: strict where a mistake would corrupt.

    payload = [timestamp, events, rank]                     rank may be absent or null
    event   = {"type": "BlockStored", …}                    vLLM 0.24 and later, SGLang, kvherd
            | ["BlockStored", hashes, parent, …]            vLLM 0.16 to 0.22, trailing defaults omitted

Unknown keys are ignored. Bytes that are not msgpack raise `FrameInvalid`; a batch that says what kvherd cannot repeat
without loss raises `BatchUntranslatable`. Nothing else is raised, whatever the bytes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import msgspec

from kvherd.core.errors import FrameInvalid
from kvherd.core.ids import EngineHash, Rank
from kvherd.core.kv.events import BlocksRemoved, BlocksStored, CacheCleared, ExtraKey, KvEvent
from kvherd.core.kv.normalize import CacheGroups, medium_of, namespace, tier_of
from kvherd.core.kv.stream import BatchUntranslatable

_HASH_BYTES: Final = 8
_HASHES: Final = 2**64

WireHash = int | bytes
Token = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


class _Stored(msgspec.Struct, frozen=True, tag_field="type", tag="BlockStored"):
    """Everything may be missing here, so that what is missing can be named."""

    block_hashes: tuple[WireHash, ...] = ()
    parent_block_hash: WireHash | None = None
    token_ids: tuple[Token, ...] = ()
    block_size: int = 0
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: tuple[tuple[Any, ...] | None, ...] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    locality: str | None = None
    cache_salt: str | None = None


class _Removed(msgspec.Struct, frozen=True, tag_field="type", tag="BlockRemoved"):
    block_hashes: tuple[WireHash, ...]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class _Cleared(msgspec.Struct, frozen=True, tag_field="type", tag="AllBlocksCleared"):
    pass


class _StoredArray(msgspec.Struct, frozen=True, array_like=True, tag="BlockStored"):
    block_hashes: tuple[WireHash, ...] = ()
    parent_block_hash: WireHash | None = None
    token_ids: tuple[Token, ...] = ()
    block_size: int = 0
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: tuple[tuple[Any, ...] | None, ...] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class _RemovedArray(msgspec.Struct, frozen=True, array_like=True, tag="BlockRemoved"):
    block_hashes: tuple[WireHash, ...]
    medium: str | None = None
    group_idx: int | None = None


class _ClearedArray(msgspec.Struct, frozen=True, array_like=True, tag="AllBlocksCleared"):
    pass


class _Payload(msgspec.Struct, frozen=True, array_like=True):
    timestamp_s: float
    events: tuple[msgspec.Raw, ...]
    rank: int | None = None


_encoder = msgspec.msgpack.Encoder()
_payload = msgspec.msgpack.Decoder(_Payload)
_map_event: msgspec.msgpack.Decoder[_Stored | _Removed | _Cleared] = msgspec.msgpack.Decoder(
    _Stored | _Removed | _Cleared
)
_array_event: msgspec.msgpack.Decoder[_StoredArray | _RemovedArray | _ClearedArray] = msgspec.msgpack.Decoder(
    _StoredArray | _RemovedArray | _ClearedArray
)


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

    def decode(self, payload: bytes) -> PublishedBatch:
        """Raises `FrameInvalid` for what is no msgpack, `BatchUntranslatable` for what cannot be repeated."""
        try:
            return self._translate(_payload.decode(payload))
        except msgspec.ValidationError as error:
            raise BatchUntranslatable(str(error)) from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise FrameInvalid("KV event", str(error)) from error

    def _translate(self, payload: _Payload) -> PublishedBatch:
        rank = None if payload.rank is None else Rank(payload.rank)
        events = tuple(event for raw in payload.events for event in self._events(raw))
        return PublishedBatch(payload.timestamp_s, events, rank)

    def _events(self, raw: msgspec.Raw) -> Iterator[KvEvent]:
        first = memoryview(raw)[0]
        is_array = 0x90 <= first <= 0x9F or first in (0xDC, 0xDD)
        event = _array_event.decode(raw) if is_array else _map_event.decode(raw)
        match event:
            case _Stored(locality="REMOTE") | _Removed(locality="REMOTE"):
                return  # a shared pool's blocks: no statement about this engine
            case _Stored() | _StoredArray():
                counts = self._groups.stored(event.group_idx, event.kv_cache_spec_kind)
                if counts is None:
                    raise BatchUntranslatable(f"cache group {event.group_idx} does not say its kind")
                if counts:
                    yield _stored(event)
            case _Removed() | _RemovedArray():
                if self._groups.removed(event.group_idx):
                    yield BlocksRemoved(tuple(map(_hash, event.block_hashes)), tier_of(event.medium))
            case _Cleared() | _ClearedArray():
                yield CacheCleared()


def decode_batch(payload: bytes) -> PublishedBatch:
    """Decode one batch by itself; a stream of them wants one `KvDecoder`. Raises as `KvDecoder.decode`."""
    return KvDecoder().decode(payload)


def encode_batch(timestamp_s: float, events: Sequence[KvEvent], rank: Rank) -> bytes:
    """Write a batch as vLLM 0.32 does, in its map layout."""
    return _encoder.encode([timestamp_s, [_as_map(event) for event in events], rank])


def _stored(event: _Stored | _StoredArray) -> BlocksStored:
    count = len(event.block_hashes)
    if event.block_size <= 0:
        raise BatchUntranslatable(f"a store with block size {event.block_size}")
    if len(event.token_ids) != count * event.block_size:
        raise BatchUntranslatable(
            f"a store of {count} blocks of {event.block_size} tokens with {len(event.token_ids)} tokens"
        )
    extra_keys = [_extra_keys(keys) for keys in event.extra_keys or ()]
    if extra_keys and len(extra_keys) != count:
        raise BatchUntranslatable(f"a store of {count} blocks with extra keys for {len(extra_keys)}")
    lora = event.lora_name
    if lora is None and event.lora_id is not None:
        lora = f"lora_id={event.lora_id}"  # an adapter without its name: no request asks for this one
    salt = event.cache_salt if isinstance(event, _Stored) else None
    space = namespace(extra_keys, lora=lora, salt=salt, at_root=event.parent_block_hash is None)
    return BlocksStored(
        block_hashes=tuple(map(_hash, event.block_hashes)),
        parent_hash=None if event.parent_block_hash is None else _hash(event.parent_block_hash),
        token_ids=event.token_ids,
        block_size=event.block_size,
        tier=tier_of(event.medium),
        lora=space.lora,
        salt=space.salt,
        extra_keys=space.extra_keys,
    )


def _hash(wire: WireHash) -> EngineHash:
    """Unsigned 64 bits of a signed or unsigned number, or of a digest's end."""
    if isinstance(wire, int):
        return EngineHash(wire % _HASHES)
    if len(wire) < _HASH_BYTES:
        raise BatchUntranslatable(f"a block hash of {len(wire)} bytes")
    return EngineHash(int.from_bytes(wire[-_HASH_BYTES:], "big"))


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
