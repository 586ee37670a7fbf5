"""What late subscribers are told."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvherd.core.ids import EngineHash, Rank, WorkerId
from kvherd.core.kv.events import BlocksRemoved, BlocksStored, CacheCleared, ExtraKey, KvEvent, Tier
from kvherd.core.kv.hashing import PrefixHasher, prefix_chain
from kvherd.core.kv.history import Future, RankHistory, Resumed, TooOld, roll_base
from kvherd.core.kv.index import Holder, PrefixIndex
from kvherd.core.kv.live_state import LiveState
from kvherd.core.kv.pieces import weight

RANK, BASE = Rank(0), 5 * 2**32
HOLDER = Holder(WorkerId("w"), RANK)


def block(number: int, parent: int | None = None, tier: Tier = Tier.DEVICE) -> BlocksStored:
    return BlocksStored(
        (EngineHash(number),), None if parent is None else EngineHash(parent), (number, 1, 1), 3, tier=tier
    )


def history(limit_tokens: int = 1_000) -> RankHistory:
    return RankHistory(RANK, BASE, limit_tokens=limit_tokens)


def held(*batches: Sequence[KvEvent]) -> PrefixIndex:
    index = PrefixIndex(PrefixHasher(b"k"))
    index.enrol(HOLDER.worker, model="m")
    for events in batches:
        index.apply_events(HOLDER, events)
    return index


def contents(*batches: Sequence[KvEvent]) -> object:
    return held(*batches).contents(HOLDER)


def reachable(*batches: Sequence[KvEvent]) -> list[int]:
    """How far each of the two chains of `consistent` is held."""
    chains = [
        prefix_chain([token for number in numbers for token in (number, 1, 1)], block_size=3, model="m", key=b"k")
        for numbers in ((1, 3, 5), (2, 4, 6))
    ]
    index = held(*batches)
    return [index.match(chain).get(HOLDER, 0) for chain in chains]


def test_a_base_is_a_multiple_of_two_to_the_32_below_two_to_the_62() -> None:
    assert roll_base(lambda _: 0) == 2**32
    assert roll_base(lambda n: n - 1) == 2**62 - 2**32


def test_numbers_are_dense_and_a_resume_gets_what_follows() -> None:
    past = history()
    for number in range(3):
        assert past.append(1.0, [block(number)]) == 1
    assert past.last == BASE + 3
    assert past.resume(BASE + 1) == Resumed()
    following = past.after(BASE + 1)
    assert following is not None
    assert following.events == (block(1),)
    assert past.after(BASE + 3) is None


def test_cursors_outside_the_epoch_are_of_another_life_and_forgotten_ones_too_old() -> None:
    past = history(limit_tokens=25)
    for number in range(5):
        past.append(1.0, [block(number)])
    assert past.resume(BASE + 6) == Future()
    assert past.resume(7) == Future()
    assert past.resume(BASE) == TooOld()
    assert past.resume(BASE + 5) == Resumed()
    with pytest.raises(LookupError):
        past.after(BASE)


def test_the_latest_batch_is_kept_however_large_it_is() -> None:
    past = history(limit_tokens=1)
    past.append(1.0, [block(1)])
    past.append(1.0, [block(2)])
    assert past.after(BASE + 1) is not None


def test_a_snapshot_ends_at_the_last_number_so_that_batches_go_on_after_it() -> None:
    past = history()
    past.append(1.0, [block(1), block(2, 1), block(2, 1)])
    (chunk,) = past.snapshot()
    assert (chunk.index, chunk.count, chunk.batch.sequence) == (0, 1, BASE + 1)
    assert chunk.batch.events[0] == CacheCleared()
    assert contents(chunk.batch.events) == contents([block(1), block(2, 1), block(2, 1)])
    assert past.resume(BASE) == Resumed()


def test_nobody_resumes_in_the_middle_of_a_snapshot() -> None:
    past = history(limit_tokens=10**9)
    for start in range(0, 40_000, 20_000):
        hashes = tuple(EngineHash(number) for number in range(start, start + 20_000))
        past.append(1.0, [BlocksStored(hashes, None, tuple(range(40_000)), 2)])
    chunks = list(past.snapshot())
    numbers = [chunk.batch.sequence for chunk in chunks]
    assert len(numbers) > 3
    assert numbers == list(range(numbers[0], past.last + 1))
    assert {past.resume(number) for number in numbers[:-1]} <= {TooOld(), Future()}
    assert past.resume(past.last) == Resumed()
    every = [event for chunk in chunks for event in chunk.batch.events]
    assert len(held(every).contents(HOLDER)) == 40_000


def retold(state: LiveState, limit: int = 1_000) -> list[BlocksStored]:
    return [event for piece in state.retell(limit) for event in piece]


def test_neighbours_of_one_chain_are_told_together_and_others_apart() -> None:
    state = LiveState()
    plain, salted = block(1), replace(block(11), salt="s")
    keyed = replace(block(3, 2), extra_keys=((("image", 1),),))
    state.apply(
        [plain, salted, block(2, 1), replace(block(12, 11), salt="s"), keyed, block(4, 3), block(5, 4, Tier.HOST)]
    )
    told: dict[tuple[int, ...], BlocksStored] = {event.block_hashes: event for event in retold(state)}
    assert set(told) == {(1, 2, 3, 4), (5,), (11, 12)}
    keys: tuple[tuple[ExtraKey, ...], ...] = ((), (), (("image", 1),), ())
    assert told[1, 2, 3, 4] == BlocksStored(
        tuple(map(EngineHash, (1, 2, 3, 4))), None, (1, 1, 1, 2, 1, 1, 3, 1, 1, 4, 1, 1), 3, extra_keys=keys
    )
    assert (told[11, 12].salt, told[5,].tier, told[5,].parent_hash) == ("s", Tier.HOST, 4)


def test_blocks_of_different_sizes_are_told_apart() -> None:
    state = LiveState()
    state.apply([block(1), BlocksStored((EngineHash(2),), EngineHash(1), (7, 8), 2)])
    assert sorted(event.block_size for event in retold(state)) == [2, 3]


def test_a_hundred_thousand_pages_are_told_in_few_stores() -> None:
    past = history(10**9)
    for start in range(0, 100_000, 1_000):
        pages = tuple(EngineHash(number) for number in range(start, start + 1_000))
        past.append(1.0, [BlocksStored(pages, None, pages, 1)])
    chunks = list(past.snapshot())
    assert len(chunks) == 14
    assert sum(len(chunk.batch.events) for chunk in chunks) < 130


def test_a_snapshot_tells_of_its_moment_whatever_happens_while_it_is_read() -> None:
    past = history(10**9)
    for number in range(1, 20_000):
        past.append(1.0, [block(number, number - 1 or None)])
    past.append(1.0, [block(7, 6)])
    before = past.state.retell(10**9)
    reading = past.snapshot()
    first = next(reading)
    past.append(3.0, [BlocksRemoved((EngineHash(1), EngineHash(7))), block(0), CacheCleared(), block(1)])
    rest = list(reading)
    assert {chunk.count for chunk in (first, *rest)} == {1 + len(rest)}
    assert rest[-1].batch.sequence == past.last - 1
    told = [event for chunk in (first, *rest) for event in chunk.batch.events]
    assert contents(told) == contents(*before)
    assert len(contents(told)) == 19_999  # type: ignore[arg-type]


def test_a_state_is_told_parents_first_even_if_they_were_stored_again_later() -> None:
    state = LiveState()
    state.apply([block(1), block(2, 1), block(3, 2), BlocksRemoved((EngineHash(1),)), block(1)])
    assert [event.block_hashes for event in retold(state)] == [(1, 2, 3)]
    assert (len(state), state.copies) == (3, 3)


events = st.one_of(
    st.builds(
        block,
        st.integers(1, 6),
        st.none() | st.integers(1, 6),
        st.sampled_from([Tier.DEVICE, Tier.DEVICE, Tier.HOST]),
    ),
    st.builds(
        lambda numbers, tier: BlocksRemoved(tuple(map(EngineHash, numbers)), tier),
        st.lists(st.integers(1, 6), max_size=3),
        st.sampled_from([Tier.DEVICE, Tier.HOST]),
    ),
    st.just(CacheCleared()),
)


def consistent(history: list[KvEvent]) -> list[KvEvent]:
    """Give each hash one parent for good, below it, as chained hashes have."""
    fixed: list[KvEvent] = []
    for event in history:
        if isinstance(event, BlocksStored):
            number = event.block_hashes[0]
            fixed.append(block(number, None if number <= 2 else number - 2, event.tier))
        else:
            fixed.append(event)
    return fixed


@given(st.lists(events, max_size=40).map(consistent), st.sampled_from([1, 20, 35, 1_000]))
def test_a_snapshot_says_the_same_as_the_events_it_stands_for(history: list[KvEvent], limit: int) -> None:
    state = LiveState()
    state.apply(history)
    told: list[KvEvent] = [CacheCleared(), *retold(state, limit)]
    assert contents(told) == contents(history)
    pieces = list(state.retell(limit))
    assert len(pieces) == state.retell(limit).count
    assert max(sum(map(weight, piece)) for piece in pieces) <= max(limit, 11)
    assert reachable(told) == reachable(history)
    # Blocks whose parent was gone when the snapshot was taken are found again when it comes back.
    roots = [block(1), block(2)]
    assert reachable(told, roots) == reachable(history, roots)
