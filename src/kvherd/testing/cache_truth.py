"""The promise that every fault is tested against: what the index says is what the engine holds, or it says nothing."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from kvherd.core.ids import EngineHash, Rank, WorkerId
from kvherd.core.kv.events import BlocksRemoved, BlocksStored, CacheCleared, KvEvent
from kvherd.core.kv.index import Holder, PrefixIndex
from kvherd.testing.patience import until

PROMISE_S = 5.0
"""How soon after any fault the index is true again, or the worker has no credit."""
TOKENS = 16
"""Of a block here: the least that is not folded."""


class Knowledge(Protocol):
    """Of `Followers`, what the promise is about."""

    @property
    def index(self) -> PrefixIndex: ...
    def credit(self, worker: WorkerId) -> bool: ...
    def incomplete(self, worker: WorkerId) -> bool: ...
    def view(self, worker: WorkerId) -> object: ...


@dataclass(slots=True)
class CacheTruth:
    """What one rank of an engine really holds. Only as right as it is simple: it counts copies, and that is all."""

    copies: Counter[EngineHash] = field(default_factory=Counter)

    def apply(self, events: Iterable[KvEvent]) -> None:
        for event in events:
            match event:
                case BlocksStored():
                    self.copies.update(event.block_hashes)
                case BlocksRemoved():
                    for block in event.block_hashes:
                        self.copies[block] -= 1
                    self.copies = +self.copies
                case CacheCleared():
                    self.copies.clear()

    @property
    def blocks(self) -> set[EngineHash]:
        return set(self.copies)


def stored(number: int, parent: int | None = None, *, blocks: int = 1) -> BlocksStored:
    """A run of blocks `number`, `number + 1`, …, each with tokens that only it has."""
    return BlocksStored(
        block_hashes=tuple(EngineHash(number + step) for step in range(blocks)),
        parent_hash=None if parent is None else EngineHash(parent),
        token_ids=tuple((number * TOKENS + step) % 2**32 for step in range(blocks * TOKENS)),
        block_size=TOKENS,
    )


def removed(*numbers: int) -> BlocksRemoved:
    return BlocksRemoved(tuple(map(EngineHash, numbers)))


def doubt(followers: Knowledge, worker: WorkerId, truths: Mapping[Rank, CacheTruth]) -> str:
    """Why the promise is not kept at this moment; empty if it is."""
    if not followers.credit(worker):
        return ""
    for rank, truth in truths.items():
        told = followers.index.contents(Holder(worker, rank))
        if wrong := set(told) - truth.blocks:
            return f"rank {rank} is said to hold {_some(wrong)}, and does not"
        missing = truth.blocks - set(told)
        if missing and not followers.incomplete(worker):
            return f"rank {rank} holds {_some(missing)}, and is said to hold all but that"
    return ""


async def assert_true_or_quarantined(
    followers: Knowledge,
    worker: WorkerId,
    truths: Mapping[Rank, CacheTruth],
    *,
    within_s: float = PROMISE_S,
) -> None:
    """Return once the index says what the ranks hold, or gives the worker no credit. A worker that may hold more than
    is known must say so. Fails with what is wrong if neither comes in time.
    """
    try:
        await until(lambda: not doubt(followers, worker, truths), within_s=within_s)
    except TimeoutError:
        view = followers.view(worker)
        raise AssertionError(f"after {within_s:g} s: {doubt(followers, worker, truths)} ({view})") from None


async def assert_true(
    followers: Knowledge, worker: WorkerId, truths: Mapping[Rank, CacheTruth], *, within_s: float = PROMISE_S
) -> None:
    """Return once the index is believed and says all that the ranks hold; fails if that does not come in time."""

    def true() -> bool:
        return followers.credit(worker) and all(
            set(followers.index.contents(Holder(worker, rank))) == truth.blocks for rank, truth in truths.items()
        )

    try:
        await until(true, within_s=within_s)
    except TimeoutError:
        problem = doubt(followers, worker, truths) or "it has no credit, or is incomplete"
        raise AssertionError(f"after {within_s:g} s: {problem} ({followers.view(worker)})") from None


def _some(blocks: set[EngineHash]) -> str:
    first = ", ".join(map(str, sorted(blocks)[:5]))
    return first if len(blocks) <= 5 else f"{first} and {len(blocks) - 5} more"
