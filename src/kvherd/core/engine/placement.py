"""Which of an engine's ranks gets a request that names none: the one that has the least to compute before it.

What a rank has cached is taken to be what it was sent lately. That is a guess, and costs time at worst: a gateway that
follows each rank's events knows better, and names the rank.
"""

from collections.abc import Mapping
from typing import Final

from kvherd.core.engine.generation import GenerationRequest
from kvherd.core.ids import PrefixHash, Rank, WorkerId
from kvherd.core.kv.hashing import prefix_chain
from kvherd.core.routing.prefix_memory import PrefixMemory

_HERE: Final = WorkerId("here")
_KEY: Final = b"ranks"


class RankPlacement:
    """`block_size` and `blocks` are of one rank's cache."""

    def __init__(self, *, block_size: int, blocks: int) -> None:
        self._block_size = block_size
        self._sent = PrefixMemory(max(1, blocks))

    def choose(self, request: GenerationRequest, load: Mapping[Rank, tuple[int, int]]) -> Rank:
        """`load` has for each rank the prompt tokens that wait there, and the requests. The request counts as sent."""
        chain = self._chain(request)
        cached = {rank: self._sent.match((_HERE, rank), chain) * self._block_size for rank in load}
        # Tokens to compute first; among equals the rank with fewer requests, and then the first.
        chosen = min(load, key=lambda rank: (load[rank][0] - cached[rank], load[rank][1], rank))
        self._sent.sent((_HERE, chosen), chain)
        return chosen

    def cleared(self) -> None:
        """The ranks' caches were flushed."""
        self._sent.forget(_HERE)

    def _chain(self, request: GenerationRequest) -> list[PrefixHash]:
        return prefix_chain(
            request.prompt_token_ids,
            block_size=self._block_size,
            model="",
            lora=request.lora,
            salt=request.cache_salt,
            key=_KEY,
        )
