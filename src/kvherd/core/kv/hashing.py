"""kvherd's own names for prefixes: keyed, chained 64-bit hashes, one a block.

    root      = H(model, block size, LoRA, salt)
    block[i]  = H(block[i-1] or root, tokens of block i, extra keys of block i)

`H` is BLAKE2b with a 64-bit digest under a key that one gateway group shares and nobody else knows, so that a client
can not construct two prompts whose names collide. A name stands for everything before it: two equal names mean equal
prefixes, computed under one model, block size, adapter and salt.

Engines' own hashes never enter a name: engines seed them differently, and two of them could not be compared.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from struct import pack
from sys import byteorder
from typing import Final, Protocol

from kvherd.core.ids import PrefixHash
from kvherd.core.kv.events import ExtraKey

TOKEN_BYTES = 4
"""A token id is hashed as four bytes, little-endian, so it must be in 0..2**32-1."""


_WORDS: Final = byteorder == "little" and array("I").itemsize == TOKEN_BYTES
"""An array of unsigned words is its tokens' bytes already."""


class _Hash(Protocol):
    def copy(self) -> "_Hash": ...
    def update(self, data: bytes, /) -> None: ...
    def digest(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class PrefixHasher:
    """The hash function of one gateway group. `key` has 1 to 64 bytes; keep it out of logs."""

    key: bytes = field(repr=False)
    _keyed: _Hash = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.key:
            raise ValueError("the key of a prefix hasher has 1 to 64 bytes")
        # Copying a keyed state saves a quarter of the time of keying each block anew.
        object.__setattr__(self, "_keyed", blake2b(digest_size=8, key=self.key))

    def root(self, *, model: str, block_size: int, lora: str | None = None, salt: str | None = None) -> PrefixHash:
        """Name the empty prefix of one namespace."""
        parts = [_text(model), pack("<I", block_size), _optional(lora), _optional(salt)]
        return self._digest(b"".join(parts))

    def extend(
        self,
        parent: PrefixHash,
        token_bytes: bytes,
        block_bytes: int,
        extra_keys: Sequence[tuple[ExtraKey, ...]] = (),
    ) -> list[PrefixHash]:
        """Name each full block of `token_bytes` (see `token_bytes`), the first a child of `parent`.

        `block_bytes` is the block size times `TOKEN_BYTES`; a remainder is left out. `extra_keys` is empty or has one
        tuple a block.
        """
        names: list[PrefixHash] = []
        before = parent.to_bytes(8, "little")
        copy = self._keyed.copy
        for number in range(len(token_bytes) // block_bytes):
            state = copy()
            state.update(before + token_bytes[number * block_bytes : (number + 1) * block_bytes])
            if extra_keys and extra_keys[number]:
                state.update(_extra(extra_keys[number]))
            before = state.digest()
            names.append(PrefixHash(int.from_bytes(before, "little")))
        return names

    def _digest(self, data: bytes) -> PrefixHash:
        state = self._keyed.copy()
        state.update(data)
        return PrefixHash(int.from_bytes(state.digest(), "little"))


@dataclass(frozen=True, slots=True)
class Namer:
    """Names prefixes of one model in blocks of one size."""

    hasher: PrefixHasher
    model: str
    block_size: int
    _plain: PrefixHash = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_plain", self.hasher.root(model=self.model, block_size=self.block_size))

    def root(self, lora: str | None, salt: str | None) -> PrefixHash:
        if lora is None and salt is None:
            return self._plain
        return self.hasher.root(model=self.model, block_size=self.block_size, lora=lora, salt=salt)


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Four bytes a token. Raises `struct.error` for an id outside 0..2**32-1."""
    if _WORDS and isinstance(token_ids, array) and token_ids.typecode == "I":
        return token_ids.tobytes()
    return pack(f"<{len(token_ids)}I", *token_ids)


def prefix_chain(
    token_ids: Sequence[int],
    *,
    block_size: int,
    model: str,
    lora: str | None = None,
    salt: str | None = None,
    key: bytes,
) -> list[PrefixHash]:
    """Name every full block of a prompt, from its root on; a partial last block has no name."""
    hasher = PrefixHasher(key)
    root = hasher.root(model=model, block_size=block_size, lora=lora, salt=salt)
    return hasher.extend(root, token_bytes(token_ids), block_size * TOKEN_BYTES)


def _text(text: str) -> bytes:
    data = text.encode()
    return pack("<I", len(data)) + data


def _optional(text: str | None) -> bytes:
    """None and the empty text are different namespaces."""
    return b"\0" if text is None else b"\1" + _text(text)


def _extra(keys: tuple[ExtraKey, ...]) -> bytes:
    """An encoding in which no two different tuples look alike."""
    parts = [pack("<I", len(keys))]
    for key in keys:
        match key:
            case str():
                parts.append(b"t" + _text(key))
            case bytes():
                parts.append(b"b" + pack("<I", len(key)) + key)
            case int():
                parts.append(b"n" + pack("<q", key))
            case (identifier, offset):
                parts.append(b"m" + _text(identifier) + pack("<q", offset))
    return b"".join(parts)
