"""Pages smaller than a block of the index, and the blocks they are folded into.

SGLang's cache is kept by pages of as little as one token. A name and a bit for each would make the index sixteen times
as large and a look-up sixteen times as long, so small pages are folded, by their position from the root, into blocks of
16 tokens, each held while all of its pages are. What is known of pages beyond the last whole block earns no credit.
"""

from typing import Final

FOLDED_BLOCK: Final = 16
"""Tokens of a block that smaller pages are folded into."""


def folded_block(size: int) -> int:
    """The size of the index's blocks for an engine whose own blocks have `size` tokens."""
    return FOLDED_BLOCK if 0 < size < FOLDED_BLOCK and FOLDED_BLOCK % size == 0 else size
