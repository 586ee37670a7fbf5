"""What the ranks of an engine say about themselves, and how they answer orders."""

from dataclasses import dataclass

from kvherd.core.ids import OrderId, Rank


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What does not change while a rank lives. Endpoints are ZMQ's, of the KV events and their replay."""

    rank: Rank
    pid: int
    block_size: int
    capacity_tokens: int
    max_running: int
    max_context_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    events_endpoint: str
    replay_endpoint: str
    weights_bytes: int
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class RankLoad:
    """A rank's load and totals at one moment. `*_total` count since the process began.

    `used_tokens` counts pool slots that hold anything; `active_tokens` only those that running requests pin. `host_*`
    are of the host tier; capacity 0 is none. `store_*` are of the store behind it; a failed put is one block.
    Each block of the pool is used (by a running request), cached (nobody uses it, and it can be evicted) or free.
    """

    running: int
    waiting: int
    waiting_uncached_tokens: int
    used_tokens: int
    active_tokens: int
    capacity_tokens: int
    max_running: int
    gen_tokens_per_s: float = 0.0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    generated_tokens_total: int = 0
    evicted_tokens_total: int = 0
    requests_total: int = 0
    aborts_total: int = 0
    flushes_total: int = 0
    steps_total: int = 0
    host_used_tokens: int = 0
    host_capacity_tokens: int = 0
    host_loaded_tokens_total: int = 0
    store_fetched_tokens_total: int = 0
    store_put_tokens_total: int = 0
    store_failed_puts_total: int = 0
    used_blocks: int = 0
    cached_blocks: int = 0
    free_blocks: int = 0
    flushes_waiting: int = 0


@dataclass(frozen=True, slots=True)
class Blocker:
    """What keeps a flush waiting: `kind` is running, queued, …"""

    kind: str
    count: int


@dataclass(frozen=True, slots=True)
class OrderAnswer:
    """A rank's answer to the order of this id. `done` False is a refusal; `message` says why in words.

    A flush that is done says how many blocks it cleared. A state order is always done and carries the load. A refusal
    for what else is going on is a `conflict`. `profile_id` names the profile that is on, or that was stopped; `files`
    are its traces.
    """

    order: OrderId
    rank: Rank
    done: bool
    message: str
    timed_out: bool = False
    blockers: tuple[Blocker, ...] = ()
    cleared_blocks: int = 0
    load: RankLoad | None = None
    conflict: bool = False
    profile_id: str = ""
    files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OrderReport:
    """Every rank's answer to one order, in rank order. Ranks that gave none in time are in `silent`."""

    answers: tuple[OrderAnswer, ...]
    silent: tuple[Rank, ...] = ()

    @property
    def done(self) -> bool:
        return not self.silent and all(answer.done for answer in self.answers)
