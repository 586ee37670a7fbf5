"""How many tokens of a prompt each worker is credited with, and from what that is known."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

from kvherd.core.fleet.roster import Member
from kvherd.core.ids import PrefixHash, Rank, RequestId, WorkerId
from kvherd.core.kv.hashing import PrefixHasher
from kvherd.core.kv.index import Holder, PrefixIndex
from kvherd.core.routing.candidate import KvKnowledge, Place
from kvherd.core.routing.optimistic import OptimisticBlocks
from kvherd.core.routing.prefix_memory import PrefixMemory
from kvherd.services.gateway.prompts import BYTES_PER_TOKEN, TEXT_BLOCK_BYTES, Prompt

USUAL_BLOCK = 16
"""Used where a worker does not tell its block size, and only for what is an estimate anyway."""


_Alike: TypeAlias = tuple[str, str | None, int, bool]
"""Model, adapter, block size and whether its blocks are of pairs: what a chain depends on beside the prompt."""
_Found: TypeAlias = dict[_Alike, dict[WorkerId, dict[Rank, int]]]
"""Leading blocks of a chain at each rank of each worker that has any."""


class Naming(NamedTuple):
    """What the names of a prompt's blocks depend on beside the prompt. `block_size` 0: of pieces of its text."""

    model: str
    block_size: int
    lora: str | None
    bigrams: bool


class Match:
    """`exact` False: at least so many tokens are held there, and there may be more. `whole`: all of the prompt that can
    be cached is. No dataclass, as one is made for every worker at every request.
    """

    __slots__ = ("exact", "kv", "tokens", "whole")

    def __init__(
        self, tokens: int = 0, kv: KvKnowledge = KvKnowledge.UNTOLD, *, exact: bool = True, whole: bool = False
    ) -> None:
        self.tokens = tokens
        self.kv = kv
        self.exact = exact
        self.whole = whole


NO_MATCH = Match()


class Credit:
    """Joins the index, the blocks on their way, and the memory of what was sent to workers that tell nothing."""

    def __init__(
        self,
        index: PrefixIndex,
        knowledge: Callable[[WorkerId], KvKnowledge],
        incomplete: Callable[[WorkerId], bool] = lambda _: False,
    ) -> None:
        """`incomplete` says whether a worker may hold blocks that nobody told of."""
        self._index = index
        self._knowledge = knowledge
        self._incomplete = incomplete
        self._coming = OptimisticBlocks()
        self._memory = PrefixMemory()

    def matches(self, prompt: Prompt, members: Iterable[Member]) -> dict[Place, Match]:
        """For every target of each member."""
        found: _Found = {}
        matches: dict[Place, Match] = {}
        for member in members:
            kv = self._known(prompt, member)
            for rank in member.targets:
                if kv is KvKnowledge.KNOWN:
                    match = self._match(prompt, member, rank, found)
                elif kv is KvKnowledge.UNTOLD:
                    match = self._estimate(prompt, member, rank)
                else:
                    match = Match(0, kv)
                matches[member.worker, rank] = match
        return matches

    def sent(self, request: RequestId, prompt: Prompt, member: Member, rank: Rank | None = None) -> None:
        """The request is on its way to that worker, and to this rank of it if one was named."""
        place = member.worker, rank
        if self._known(prompt, member) is KvKnowledge.UNTOLD:
            self._memory.sent(place, self._estimated_chain(prompt, member))
        else:
            self._coming.hold(request, place, self._chain(prompt, member))

    def naming(self, prompt: Prompt, members: Iterable[Member]) -> list[Naming]:
        """What of the prompt will be named to match it with these workers."""
        namings = []
        for member in members:
            size, lora, model = member.index_block_size, _adapter(prompt, member), _namespace(member)
            if self._known(prompt, member) is KvKnowledge.UNTOLD:
                told = prompt.token_ids is not None and member.tokenizes_alike(prompt.classes)
                namings.append(Naming(model, (size or USUAL_BLOCK) if told else 0, lora, bigrams=False))
            elif size:
                namings.append(Naming(model, size, lora, bigrams=self._index.bigrams(member.worker)))
        return list(dict.fromkeys(namings))

    @property
    def hasher(self) -> PrefixHasher:
        return self._index.hasher

    def ended(self, request: RequestId) -> None:
        self._coming.release(request)

    def cleared(self, worker: WorkerId) -> None:
        """Its cache was flushed, or it is another process now."""
        self._memory.forget(worker)

    def _estimate(self, prompt: Prompt, member: Member, rank: Rank | None) -> Match:
        blocks = self._memory.match((member.worker, rank), self._estimated_chain(prompt, member))
        return Match(blocks * self._estimated_block_tokens(prompt, member))

    def _match(self, prompt: Prompt, member: Member, rank: Rank | None, found: _Found) -> Match:
        worker, size = member.worker, member.index_block_size
        paired = self._index.bigrams(worker)
        # these share the prompt's chain, and one look-up
        alike = model, lora, _, _ = _namespace(member), _adapter(prompt, member), size, paired
        chain = prompt.chain(self._index.hasher, model, size, lora=lora, bigrams=paired)
        holders = found.get(alike)
        if holders is None:
            holders = found[alike] = _by_worker(self._index.match(chain))
        least, most = _held(holders.get(worker), member, rank)
        held = self._coming.extend((worker, rank), chain, least)
        # The last token is always computed: its logits are the answer's first. It makes no pair either.
        cacheable = (prompt.tokens - 1 - paired) // size if size else 0
        return Match(
            max(0, min(held, cacheable)) * size,
            KvKnowledge.KNOWN,
            exact=least == most and not self._incomplete(worker),
            whole=held >= cacheable,
        )

    def _known(self, prompt: Prompt, member: Member) -> KvKnowledge:
        """What is known of the worker's cache, as far as it speaks of this prompt: of other tokens it tells nothing."""
        alike = member.tokenizes_alike(prompt.classes)
        return self._knowledge(member.worker) if alike else KvKnowledge.UNTOLD

    def _chain(self, prompt: Prompt, member: Member) -> Sequence[PrefixHash]:
        bigrams = self._index.bigrams(member.worker)
        size, lora = member.index_block_size, _adapter(prompt, member)
        return prompt.chain(self._index.hasher, _namespace(member), size, lora=lora, bigrams=bigrams)

    def _estimated_chain(self, prompt: Prompt, member: Member) -> Sequence[PrefixHash]:
        size, lora = member.index_block_size or USUAL_BLOCK, _adapter(prompt, member)
        if prompt.token_ids is None or not member.tokenizes_alike(prompt.classes):
            return prompt.text_chain(self._index.hasher, _namespace(member), lora=lora)
        return prompt.chain(self._index.hasher, _namespace(member), size, lora=lora)

    def _estimated_block_tokens(self, prompt: Prompt, member: Member) -> int:
        if prompt.token_ids is None or not member.tokenizes_alike(prompt.classes):
            return TEXT_BLOCK_BYTES // BYTES_PER_TOKEN
        return member.index_block_size or USUAL_BLOCK


def _by_worker(found: dict[Holder, int]) -> dict[WorkerId, dict[Rank, int]]:
    workers: dict[WorkerId, dict[Rank, int]] = {}
    for (worker, rank), blocks in found.items():
        workers.setdefault(worker, {})[rank] = blocks
    return workers


def _held(ranks: dict[Rank, int] | None, member: Member, rank: Rank | None) -> tuple[int, int]:
    """Leading blocks that the rank holds; without one, the fewest and the most that any does: which is used is the
    worker's choice then.
    """
    if not ranks:
        return 0, 0
    if rank is not None:
        blocks = ranks.get(rank, 0)
        return blocks, blocks
    if len(ranks) == 1:
        for blocks in ranks.values():
            return blocks if member.ranks <= 1 else 0, blocks
    counts = ranks.values()
    return min(counts) if len(ranks) >= member.ranks else 0, max(counts)


def _namespace(member: Member) -> str:
    """The name that the worker's blocks are indexed under: of several names for one model, the first."""
    return member.models[0] if member.models else ""


def _adapter(prompt: Prompt, member: Member) -> str | None:
    """The LoRA adapter that the prompt's blocks are stored under there."""
    return prompt.model if prompt.model in member.adapters else None
