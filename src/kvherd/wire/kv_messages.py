"""The messages of engines' KV events, as msgpack has them: shapes only. What they say is `vllm_kv`'s to judge.

A module of its own, for classes that msgspec makes cannot be compiled.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Generic, TypeAlias, TypeVar

import msgspec

WireHash = int | bytes
Token = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
Pair = tuple[Token, Token]
Atom = TypeVar("Atom", Token, Pair)


class Stored(msgspec.Struct, Generic[Atom], frozen=True, tag_field="type", tag="BlockStored"):
    """All but the hashes may be missing here, so that what is missing can be named. The order is the array layout's."""

    block_hashes: tuple[WireHash, ...]
    parent_block_hash: WireHash | None = None
    token_ids: tuple[Atom, ...] = ()
    block_size: int = 0
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: tuple[tuple[Any, ...] | None, ...] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    locality: str | None = None
    cache_salt: str | None = None


class Removed(msgspec.Struct, frozen=True, tag_field="type", tag="BlockRemoved"):
    block_hashes: tuple[WireHash, ...]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class Cleared(msgspec.Struct, frozen=True, tag_field="type", tag="AllBlocksCleared"):
    pass


PlainStored: TypeAlias = Stored[Token]
PairedStored: TypeAlias = Stored[Pair]
EventMessage: TypeAlias = PlainStored | PairedStored | Removed | Cleared


class _Payload(msgspec.Struct, frozen=True, array_like=True):
    timestamp_s: float
    events: tuple[PlainStored | Removed | Cleared, ...]
    rank: int | None = None


class _AnyPayload(msgspec.Struct, frozen=True, array_like=True):
    timestamp_s: float
    events: tuple[Any, ...]
    rank: int | None = None


_ARRAY_KEYS: Final = {
    "BlockStored": (*Stored.__struct_fields__[:10],),
    "BlockRemoved": (*Removed.__struct_fields__[:3],),
}

_payload = msgspec.msgpack.Decoder(_Payload)
_any_payload = msgspec.msgpack.Decoder(_AnyPayload)


@dataclass(frozen=True, slots=True)
class Read:
    timestamp_s: float
    events: Sequence[EventMessage]
    rank: int | None


def read(payload: bytes) -> _Payload | Read:
    """Maps of plain tokens at once, which is all that most engines send; what is not that, event by event."""
    try:
        return _payload.decode(payload)
    except msgspec.ValidationError:
        batch = _any_payload.decode(payload)
        return Read(batch.timestamp_s, [_read_event(event) for event in batch.events], batch.rank)


def _read_event(event: object) -> EventMessage:
    if isinstance(event, list) and event and isinstance(event[0], str):
        keys = _ARRAY_KEYS.get(event[0], ())
        event = {"type": event[0], **dict(zip(keys, event[1:], strict=False))}  # trailing defaults are omitted
    tokens = event.get("token_ids") if isinstance(event, dict) else None
    paired = isinstance(tokens, list) and bool(tokens) and isinstance(tokens[0], list)
    return msgspec.convert(event, (PairedStored if paired else PlainStored) | Removed | Cleared)
