"""What a worker that publishes no events was sent lately: an approximate stand-in for what it holds.

It may credit a block that the worker has evicted, and knows nothing of what others sent there.
"""

from collections import OrderedDict
from collections.abc import Sequence

from kvherd.core.ids import PrefixHash, WorkerId
from kvherd.core.routing.candidate import Place


class PrefixMemory:
    """Remembers the last `blocks_per_place` distinct blocks sent to each worker, or to each rank of one."""

    def __init__(self, blocks_per_place: int = 65_536) -> None:
        self._bound = blocks_per_place
        self._sent: dict[Place, OrderedDict[PrefixHash, None]] = {}

    def sent(self, place: Place, chain: Sequence[PrefixHash]) -> None:
        """A prompt of these blocks went there. Its leading blocks count as used last, as in a radix tree."""
        blocks = self._sent.setdefault(place, OrderedDict())
        for block in reversed(chain[: self._bound]):  # what is beyond would be forgotten at once
            blocks[block] = None
            blocks.move_to_end(block)
        while len(blocks) > self._bound:
            blocks.popitem(last=False)

    def match(self, place: Place, chain: Sequence[PrefixHash]) -> int:
        """Leading blocks of `chain` that were sent there."""
        blocks = self._sent.get(place)
        if blocks is None:
            return 0
        return next((n for n, block in enumerate(chain) if block not in blocks), len(chain))

    def forget(self, worker: WorkerId) -> None:
        """It was flushed, restarted or removed, with all of its ranks."""
        for place in [place for place in self._sent if place[0] == worker]:
            del self._sent[place]
