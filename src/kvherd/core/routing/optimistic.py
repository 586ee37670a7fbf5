"""Blocks of requests that are on their way, credited until the worker's own events tell.

Kept apart from the index: a flush clears the index, and requests sent after it still deserve their credit.
"""

from collections.abc import Sequence

from kvherd.core.ids import PrefixHash, RequestId
from kvherd.core.routing.candidate import Place

_Layers = list[set[PrefixHash]]
"""The first has the blocks of one request or more, the second those of two or more, and so on; none is empty."""


class OptimisticBlocks:
    """Knows, for each worker or rank of one, which blocks requests under way will have there.

    A block's name stands for all before it, so of the blocks of a chain a layer has the first few, or none. What a
    request adds to a layer, or takes from it, is therefore one slice of its chain, and costs a fraction of counting
    block by block.
    """

    def __init__(self) -> None:
        self._requests: dict[RequestId, tuple[Place, Sequence[PrefixHash]]] = {}
        self._layers: dict[Place, _Layers] = {}

    def hold(self, request: RequestId, place: Place, chain: Sequence[PrefixHash]) -> None:
        """`request` was sent there: count its blocks there. A request counts once, where it was sent last."""
        self.release(request)
        self._requests[request] = (place, chain)
        if not chain:
            return
        layers = self._layers.setdefault(place, [])
        for had, begin, end in _runs(layers, chain):
            if had == len(layers):
                layers.append(set(chain[begin:end]))
            else:
                layers[had].update(chain[begin:end])

    def release(self, request: RequestId) -> None:
        """The request ended: what the worker kept of it, its events have told. Harmless for an unknown one."""
        place, chain = self._requests.pop(request, (None, ()))
        if place is None or not chain:
            return
        layers = self._layers[place]
        for had, begin, end in _runs(layers, chain):
            if had:
                layers[had - 1].difference_update(chain[begin:end])
        while layers and not layers[-1]:
            layers.pop()
        if not layers:
            del self._layers[place]

    def extend(self, place: Place, chain: Sequence[PrefixHash], held: int) -> int:
        """Leading blocks of `chain` on their way there or held there, `held` of them known to be."""
        layers = self._layers.get(place)
        if layers is None:
            return held
        coming = layers[0]
        while held < len(chain) and chain[held] in coming:
            held += 1
        return held

    def __len__(self) -> int:
        return len(self._requests)


def _runs(layers: _Layers, chain: Sequence[PrefixHash]) -> list[tuple[int, int, int]]:
    """Cut the chain where the number of layers that have its blocks changes: that number, and from where to where."""
    runs = []
    begin, length = 0, len(chain)
    while begin < length:
        had = _deep(layers, chain[begin])
        end = _leading(layers[had - 1], chain, begin + 1) if had else length
        runs.append((had, begin, end))
        begin = end
    return runs


def _deep(layers: _Layers, block: PrefixHash) -> int:
    """How many of the layers have the block: every layer is a part of the one before it."""
    low, high = 0, len(layers)
    while low < high:
        middle = (low + high) // 2
        if block in layers[middle]:
            low = middle + 1
        else:
            high = middle
    return low


def _leading(layer: set[PrefixHash], chain: Sequence[PrefixHash], low: int) -> int:
    """How many blocks of the chain the layer has, `low` or more."""
    high = len(chain)
    while low < high:
        middle = (low + high) // 2
        if chain[middle] in layer:
            low = middle + 1
        else:
            high = middle
    return low
