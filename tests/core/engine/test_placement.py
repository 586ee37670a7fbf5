"""Which rank of an engine gets a request that names none."""

from kvherd.core.engine.generation import GenerationRequest, Limits
from kvherd.core.engine.placement import RankPlacement
from kvherd.core.ids import Rank, RequestId

ZERO, ONE = Rank(0), Rank(1)
IDLE = {ZERO: (0, 0), ONE: (0, 0)}
LONG, OTHER = list(range(64)), list(range(100, 164))


def asked(prompt: list[int], salt: str | None = None) -> GenerationRequest:
    return GenerationRequest(RequestId("r"), prompt, Limits(1), cache_salt=salt)


def placement() -> RankPlacement:
    return RankPlacement(block_size=16, blocks=100)


def test_the_same_prefix_goes_where_it_went_before() -> None:
    place = placement()
    assert place.choose(asked(LONG), {ZERO: (9, 1), ONE: (0, 0)}) == ONE
    assert place.choose(asked([*LONG, 7]), IDLE) == ONE
    assert place.choose(asked(OTHER), IDLE) == ZERO


def test_a_rank_with_more_to_do_than_the_prefix_saves_is_left_alone() -> None:
    place = placement()
    assert place.choose(asked(LONG), IDLE) == ZERO
    assert place.choose(asked(LONG), {ZERO: (60, 1), ONE: (0, 0)}) == ZERO
    assert place.choose(asked(LONG), {ZERO: (65, 1), ONE: (0, 0)}) == ONE


def test_among_equals_the_one_with_fewer_requests_is_chosen() -> None:
    assert placement().choose(asked(LONG), {ZERO: (0, 3), ONE: (0, 2)}) == ONE


def test_a_salt_has_no_prefix_in_common_with_anybody() -> None:
    place = placement()
    assert place.choose(asked(LONG), {ZERO: (1, 0), ONE: (0, 0)}) == ONE
    assert place.choose(asked(LONG, salt="mine"), IDLE) == ZERO


def test_after_a_flush_nothing_is_where_it_was() -> None:
    place = placement()
    assert place.choose(asked(LONG), {ZERO: (1, 0), ONE: (0, 0)}) == ONE
    place.cleared()
    assert place.choose(asked(LONG), IDLE) == ZERO
