"""What an engine may rely on from a place where blocks of keys and values outlive it, shared with other engines."""

from collections.abc import Sequence
from typing import Protocol

from kvherd.core.ids import BlockName


class BlockStore(Protocol):
    """Blocks of one size by name. A name never means other bytes: whoever puts it has the same ones.

    Calls block, and are for worker threads: two threads may call at once, and other processes too. Each ends soon
    after `timeout_s`, whatever became of it. Nothing is raised: what cannot be had is not there, what cannot be kept
    is not kept, and the store says why in the log. Any block may be gone at any time.
    """

    def find(self, names: Sequence[BlockName], *, timeout_s: float) -> int:
        """How many of these are there, from the first on without a hole; no promise that they can be read."""
        ...

    def read(self, names: Sequence[BlockName], into: Sequence[memoryview], *, timeout_s: float) -> list[bool]:
        """Fill one buffer a name. True only for bytes verified in place, wherever they were damaged; else the buffer
        holds anything. It may stop at the first it cannot fill: those behind it are False then.
        """
        ...

    def put(self, names: Sequence[BlockName], blocks: Sequence[memoryview], *, timeout_s: float) -> list[bool]:
        """Keep these. True for those that are there now, whole, for every reader; nobody ever sees a part of one."""
        ...
