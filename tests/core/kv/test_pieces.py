"""Batches are cut, and nothing is lost by it."""

from hypothesis import given
from hypothesis import strategies as st

from kvherd.core.ids import EngineHash
from kvherd.core.kv.events import BlocksRemoved, BlocksStored, CacheCleared, KvEvent
from kvherd.core.kv.pieces import pieces, weight


def run(first: int, count: int) -> BlocksStored:
    hashes = tuple(EngineHash(number) for number in range(first, first + count))
    extra_keys = tuple((number,) for number in hashes)
    return BlocksStored(hashes, None, tuple(range(2 * count)), 2, extra_keys=extra_keys)


def test_a_run_is_cut_between_blocks_and_each_part_names_its_parent() -> None:
    (first,), (second,) = pieces([run(1, 4)], limit=20)
    assert isinstance(first, BlocksStored)
    assert isinstance(second, BlocksStored)
    assert (first.block_hashes, first.parent_hash, first.token_ids) == ((1, 2), None, (0, 1, 2, 3))
    assert (second.block_hashes, second.parent_hash, second.token_ids) == ((3, 4), 2, (4, 5, 6, 7))
    assert second.extra_keys == ((3,), (4,))


def test_no_events_give_no_piece() -> None:
    assert list(pieces([])) == []


def test_a_block_larger_than_the_limit_is_a_piece_of_its_own() -> None:
    assert [len(piece) for piece in pieces([run(1, 1), CacheCleared(), run(2, 1)], limit=1)] == [1, 1, 1]


runs = st.builds(run, st.integers(1, 50), st.integers(1, 30))
removals = st.lists(st.integers(1, 50), min_size=1, max_size=30).map(
    lambda numbers: BlocksRemoved(tuple(map(EngineHash, numbers)))
)


@given(st.lists(st.one_of(runs, removals, st.just(CacheCleared())), max_size=10), st.integers(10, 100))
def test_what_is_cut_is_the_same_block_by_block(events: list[KvEvent], limit: int) -> None:
    def flat(all_of: list[KvEvent]) -> list[object]:
        said: list[object] = []
        for event in all_of:
            match event:
                case BlocksStored():
                    parents = (event.parent_hash, *event.block_hashes)
                    said += zip(event.block_hashes, parents, event.extra_keys, strict=False)
                case BlocksRemoved():
                    said += [("gone", one) for one in event.block_hashes]
                case CacheCleared():
                    said.append("clear")
        return said

    cut = list(pieces(events, limit))
    assert flat([event for piece in cut for event in piece]) == flat(events)
    assert all(sum(map(weight, piece)) <= limit or len(piece) == 1 for piece in cut)
