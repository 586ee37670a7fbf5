"""What the scheduler takes and gives: the work of one step, and the news to carry out."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvherd.core.engine.generation import Sampling, TokenDelta, TokenLogprob
from kvherd.core.engine.reports import OrderAnswer
from kvherd.core.ids import BlockName, RequestId
from kvherd.core.kv.events import KvEvent


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What one rank can hold and do. `chunk_tokens` is the budget of new tokens in one step; `host_blocks` 0 is no host
    tier. `store` names the weights and the layout of blocks in the store behind it, None is no store; a request waits
    for it at most `store_patience_s`.
    """

    pool_blocks: int
    vocab_size: int
    max_context_tokens: int
    block_size: int = 16
    host_blocks: int = 0
    store: str | None = None
    store_patience_s: float = 2.0
    max_running: int = 32
    max_waiting: int = 1024
    chunk_tokens: int = 512
    eos_token_ids: tuple[int, ...] = ()
    seed: int = 0
    """Where a request brings no seed of its own, its seed comes from this and its turn."""


@dataclass(frozen=True, slots=True)
class StepRow:
    """New tokens of one sequence. `blocks` covers its context, these tokens included.

    `prompt` and `output` are the sequence's own lists: whole up to this step, and they do not change during it.
    `chooses` is False for a chunk that does not end the prompt: nothing is to be chosen from it.
    """

    serial: int
    token_ids: tuple[int, ...]
    position: int
    blocks: tuple[int, ...]
    chooses: bool
    sampling: Sampling
    prompt: Sequence[int]
    output: Sequence[int]
    forbidden: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Copy:
    """One block between the pool and host memory: `block` of the one, `slot` of the other."""

    block: int
    slot: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass. `events` happened while it was planned (evictions): publish them first.

    `loads` are copied from host memory into the pool before the rows are computed, which may be none.
    """

    rows: tuple[StepRow, ...]
    events: tuple[KvEvent, ...] = ()
    loads: tuple[Copy, ...] = ()


@dataclass(frozen=True, slots=True)
class WritePlan:
    """Blocks to copy from the pool to host memory, in any order, beside whatever step runs."""

    copies: tuple[Copy, ...]
    events: tuple[KvEvent, ...] = ()


@dataclass(frozen=True, slots=True)
class NamedSlot:
    """One block between host memory and the store."""

    name: BlockName
    slot: int


@dataclass(frozen=True, slots=True)
class LookPlan:
    """Find out how many of these the store has, from the first on without a hole."""

    names: tuple[BlockName, ...]


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """Blocks to read from the store into host memory, each the parent of the next: the first that cannot be verified
    in place makes those behind it worthless.
    """

    blocks: tuple[NamedSlot, ...]
    events: tuple[KvEvent, ...] = ()


@dataclass(frozen=True, slots=True)
class PutPlan:
    """Blocks to write from host memory to the store, in any order."""

    blocks: tuple[NamedSlot, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """The token chosen for a row that `chooses`."""

    token_id: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class News:
    """What to tell, in this order: events to followers of the cache, progress and answers to the servicer."""

    progress: tuple[tuple[RequestId, TokenDelta], ...] = ()
    answers: tuple[OrderAnswer, ...] = ()
    events: tuple[KvEvent, ...] = ()
