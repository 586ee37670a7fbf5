from collections import Counter
from collections.abc import Collection, Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvherd.core.ids import PrefixHash, Rank, RequestId, WorkerId
from kvherd.core.routing.candidate import Place
from kvherd.core.routing.optimistic import OptimisticBlocks

ANN: Place = (WorkerId("ann"), Rank(0))
BOB: Place = (WorkerId("bob"), None)


def chain(*blocks: int) -> Sequence[PrefixHash]:
    return [PrefixHash(block) for block in blocks]


def test_blocks_on_their_way_extend_what_is_known_to_be_held() -> None:
    blocks = OptimisticBlocks()
    blocks.hold(RequestId("r"), ANN, chain(1, 2, 3))
    assert blocks.extend(ANN, chain(1, 2, 3, 4), held=1) == 3
    assert blocks.extend(ANN, chain(1, 9, 3), held=0) == 1
    assert blocks.extend(BOB, chain(1, 2, 3), held=1) == 1


def test_a_request_that_moves_elsewhere_counts_there_alone() -> None:
    blocks = OptimisticBlocks()
    blocks.hold(RequestId("r"), ANN, chain(1))
    blocks.hold(RequestId("r"), BOB, chain(1))
    assert (blocks.extend(ANN, chain(1), 0), blocks.extend(BOB, chain(1), 0)) == (0, 1)


def test_credit_lasts_as_long_as_any_request_that_brings_it() -> None:
    blocks = OptimisticBlocks()
    blocks.hold(RequestId("r"), ANN, chain(1, 2))
    blocks.hold(RequestId("s"), ANN, chain(1, 2, 3))
    blocks.release(RequestId("s"))
    assert blocks.extend(ANN, chain(1, 2, 3), 0) == 2
    blocks.release(RequestId("r"))
    assert blocks.extend(ANN, chain(1, 2, 3), 0) == 0


@given(st.lists(st.tuples(st.sampled_from("rstu"), st.sampled_from([ANN, BOB]), st.integers(0, 5))))
def test_nothing_is_left_when_all_requests_ended(story: list[tuple[str, Place, int]]) -> None:
    blocks = OptimisticBlocks()
    for name, worker, length in story:
        blocks.hold(RequestId(name), worker, chain(*range(length)))
    assert len(blocks) == len({name for name, _, _ in story})
    for name, _, _ in story:
        blocks.release(RequestId(name))
    assert len(blocks) == 0
    assert blocks._coming == {}


def branch(path: Sequence[int]) -> Sequence[PrefixHash]:
    """A chain as hashing makes it: a name says all that came before."""
    return chain(*(hash(tuple(path[: end + 1])) for end in range(len(path))))


def leading(among: Collection[PrefixHash], path: Sequence[int]) -> int:
    """Blocks of the path's chain before the first that is not among these."""
    return next((n for n, name in enumerate(branch(path)) if name not in among), len(path))


PATHS = st.lists(st.integers(0, 1), max_size=5)
STORIES = st.lists(
    st.tuples(st.sampled_from("rstuvw"), st.sampled_from(["sent", "ended", "stored"]), PATHS), max_size=30
)


@given(STORIES, PATHS)
def test_a_block_is_on_its_way_as_long_as_a_request_that_has_it(
    story: list[tuple[str, str, list[int]]], asked: list[int]
) -> None:
    """However much of it was held when it was sent, and became known to be held since."""
    blocks, under_way, known = OptimisticBlocks(), dict[str, Sequence[PrefixHash]](), set[PrefixHash]()
    for name, what, path in story:
        match what:
            case "sent":
                blocks.hold(RequestId(name), ANN, branch(path), leading(known, path))
                under_way[name] = branch(path)
            case "ended":
                blocks.release(RequestId(name))
                under_way.pop(name, None)
            case _:
                known |= set(branch(path))
        coming = {block for one in under_way.values() for block in one}
        assert blocks.extend(ANN, branch(asked), leading(known, asked)) == leading(known | coming, asked)


@given(STORIES)
def test_only_what_was_not_held_is_counted(story: list[tuple[str, str, list[int]]]) -> None:
    blocks, under_way, known = OptimisticBlocks(), dict[str, Sequence[PrefixHash]](), set[PrefixHash]()
    for name, what, path in story:
        match what:
            case "sent":
                held = leading(known, path)
                blocks.hold(RequestId(name), ANN, branch(path), held)
                under_way[name] = branch(path)[held:]
            case "ended":
                blocks.release(RequestId(name))
                under_way.pop(name, None)
            case _:
                known |= set(branch(path))
        counts = Counter(block for one in under_way.values() for block in one)
        assert blocks._coming.get(ANN, {}) == counts
