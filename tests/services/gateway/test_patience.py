"""How long one try may take, where clocks are not exact."""

import asyncio

from kvherd.core.errors import KvherdError
from kvherd.core.fleet.refusals import DeadlinePassed
from kvherd.core.fleet.roster import Member
from kvherd.core.ids import WorkerId
from kvherd.services.gateway.settings import Bounds
from kvherd.services.gateway.waiting.patience import Patience


class Trying:
    """What it was told to give up for."""

    def __init__(self) -> None:
        self.why: list[KvherdError] = []

    def give_up(self, why: KvherdError) -> None:
        self.why.append(why)


async def test_a_clock_that_is_early_takes_no_answer_that_has_begun_for_one_that_never_did() -> None:
    """1. An answer begins, and goes on for longer than it might have taken to begin. 2. The loop looks half a
    millisecond before the client's own deadline, as it may.
    """
    loop, trying = asyncio.get_running_loop(), Trying()
    ends_s = loop.time() + 100.0
    patience = Patience(Bounds(first_byte_s=10.0))
    wait = patience.wait(Member(WorkerId("http://ann:1")), loop.time(), trying, (ends_s, 100.0))
    wait.started()
    await asyncio.sleep(99.9995)
    wait.over()
    wait.look()
    assert not trying.why
    await asyncio.sleep(0.1)
    assert [type(why) for why in trying.why] == [DeadlinePassed]
