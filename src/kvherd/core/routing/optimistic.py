"""Blocks of requests that are on their way, credited until the worker's own events tell.

Kept apart from the index: a flush clears the index, and requests sent after it still deserve their credit.
"""

from collections.abc import Sequence

from kvherd.core.ids import PrefixHash, RequestId
from kvherd.core.routing.candidate import Place


class OptimisticBlocks:
    """Knows, for each worker or rank of one, which blocks requests under way will have there beyond those that are
    credited already.
    """

    def __init__(self) -> None:
        self._requests: dict[RequestId, tuple[Place, Sequence[PrefixHash]]] = {}
        self._coming: dict[Place, dict[PrefixHash, int]] = {}
        """How many requests bring each block; none is 0."""

    def hold(self, request: RequestId, place: Place, chain: Sequence[PrefixHash], held: int = 0) -> None:
        """`request` was sent there: count its blocks there, but for the first `held`, which were known to be there. A
        request counts once, where it was sent last.
        """
        self.release(request)
        fresh = chain[held:] if held else chain
        self._requests[request] = (place, fresh)
        if not fresh:
            return
        coming = self._coming.get(place)
        if coming is None:
            coming = self._coming[place] = {}
        for name in fresh:
            coming[name] = coming.get(name, 0) + 1

    def release(self, request: RequestId) -> None:
        """The request ended: what the worker kept of it, its events have told. Harmless for an unknown one."""
        sent = self._requests.pop(request, None)
        if sent is None:
            return
        place, fresh = sent
        if not fresh:
            return
        coming = self._coming[place]
        for name in fresh:
            count = coming[name]
            if count > 1:
                coming[name] = count - 1
            else:
                del coming[name]
        if not coming:
            del self._coming[place]

    def extend(self, place: Place, chain: Sequence[PrefixHash], held: int) -> int:
        """Leading blocks of `chain` on their way there or held there, `held` of them known to be."""
        coming = self._coming.get(place)
        if coming is None:
            return held
        while held < len(chain) and chain[held] in coming:
            held += 1
        return held

    def __len__(self) -> int:
        return len(self._requests)
