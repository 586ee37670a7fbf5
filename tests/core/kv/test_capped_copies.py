"""A follower that came late, beside an engine that tells of old blocks when asked to: no credit without a block."""

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from kvherd.core.ids import EngineHash, Rank, WorkerId
from kvherd.core.kv.events import BlocksRemoved, BlocksStored, CacheCleared, KvEvent, Tier
from kvherd.core.kv.hashing import PrefixHasher, prefix_chain
from kvherd.core.kv.history import RankHistory
from kvherd.core.kv.index import Holder, PrefixIndex

ANN = Holder(WorkerId("ann"), Rank(0))
DEPTH = 4
CHAIN = prefix_chain(
    [token for number in range(1, DEPTH + 1) for token in (number, 7, 7)], block_size=3, model="m", key=b"k"
)


def stored(first: int, last: int, tier: Tier = Tier.DEVICE) -> BlocksStored:
    """Blocks `first` to `last` of the one chain there is: block 1 is its root."""
    numbers = range(first, last + 1)
    return BlocksStored(
        tuple(map(EngineHash, numbers)),
        EngineHash(first - 1) if first > 1 else None,
        tuple(token for number in numbers for token in (number, 7, 7)),
        3,
        tier,
    )


@dataclass
class Engine:
    """One chain of blocks in several copies, and what is said of them."""

    copies: Counter[tuple[int, Tier]] = field(default_factory=Counter)

    def store(self, first: int, last: int, tier: Tier) -> list[KvEvent]:
        """Second copies come with a parent only: what is held from the root on is not computed again."""
        if first == 1:
            first = 1 + next((n for n in range(last) if not self.copies[n + 1, tier]), last)
            last = first if first == 1 and any(self.copies[n, tier] for n in range(1, last + 1)) else last
        if first > last:
            return []
        self.copies.update((number, tier) for number in range(first, last + 1))
        return [stored(first, last, tier)]

    def remove(self, number: int, tier: Tier) -> list[KvEvent]:
        if not self.copies[number, tier]:
            return []
        self.copies[number, tier] -= 1
        return [BlocksRemoved((EngineHash(number),), tier)]

    def report(self) -> list[KvEvent]:
        """Announce the cached prefix again, from the root: nothing is stored by that."""
        return [stored(1, self.prefix)] if self.prefix else []

    def clear(self) -> list[KvEvent]:
        self.copies.clear()
        return [CacheCleared()]

    @property
    def prefix(self) -> int:
        held = 0
        while held < DEPTH and self.copies[held + 1, Tier.DEVICE]:
            held += 1
        return held


runs = st.tuples(st.integers(1, DEPTH), st.integers(1, DEPTH)).map(sorted)
tiers = st.sampled_from([Tier.DEVICE, Tier.DEVICE, Tier.HOST])
steps = st.one_of(
    st.tuples(st.just("store"), runs, tiers),
    st.tuples(st.just("remove"), st.integers(1, DEPTH), tiers),
    st.tuples(st.just("report")),
)
"""Reports are asked for by anyone at any time: a request that asked may run after a clear, and clients may ask too."""


def happen(engine: Engine, step: tuple[object, ...]) -> list[KvEvent]:
    match step:
        case ("store", [int() as first, int() as last], Tier() as tier):
            return engine.store(first, last, tier)
        case ("remove", int() as number, Tier() as tier):
            return engine.remove(number, tier)
        case ("report",):
            return engine.report()
        case _:
            return engine.clear()


@settings(max_examples=400, deadline=None)
@given(st.lists(steps, max_size=12), st.lists(steps, max_size=25), st.booleans())
def test_what_was_learned_late_is_credited_only_while_a_copy_is_there(
    unheard: list[tuple[object, ...]], heard: list[tuple[object, ...]], in_pieces: bool
) -> None:
    engine, index, past = Engine(), PrefixIndex(PrefixHasher(b"k")), RankHistory(ANN.rank, 2**32, unknown_before=3)
    for step in unheard:
        happen(engine, step)
    index.enrol(ANN.worker, model="m")
    index.cap_copies(ANN)
    for step in heard:
        events = happen(engine, step)
        index.apply_events(ANN, events)
        past.append(0.0, events)
        if in_pieces:
            engine_knows = {number for (number, tier), count in engine.copies.items() if count and tier is Tier.DEVICE}
            late = PrefixIndex(PrefixHasher(b"k"))
            late.enrol(ANN.worker, model="m")
            for chunk in past.snapshot():
                late.apply(ANN, chunk.batch)
            assert {block for block, copies in late.contents(ANN).items() if Tier.DEVICE in copies} <= engine_knows
            assert late.contents(ANN) == index.contents(ANN)
        assert index.match(CHAIN).get(ANN, 0) <= engine.prefix
        assert all(set(copies.values()) == {1} for copies in index.contents(ANN).values())


@settings(deadline=None)
@given(st.lists(steps, max_size=25))
def test_after_a_clear_copies_are_counted_again_but_for_reports(heard: list[tuple[object, ...]]) -> None:
    engine, index, past = Engine(), PrefixIndex(PrefixHasher(b"k")), RankHistory(ANN.rank, 2**32, unknown_before=3)
    index.enrol(ANN.worker, model="m")
    index.cap_copies(ANN)
    for step in (("store", [1, 2], Tier.DEVICE), ("report",), ("clear",), *heard):
        events = happen(engine, step)
        index.apply_events(ANN, events)
        past.append(0.0, events)
    assert past.unknown_before == 0
    assert index.match(CHAIN).get(ANN, 0) == engine.prefix
    truth = {
        EngineHash(number): {tier: engine.copies[number, tier] for tier in Tier if engine.copies[number, tier]}
        for number in range(1, DEPTH + 1)
    }
    assert index.contents(ANN) == {block: copies for block, copies in truth.items() if copies}
    assert past.state.copies == sum(engine.copies.values())


def test_copies_that_are_there_when_the_cap_comes_are_one_from_then_on() -> None:
    index = PrefixIndex(PrefixHasher(b"k"))
    index.enrol(ANN.worker, model="m")
    index.apply_events(ANN, [stored(1, 2), stored(1, 1), stored(2, 2, Tier.HOST), stored(2, 2, Tier.HOST)])
    index.cap_copies(ANN)
    assert index.contents(ANN) == {1: {Tier.DEVICE: 1}, 2: {Tier.DEVICE: 1, Tier.HOST: 1}}
    index.apply_events(ANN, [BlocksRemoved((EngineHash(1),))])
    assert index.match(CHAIN) == {}
