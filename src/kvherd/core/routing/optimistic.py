"""Blocks of requests that are on their way, credited until the worker's own events tell.

Kept apart from the index: a flush clears the index, and requests sent after it still deserve their credit.
"""

from collections import Counter
from collections.abc import Sequence

from kvherd.core.ids import PrefixHash, RequestId
from kvherd.core.routing.candidate import Place


class OptimisticBlocks:
    """Counts, for each worker or rank of one, how many requests under way will have each block there."""

    def __init__(self) -> None:
        self._requests: dict[RequestId, tuple[Place, Sequence[PrefixHash]]] = {}
        self._blocks: dict[Place, Counter[PrefixHash]] = {}

    def hold(self, request: RequestId, place: Place, chain: Sequence[PrefixHash]) -> None:
        """`request` was sent there: count its blocks there. A request counts once, where it was sent last."""
        self.release(request)
        self._requests[request] = (place, chain)
        if chain:
            self._blocks.setdefault(place, Counter()).update(chain)

    def release(self, request: RequestId) -> None:
        """The request ended: what the worker kept of it, its events have told. Harmless for an unknown one."""
        place, chain = self._requests.pop(request, (None, ()))
        if place is None or not chain:
            return
        blocks = self._blocks[place]
        blocks.subtract(chain)
        for block in chain:
            if blocks[block] <= 0:
                del blocks[block]
        if not blocks:
            del self._blocks[place]

    def extend(self, place: Place, chain: Sequence[PrefixHash], held: int) -> int:
        """Leading blocks of `chain` on their way there or held there, `held` of them known to be."""
        blocks = self._blocks.get(place)
        if blocks is None:
            return held
        while held < len(chain) and chain[held] in blocks:
            held += 1
        return held

    def __len__(self) -> int:
        return len(self._requests)
