"""How many tokens of a prompt each worker is credited with, and from what that is known."""

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from kvherd.core.fleet.roster import Member
from kvherd.core.ids import PrefixHash, Rank, RequestId, WorkerId
from kvherd.core.kv.hashing import PrefixHasher
from kvherd.core.kv.index import PrefixIndex
from kvherd.core.routing.candidate import KvKnowledge, Place
from kvherd.core.routing.optimistic import OptimisticBlocks
from kvherd.core.routing.prefix_memory import PrefixMemory
from kvherd.services.gateway.following.standing import Standing
from kvherd.services.gateway.reading.prompts import BYTES_PER_TOKEN, TEXT_BLOCK_BYTES, Prompt

USUAL_BLOCK = 16
"""Used where a worker does not tell its block size, and only for what is an estimate anyway."""

_KNOWN: Final = KvKnowledge.KNOWN
_UNTOLD: Final = KvKnowledge.UNTOLD


class Naming(NamedTuple):
    """What the names of a prompt's blocks depend on beside the prompt. `block_size` 0: of pieces of its text."""

    model: str
    block_size: int
    lora: str | None
    bigrams: bool


class Match:
    """`exact` False: at least so many tokens are held there, and there may be more. `whole`: all of the prompt that can
    be cached is. `chain` names the prompt's blocks as that worker's are named, None where none was looked up; the
    first `held` of them are known to be there. No dataclass, as one is made for every worker at every request.
    """

    __slots__ = ("chain", "exact", "held", "kv", "tokens", "whole")

    def __init__(  # noqa: PLR0917
        self,
        tokens: int = 0,
        kv: KvKnowledge = KvKnowledge.UNTOLD,
        exact: bool = True,
        whole: bool = False,
        chain: Sequence[PrefixHash] | None = None,
        held: int = 0,
    ) -> None:
        self.tokens = tokens
        self.kv = kv
        self.exact = exact
        self.whole = whole
        self.chain = chain
        self.held = held


NO_MATCH = Match()


class _Named:
    """A prompt's blocks as some workers' are named, and how many leading ones each rank of each worker has."""

    __slots__ = ("bigrams", "block_size", "chain", "holders", "lora", "model")

    def __init__(  # noqa: PLR0917
        self,
        model: str,
        block_size: int,
        lora: str | None,
        bigrams: bool,
        chain: Sequence[PrefixHash],
        holders: dict[WorkerId, dict[Rank, int]],
    ) -> None:
        self.model = model
        self.block_size = block_size
        self.lora = lora
        self.bigrams = bigrams
        self.chain = chain
        self.holders = holders


class Credit:
    """Joins the index, the blocks on their way, and the memory of what was sent to workers that tell nothing."""

    def __init__(self, index: PrefixIndex, standings: dict[WorkerId, Standing]) -> None:
        """`standings` are of the workers whose events are followed, now and later."""
        self._index = index
        self._standings = standings
        self._coming = OptimisticBlocks()
        self._memory = PrefixMemory()

    def matches(self, prompt: Prompt, members: Iterable[Member]) -> dict[Place, Match]:
        """For every target of each member."""
        named: list[_Named] = []
        matches: dict[Place, Match] = {}
        for member in members:
            worker, kv = member.worker, self._known(prompt, member)
            if kv is _KNOWN:
                one = self._named(prompt, member, named)
                ranks, complete = one.holders.get(worker), self._complete(worker)
                for rank in member.targets:
                    matches[worker, rank] = self._match(prompt, member, rank, one, ranks, complete)
            elif kv is _UNTOLD:
                for rank in member.targets:
                    matches[worker, rank] = self._estimate(prompt, member, rank)
            else:
                for rank in member.targets:
                    matches[worker, rank] = Match(0, kv)
        return matches

    def sent(self, request: RequestId, prompt: Prompt, member: Member, rank: Rank | None, match: Match) -> None:
        """The request is on its way to that worker, which `match` is of, and to this rank of it if one was named."""
        place, chain, kv = (member.worker, rank), match.chain, match.kv
        if chain is None:
            kv = self._known(prompt, member)
            chain = self._estimated_chain(prompt, member) if kv is _UNTOLD else self._chain(prompt, member)
        if kv is _UNTOLD:
            self._memory.sent(place, chain)
        else:
            self._coming.hold(request, place, chain, match.held)

    def naming(self, prompt: Prompt, members: Iterable[Member]) -> list[Naming]:
        """What of the prompt will be named to match it with these workers."""
        namings = []
        for member in members:
            size, lora, model = member.index_block_size, _adapter(prompt, member), _namespace(member)
            if self._known(prompt, member) is _UNTOLD:
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
        chain = self._estimated_chain(prompt, member)
        blocks = self._memory.match((member.worker, rank), chain)
        return Match(blocks * self._estimated_block_tokens(prompt, member), chain=chain)

    def _named(self, prompt: Prompt, member: Member, named: list[_Named]) -> _Named:
        """Those whose blocks are named alike share the prompt's chain, and one look-up."""
        model, lora = _namespace(member), _adapter(prompt, member)
        block_size, bigrams = member.index_block_size, self._index.bigrams(member.worker)
        for one in named:
            if one.block_size == block_size and one.model == model and one.lora == lora and one.bigrams == bigrams:
                return one
        chain = prompt.chain(self._index.hasher, model, block_size, lora=lora, bigrams=bigrams)
        begun = min(len(chain), prompt.begun(block_size, bigrams=bigrams))
        one = _Named(model, block_size, lora, bigrams, chain, self._index.match_workers(chain, begun))
        named.append(one)
        return one

    def _match(  # noqa: PLR0917
        self,
        prompt: Prompt,
        member: Member,
        rank: Rank | None,
        one: _Named,
        ranks: dict[Rank, int] | None,
        complete: bool,
    ) -> Match:
        size, chain = one.block_size, one.chain
        least, most = _held(ranks, member, rank)
        held = self._coming.extend((member.worker, rank), chain, least)
        # The last token is always computed: its logits are the answer's first. It makes no pair either.
        cacheable = (prompt.tokens - 1 - one.bigrams) // size if size else 0
        credited = min(cacheable, held)
        exact = complete and least == most
        return Match(credited * size if credited > 0 else 0, _KNOWN, exact, held >= cacheable, chain, least)

    def _complete(self, worker: WorkerId) -> bool:
        """Whether the worker holds no block that nobody told of."""
        standing = self._standings.get(worker)
        return standing is None or not (standing.incomplete or standing.settling)

    def _known(self, prompt: Prompt, member: Member) -> KvKnowledge:
        """What is known of the worker's cache, as far as it speaks of this prompt: of other tokens it tells nothing."""
        standing = self._standings.get(member.worker)
        return standing.knowledge if standing is not None and member.tokenizes_alike(prompt.classes) else _UNTOLD

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
