from kvherd.core.ids import PrefixHash, Rank, WorkerId
from kvherd.core.routing.candidate import Place
from kvherd.core.routing.prefix_memory import PrefixMemory

ANN: Place = (WorkerId("ann"), Rank(0))
BOB: Place = (WorkerId("bob"), None)


def chain(*blocks: int) -> list[PrefixHash]:
    return [PrefixHash(block) for block in blocks]


def test_it_credits_the_leading_blocks_that_were_sent_there() -> None:
    memory = PrefixMemory()
    memory.sent(ANN, chain(1, 2, 3))
    assert memory.match(ANN, chain(1, 2, 9)) == 2
    assert memory.match(ANN, chain(9, 2, 3)) == 0
    assert memory.match(BOB, chain(1)) == 0


def test_over_its_bound_the_far_end_of_the_oldest_prompt_goes_first() -> None:
    memory = PrefixMemory(blocks_per_place=4)
    memory.sent(ANN, chain(1, 2, 3))
    memory.sent(ANN, chain(7, 8))
    assert memory.match(ANN, chain(1, 2, 3)) == 2
    assert memory.match(ANN, chain(7, 8)) == 2


def test_a_flush_makes_it_forget() -> None:
    memory = PrefixMemory()
    memory.sent(ANN, chain(1))
    memory.forget(ANN[0])
    memory.forget(BOB[0])
    assert memory.match(ANN, chain(1)) == 0
