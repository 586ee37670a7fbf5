"""Blocks of an engine that keeps its cache by pairs of tokens: each token with the one after it.

Drafting heads of the Eagle family read a token beside the next one, so such an engine reuses a prefix only as far as
the next tokens agree too. Here a block has the first token of each of its pairs, as any block has its tokens, and the
next token of its last pair as an extra key: the others are the first tokens of the pairs that follow. The key looks
like a multimodal one, so whoever does not know it gives no credit rather than a wrong one.
"""

from collections.abc import Sequence
from typing import Final

from kvherd.core.kv.events import ExtraKey

_NAME: Final = "kvherd-bigram"


def bigram_key(next_token: int) -> ExtraKey:
    """The extra key of a block whose last pair ends in `next_token`."""
    return (_NAME, next_token)


def next_token(keys: Sequence[ExtraKey]) -> int | None:
    """What `bigram_key` put among a block's extra keys, or None."""
    for key in keys:
        if isinstance(key, tuple) and key[0] == _NAME:
            return key[1]
    return None


def bigram_keys(token_ids: Sequence[int], block_size: int) -> list[tuple[ExtraKey, ...]]:
    """The extra keys of each block that a prompt has in such an engine: n tokens make n - 1 pairs."""
    ends = range(block_size, len(token_ids), block_size)
    return [(bigram_key(token_ids[end]),) for end in ends]
