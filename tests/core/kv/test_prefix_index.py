"""The index against what it must mean, written down the slow way."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvherd.core.ids import EngineHash, PrefixHash, Rank, WorkerId
from kvherd.core.kv.events import BlocksRemoved, BlocksStored, CacheCleared, KvEvent, KvEventBatch, Tier
from kvherd.core.kv.hashing import PrefixHasher, prefix_chain
from kvherd.core.kv.index import Holder, PrefixIndex

ANN, BOB = WorkerId("ann"), WorkerId("bob")
ANN0, ANN1, BOB0 = Holder(ANN, Rank(0)), Holder(ANN, Rank(1)), Holder(BOB, Rank(0))
SIZE = 3
KEY = b"a key for tests"
Path = tuple[int, ...]
"""A block by the choice made at each step from the root: its content is its path."""


def engine_hash(path: Path) -> EngineHash:
    return EngineHash(hash(("engine", path)) % 2**64)


def tokens(path: Path) -> tuple[int, ...]:
    return (path[-1], 7, 7) if path else ()


def stored(path: Path, length: int = 1, tier: Tier = Tier.DEVICE) -> BlocksStored:
    """The last `length` blocks of `path`, in one event."""
    paths = [path[:end] for end in range(len(path) - length + 1, len(path) + 1)]
    before = paths[0][:-1]
    return BlocksStored(
        block_hashes=tuple(map(engine_hash, paths)),
        parent_hash=engine_hash(before) if before else None,
        token_ids=tuple(token for one in paths for token in tokens(one)),
        block_size=SIZE,
        tier=tier,
    )


def removed(*paths: Path, tier: Tier = Tier.DEVICE) -> BlocksRemoved:
    return BlocksRemoved(tuple(map(engine_hash, paths)), tier)


def chain(path: Path) -> list[PrefixHash]:
    prompt = [token for end in range(1, len(path) + 1) for token in tokens(path[:end])]
    return prefix_chain(prompt, block_size=SIZE, model="m", key=KEY)


@pytest.fixture
def index() -> PrefixIndex:
    index = PrefixIndex(PrefixHasher(KEY))
    index.enrol(ANN, model="m")
    index.enrol(BOB, model="m")
    return index


def apply(index: PrefixIndex, holder: Holder, *events: KvEvent) -> None:
    index.apply(holder, KvEventBatch(1, 0.0, holder.rank, events))


def test_a_prefix_counts_as_far_as_it_is_held(index: PrefixIndex) -> None:
    apply(index, ANN0, stored((1, 2, 3), 3))
    apply(index, BOB0, stored((1,)))
    assert index.match(chain((1, 2, 3, 4))) == {ANN0: 3, BOB0: 1}
    assert index.match(chain((1, 9))) == {ANN0: 1, BOB0: 1}
    assert index.match(chain((2, 3))) == {}
    assert index.match([]) == {}


def test_what_is_held_beyond_the_device_is_known_of_each_worker(index: PrefixIndex) -> None:
    apply(index, ANN0, stored((1,)), stored((1,)))
    assert not index.beyond_device(ANN), "two copies on the device are no other tier"
    apply(index, ANN1, stored((1,), tier=Tier.HOST))
    assert (index.beyond_device(ANN), index.beyond_device(BOB)) == (True, False)
    apply(index, ANN1, removed((1,), tier=Tier.HOST))
    assert not index.beyond_device(ANN)


def test_a_hole_hides_the_blocks_behind_it_until_it_is_filled(index: PrefixIndex) -> None:
    apply(index, ANN0, stored((1, 2, 3), 3), removed((1, 2)))
    assert index.match(chain((1, 2, 3))) == {ANN0: 1}
    apply(index, ANN0, stored((1, 2)))
    assert index.match(chain((1, 2, 3))) == {ANN0: 3}


def test_a_block_stored_twice_is_gone_when_it_is_removed_twice(index: PrefixIndex) -> None:
    apply(index, ANN0, stored((1,)), stored((1, 2)), stored((1, 2)), removed((1, 2)))
    assert index.match(chain((1, 2))) == {ANN0: 2}
    apply(index, ANN0, removed((1, 2)))
    assert index.match(chain((1, 2))) == {ANN0: 1}


def test_a_chain_told_again_from_its_root_adds_no_copies(index: PrefixIndex) -> None:
    apply(index, ANN0, stored((1, 2), 2), stored((1, 2)), stored((1, 2, 3), 3), removed((1,), (1, 2), (1, 2, 3)))
    assert index.contents(ANN0) == {engine_hash((1, 2)): {Tier.DEVICE: 1}}


def test_a_block_without_a_known_parent_counts_once_the_parent_is_stored(index: PrefixIndex) -> None:
    apply(index, ANN0, stored((1, 2, 3), 2))
    assert index.blocks(ANN0) == 0
    assert index.match(chain((1, 2, 3))) == {}
    apply(index, ANN0, stored((1,)))
    assert index.blocks(ANN0) == 3
    assert index.match(chain((1, 2, 3))) == {ANN0: 3}


def test_only_the_device_gives_credit(index: PrefixIndex) -> None:
    apply(index, ANN0, stored((1, 2), 2), stored((1,), tier=Tier.HOST), removed((1,)))
    assert index.match(chain((1, 2))) == {}
    apply(index, ANN0, stored((1,)), removed((1,), tier=Tier.HOST))
    assert index.match(chain((1, 2))) == {ANN0: 2}


def test_a_clear_of_one_rank_leaves_the_others_alone(index: PrefixIndex) -> None:
    for holder in (ANN0, ANN1, BOB0):
        apply(index, holder, stored((1,)))
    apply(index, ANN1, CacheCleared())
    assert index.match(chain((1,))) == {ANN0: 1, BOB0: 1}


def test_a_dropped_worker_is_gone_and_its_place_is_used_again(index: PrefixIndex) -> None:
    apply(index, ANN0, stored((1, 2), 2))
    index.drop(ANN)
    assert index.match(chain((1,))) == {}
    assert len(index) == 0
    with pytest.raises(KeyError):
        apply(index, ANN0, stored((1,)))
    apply(index, BOB0, stored((1,)))
    assert index.match(chain((1,))) == {BOB0: 1}


def test_models_adapters_and_salts_do_not_share_prefixes(index: PrefixIndex) -> None:
    plain, salted = stored((1,)), BlocksStored((EngineHash(5),), None, (1, 7, 7), SIZE, salt="s")
    adapted = BlocksStored((EngineHash(6),), None, (1, 7, 7), SIZE, lora="l")
    index.enrol(BOB, model="other")
    apply(index, BOB0, plain)
    apply(index, ANN0, salted, adapted)
    assert index.match(chain((1,))) == {}
    for names in ({"salt": "s"}, {"lora": "l"}):
        found = index.match(prefix_chain((1, 7, 7), block_size=SIZE, model="m", key=KEY, **names))
        assert found == {ANN0: 1}
    assert index.match(prefix_chain((1, 7, 7), block_size=SIZE, model="other", key=KEY)) == {BOB0: 1}


def test_two_engine_hashes_of_one_prefix_are_told_apart(index: PrefixIndex) -> None:
    other = BlocksStored((EngineHash(5),), None, tokens((1,)), SIZE)
    apply(index, ANN0, stored((1,)), other, removed((1,)))
    assert index.match(chain((1,))) == {ANN0: 1}
    apply(index, ANN0, BlocksRemoved((EngineHash(5),)))
    assert index.match(chain((1,))) == {}


def test_a_multimodal_key_keeps_a_prefix_apart(index: PrefixIndex) -> None:
    seen = BlocksStored((EngineHash(5),), None, tokens((1,)), SIZE, extra_keys=((("image", 3),),))
    apply(index, ANN0, seen)
    assert index.match(chain((1,))) == {}
    assert index.blocks(ANN0) == 1


# --- any history ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    holder: Holder
    event: KvEvent | None  # None: the worker is dropped and enrolled again
    paths: tuple[Path, ...] = ()


class SlowIndex:
    """What the index must mean: a count of copies a block, looked at one by one."""

    def __init__(self) -> None:
        self.copies: dict[Holder, Counter[tuple[Path, Tier]]] = {}

    def apply(self, step: Step) -> None:
        if step.event is None:
            for holder in [one for one in self.copies if one.worker == step.holder.worker]:
                del self.copies[holder]
            return
        copies = self.copies.setdefault(step.holder, Counter())
        match step.event:
            case BlocksStored(tier=tier):
                for path in step.paths:
                    had = copies[path, tier]
                    # A store from the root may tell of copies again that were told.
                    copies[path, tier] = max(1, had) if step.event.parent_hash is None else had + 1
            case BlocksRemoved(tier=tier):
                for path in step.paths:
                    copies[path, tier] = max(0, copies[path, tier] - 1)
            case CacheCleared():
                copies.clear()

    def match(self, path: Path) -> dict[Holder, int]:
        found = {}
        for holder, copies in self.copies.items():
            depth = 0
            while depth < len(path) and copies[path[: depth + 1], Tier.DEVICE]:
                depth += 1
            if depth:
                found[holder] = depth
        return found

    def contents(self, holder: Holder) -> dict[EngineHash, dict[Tier, int]]:
        held: dict[EngineHash, dict[Tier, int]] = {}
        for (path, tier), count in self.copies.get(holder, Counter()).items():
            if count:
                held.setdefault(engine_hash(path), {})[tier] = count
        return held


paths = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple)
holders = st.sampled_from([ANN0, ANN1, BOB0])
tiers = st.sampled_from([Tier.DEVICE, Tier.DEVICE, Tier.DEVICE, Tier.HOST])


@st.composite
def steps(draw: st.DrawFn) -> Step:
    holder = draw(holders)
    kind = draw(st.sampled_from(["store", "store", "store", "remove", "remove", "clear", "drop"]))
    if kind == "store":
        path, tier = draw(paths), draw(tiers)
        length = draw(st.integers(1, len(path)))
        run = tuple(path[:end] for end in range(len(path) - length + 1, len(path) + 1))
        return Step(holder, stored(path, length, tier), run)
    if kind == "remove":
        gone, tier = tuple(draw(st.lists(paths, min_size=1, max_size=3))), draw(tiers)
        return Step(holder, removed(*gone, tier=tier), gone)
    return Step(holder, CacheCleared() if kind == "clear" else None)


def every_path(depth: int) -> list[Path]:
    if depth == 0:
        return [()]
    return [(*path, choice) for path in every_path(depth - 1) for choice in (0, 1)]


LEAVES = every_path(4)
CHAINS = {leaf: chain(leaf) for leaf in LEAVES}


@settings(max_examples=300, deadline=None)
@given(st.lists(steps(), max_size=30))
def test_any_history_gives_what_the_slow_index_gives(history: Sequence[Step]) -> None:
    index, slow = PrefixIndex(PrefixHasher(KEY)), SlowIndex()
    index.enrol(ANN, model="m")
    index.enrol(BOB, model="m")
    for step in history:
        slow.apply(step)
        if step.event is None:
            index.enrol(step.holder.worker, model="m")
        else:
            apply(index, step.holder, step.event)
        for leaf in LEAVES:
            assert index.match(CHAINS[leaf]) == slow.match(leaf)
    for holder in (ANN0, ANN1, BOB0):
        assert index.contents(holder) == slow.contents(holder)
    index.drop(ANN)
    index.drop(BOB)
    assert len(index) == 0


def test_a_store_that_goes_on_from_an_unknown_parent_into_known_blocks_counts_their_copies(index: PrefixIndex) -> None:
    """1. Three blocks are known. 2. The first goes, 3. and a run is stored again whose parent it is."""
    apply(index, ANN0, stored((1, 2, 3), 3), removed((1,)), stored((1, 2, 3, 4), 3))
    assert index.contents(ANN0)[engine_hash((1, 2))] == {Tier.DEVICE: 2}
    apply(index, ANN0, stored((1,)))
    assert index.match(chain((1, 2, 3, 4))) == {ANN0: 4}


def test_an_orphan_in_several_tiers_counts_by_its_device_copy(index: PrefixIndex) -> None:
    apply(index, ANN0, stored((1, 2)), stored((1, 2), tier=Tier.HOST), stored((1, 2)), removed((1, 2)))
    apply(index, ANN0, stored((1,)))
    assert index.match(chain((1, 2))) == {ANN0: 2}
    apply(index, ANN0, removed((1, 2)))
    assert index.match(chain((1, 2))) == {ANN0: 1}
    apply(index, ANN0, removed((1, 2), tier=Tier.HOST), removed((1, 2), tier=Tier.HOST))
    assert set(index.contents(ANN0)) == {engine_hash((1,))}


def test_an_orphan_may_be_named_by_a_store_from_the_root(index: PrefixIndex) -> None:
    apply(index, ANN0, stored((1, 2, 3), 1), stored((1, 2), 1), stored((1, 2, 3), 3))
    assert index.match(chain((1, 2, 3))) == {ANN0: 3}
    assert index.contents(ANN0)[engine_hash((1, 2))] == {Tier.DEVICE: 1}


def test_three_engine_hashes_of_one_prefix_go_one_by_one(index: PrefixIndex) -> None:
    hashes = [EngineHash(number) for number in (5, 6, 7)]
    apply(index, ANN0, *(BlocksStored((one,), None, tokens((1,)), SIZE) for one in hashes))
    for one in hashes:
        assert index.match(chain((1,))) == {ANN0: 1}
        apply(index, ANN0, BlocksRemoved((one,)))
    assert len(index) == 0


def test_what_was_never_held_is_empty(index: PrefixIndex) -> None:
    index.clear(BOB0)
    assert (index.blocks(BOB0), index.worker_blocks(BOB), dict(index.contents(BOB0))) == (0, 0, {})
    apply(index, ANN0, stored((1,)))
    apply(index, ANN1, stored((1, 2), 2))
    assert index.worker_blocks(ANN) == 3
    index.clear(ANN1)
    assert index.worker_blocks(ANN) == 1


LONG = tuple(range(80))
BEGUN = 70


def by_worker(index: PrefixIndex, path: Path, begun: int) -> dict[WorkerId, dict[Rank, int]]:
    """As it is found with a beginning that may be remembered; the same as without."""
    found = index.match_workers(chain(path), begun)
    assert found == index.match_workers(chain(path)), "whatever is remembered"
    return found


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([ANN0, ANN1, BOB0]),
            st.sampled_from(["store", "store", "piece", "remove", "remove", "clear", "others", "rejoin"]),
            st.integers(1, len(LONG)),
            st.integers(1, len(LONG)),
        ),
        max_size=30,
    )
)
def test_what_is_remembered_of_a_beginning_is_what_would_be_found(
    steps: list[tuple[Holder, str, int, int]],
) -> None:
    index = PrefixIndex(PrefixHasher(KEY))
    for worker in (ANN, BOB):
        index.enrol(worker, model="m")
    apply(index, ANN0, stored(LONG, len(LONG)))
    for holder, what, one, another in steps:
        begin, end = min(one, another), max(one, another)
        if what == "store":
            apply(index, holder, stored(LONG[:end], end))
        elif what == "piece":
            apply(index, holder, stored(LONG[:end], end - begin + 1))
        elif what == "remove":
            apply(index, holder, removed(LONG[:begin]))
        elif what == "clear":
            apply(index, holder, CacheCleared())
        elif what == "others":
            apply(index, holder, *(stored((200 + number,)) for number in range(end)))
        else:
            index.enrol(holder.worker, model="m")
        for begun in (BEGUN, len(LONG), 65):
            by_worker(index, LONG, begun)
        by_worker(index, (*LONG[:BEGUN], 300), BEGUN)


def test_a_beginning_that_is_asked_for_again_is_not_looked_up_again(index: PrefixIndex) -> None:
    apply(index, ANN0, stored(LONG, len(LONG)))
    assert by_worker(index, LONG, BEGUN) == {ANN: {Rank(0): len(LONG)}}
    looked_up: list[int] = []

    class Counted(dict[PrefixHash, int]):
        def get(self, name: PrefixHash, default: int | None = None) -> int | None:  # type: ignore[override]
            looked_up.append(name)
            return super().get(name, default)

    apply(index, BOB0, stored((500,)))
    index._masks = Counted(index._masks)
    assert index.match_workers(chain(LONG), BEGUN) == {ANN: {Rank(0): len(LONG)}}
    assert looked_up == chain(LONG)[BEGUN:]


def test_beginnings_are_remembered_within_bounds(index: PrefixIndex) -> None:
    for number in range(1100):
        by_worker(index, (number, *LONG), BEGUN)
        assert sum(1 for _ in index._begun) * BEGUN <= 65_536
    apply(index, ANN0, *(stored((number, 5), 2) for number in range(1, 3000)))
    assert by_worker(index, (1, 5), 2) == {ANN: {Rank(0): 2}}
    assert len(index._changes._names) <= 4096
