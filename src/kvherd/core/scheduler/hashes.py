"""Names of blocks: a 64-bit hash of a block's tokens, chained to the block before it and to its namespace."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from kvherd.core.ids import EngineHash


@dataclass(frozen=True, slots=True)
class Namespace:
    """Prefixes of different namespaces are never shared, equal tokens or not."""

    lora: str | None = None
    salt: str | None = None


def block_hash(parent: EngineHash | None, token_ids: Sequence[int], namespace: Namespace) -> EngineHash:
    """Name the block of these tokens behind `parent`; only a first block (`parent` None) reads the namespace."""
    digest = blake2b(digest_size=8)
    if parent is None:
        digest.update(repr((namespace.lora, namespace.salt)).encode())
    else:
        digest.update(parent.to_bytes(8, "big"))
    digest.update(array("Q", token_ids).tobytes())
    return EngineHash(int.from_bytes(digest.digest(), "big"))
