"""An order that does not reach every rank holds none of them."""

import pytest

from kvherd.adapters.zmq_orders import OrderDesk
from kvherd.core.errors import QueueFull
from kvherd.core.ids import Rank
from kvherd.testing.interrupted import interrupted
from kvherd.wire import scheduler_ipc as ipc

RANKS = (Rank(0), Rank(1), Rank(2))


class Ranks:
    """They keep what was sent to them; the last one takes nothing if it is `full`."""

    def __init__(self, *, full: bool = False) -> None:
        self.full = full
        self.heard: dict[Rank, list[type]] = {rank: [] for rank in RANKS}

    def send(self, rank: Rank, message: ipc.ToRank) -> None:
        if self.full and rank == RANKS[-1]:
            raise QueueFull(1)
        self.heard[rank].append(type(message))


async def give(desk: OrderDesk) -> None:
    await desk.give(ipc.FlushOrder(desk.new_id(), 3600.0, True, 0.0), RANKS, 3600.0)


async def test_an_order_that_one_rank_cannot_take_is_withdrawn_from_the_others() -> None:
    ranks = Ranks(full=True)
    desk = OrderDesk(ranks.send)
    with pytest.raises(QueueFull):
        await give(desk)
    assert ranks.heard == {0: [ipc.FlushOrder, ipc.Withdraw], 1: [ipc.FlushOrder, ipc.Withdraw], 2: []}
    assert len(desk) == 0


async def test_an_order_that_nobody_waits_for_any_more_is_withdrawn() -> None:
    ranks = Ranks()
    desk = OrderDesk(ranks.send)
    assert await interrupted(give(desk), 0)
    assert set(map(tuple, ranks.heard.values())) == {(ipc.FlushOrder, ipc.Withdraw)}
    assert len(desk) == 0
