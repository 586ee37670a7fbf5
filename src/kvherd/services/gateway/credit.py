"""How many tokens of a prompt each worker is credited with, and from what that is known."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvherd.core.fleet.roster import Member
from kvherd.core.ids import PrefixHash, Rank, RequestId, WorkerId
from kvherd.core.kv.index import Holder, PrefixIndex
from kvherd.core.routing.candidate import KvKnowledge, Place
from kvherd.core.routing.optimistic import OptimisticBlocks
from kvherd.core.routing.prefix_memory import PrefixMemory
from kvherd.services.gateway.prompts import BYTES_PER_TOKEN, TEXT_BLOCK_BYTES, Prompt

USUAL_BLOCK = 16
"""Used where a worker does not tell its block size, and only for what is an estimate anyway."""


_Alike: TypeAlias = tuple[str, str | None, int, bool]
"""Model, adapter, block size and whether its blocks are of pairs: what a chain depends on beside the prompt."""


@dataclass(frozen=True, slots=True)
class Match:
    """`exact` False: at least so many tokens are held there, and there may be more. `whole`: all of the prompt that can
    be cached is.
    """

    tokens: int = 0
    kv: KvKnowledge = KvKnowledge.UNTOLD
    exact: bool = True
    whole: bool = False


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
        found: dict[_Alike, dict[Holder, int]] = {}
        return {
            (member.worker, rank): self._match(prompt, member, rank, found)
            for member in members
            for rank in member.targets
        }

    def sent(self, request: RequestId, prompt: Prompt, member: Member, rank: Rank | None = None) -> None:
        """The request is on its way to that worker, and to this rank of it if one was named."""
        place = member.worker, rank
        if self._known(prompt, member) is KvKnowledge.UNTOLD:
            self._memory.sent(place, self._estimated_chain(prompt, member))
        else:
            self._coming.hold(request, place, self._chain(prompt, member))

    def ended(self, request: RequestId) -> None:
        self._coming.release(request)

    def cleared(self, worker: WorkerId) -> None:
        """Its cache was flushed, or it is another process now."""
        self._memory.forget(worker)

    def _match(
        self, prompt: Prompt, member: Member, rank: Rank | None, found: dict[_Alike, dict[Holder, int]]
    ) -> Match:
        kv = self._known(prompt, member)
        if kv is KvKnowledge.QUARANTINED:
            return Match(0, kv)
        if kv is KvKnowledge.UNTOLD:
            chain = self._estimated_chain(prompt, member)
            blocks = self._memory.match((member.worker, rank), chain)
            return Match(blocks * self._estimated_block_tokens(prompt, member), kv)
        chain = self._chain(prompt, member)
        paired = self._index.bigrams(member.worker)
        # these share the prompt's chain, and one look-up
        alike = (_namespace(member), _adapter(prompt, member), member.index_block_size, paired)
        if alike not in found:
            found[alike] = self._index.match(chain)
        by_rank = _held(found[alike], member, rank)
        held = self._coming.extend((member.worker, rank), chain, min(by_rank))
        # The last token is always computed: its logits are the answer's first. It makes no pair either.
        most = (prompt.tokens - 1 - paired) // member.index_block_size if member.index_block_size else 0
        return Match(
            max(0, min(held, most)) * member.index_block_size,
            kv,
            exact=len(set(by_rank)) == 1 and not self._incomplete(member.worker),
            whole=held >= most,
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


def _held(found: dict[Holder, int], member: Member, rank: Rank | None) -> list[int]:
    """Leading blocks that the rank holds; without one, that each does: which is used is the worker's choice then."""
    if rank is not None:
        return [found.get(Holder(member.worker, rank), 0)]
    counts = [blocks for holder, blocks in found.items() if holder.worker == member.worker]
    return counts + [0] * (max(1, member.ranks) - len(counts))


def _namespace(member: Member) -> str:
    """The name that the worker's blocks are indexed under: of several names for one model, the first."""
    return member.models[0] if member.models else ""


def _adapter(prompt: Prompt, member: Member) -> str | None:
    """The LoRA adapter that the prompt's blocks are stored under there."""
    return prompt.model if prompt.model in member.adapters else None
