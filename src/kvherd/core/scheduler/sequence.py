"""One request's life in the scheduler: waiting, then running (its prompt, then its answer), then gone."""

from dataclasses import dataclass, field

from kvherd.core.engine.generation import Finish, GenerationRequest, Sampling, TokenDelta, TokenLogprob
from kvherd.core.scheduler.hashes import Namespace
from kvherd.core.scheduler.prefix_tree import Node


@dataclass(slots=True, eq=False)
class Sequence:
    """`serial` is its turn: the lower, the earlier it came. Only the scheduler changes it.

    `blocks` is its block table; the first `len(path)` of them are cached, the rest its own. `computed` tokens have
    their keys and values there. `tokens` is the prompt and then the answer.
    """

    request: GenerationRequest
    serial: int
    block_size: int
    sampling: Sampling
    tokens: list[int]
    output: list[int] = field(default_factory=list)
    path: list[Node] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    own_blocks: set[int] = field(default_factory=set)
    host_blocks: int = 0
    storage_blocks: int = 0
    cached_tokens: int | None = None
    host_tokens: int = 0
    storage_tokens: int = 0
    uncached_tokens: int = 0
    awaits_store: bool = False
    ended: bool = False

    @property
    def namespace(self) -> Namespace:
        return Namespace(self.request.lora, self.request.cache_salt)

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def decoding(self) -> bool:
        """One token of the context is not computed: the next step chooses a new one."""
        return self.computed == len(self.tokens) - 1

    @property
    def shareable_blocks(self) -> int:
        """So many blocks may come from the cache: the last token has to be computed, there is no logit without."""
        return (len(self.tokens) - 1) // self.block_size

    def blocks_for(self, positions: int) -> int:
        """How many more blocks it needs to hold so many tokens."""
        return max(0, -(-positions // self.block_size) - len(self.blocks))

    def private_blocks(self) -> list[int]:
        return self.blocks[len(self.path) :]

    def advance(self, new_tokens: int) -> None:
        """These were computed for it: what it did not take from the cache."""
        first = self.computed // self.block_size
        self.computed += new_tokens
        self.own_blocks.update(range(first, -(-self.computed // self.block_size)))

    def restart(self) -> None:
        """Hold nothing; what was said is still said."""
        self.path = []
        self.blocks = []
        self.computed = 0

    def cached_so_far(self) -> int:
        """Prompt tokens in place that were never computed for it."""
        if self.cached_tokens is not None:
            return self.cached_tokens
        full = min(self.computed, self.prompt_tokens) // self.block_size
        return self.block_size * sum(index not in self.own_blocks for index in range(full))

    def loaded_from(self, *, host: int, storage: int) -> None:
        """So many blocks were loaded that had been in host memory, and so many that the store brought for this."""
        self.host_blocks += host
        self.storage_blocks += storage

    def settle_cached(self) -> None:
        """The prompt is computed: what was cached of it, and where, is final."""
        cached = self.cached_so_far()
        self.host_tokens, self.storage_tokens = self._tiers_so_far(cached)
        self.cached_tokens = cached

    def _tiers_so_far(self, cached: int) -> tuple[int, int]:
        """Those of the cached tokens that were loaded from the host, and those that came from the store."""
        if self.cached_tokens is not None:
            return self.host_tokens, self.storage_tokens
        storage = min(self.storage_blocks * self.block_size, cached)
        return min(self.host_blocks * self.block_size, cached - storage), storage

    def delta(
        self, tokens: tuple[int, ...] = (), *, logprob: TokenLogprob | None = None, finish: Finish | None = None
    ) -> TokenDelta:
        cached = self.cached_so_far()
        host, storage = self._tiers_so_far(cached)
        return TokenDelta(
            token_ids=tokens,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=len(self.output),
            cached_tokens=cached,
            host_tokens=host,
            storage_tokens=storage,
            logprobs=(logprob,) if tokens and logprob is not None else (),
            finish=finish,
        )
