"""Answers belong to the order and the rank they name."""

from kvherd.core.engine.orders import Orders
from kvherd.core.engine.reports import OrderAnswer
from kvherd.core.ids import OrderId, Rank

FLUSH, STATE = OrderId("flush-1"), OrderId("state-2")
ANN, BOB = Rank(0), Rank(1)


def _answer(order: OrderId, rank: Rank, *, done: bool = True) -> OrderAnswer:
    return OrderAnswer(order, rank, done=done, message="")


def test_an_order_is_answered_when_every_rank_has() -> None:
    orders = Orders()
    orders.open(FLUSH, [ANN, BOB])
    assert orders.answered(_answer(FLUSH, BOB)) is None
    report = orders.answered(_answer(FLUSH, ANN, done=False))
    assert report is not None
    assert [(answer.rank, answer.done) for answer in report.answers] == [(0, False), (1, True)]
    assert not report.done
    assert len(orders) == 0


def test_an_answer_after_the_time_is_late_and_never_the_next_orders() -> None:
    orders = Orders()
    orders.open(FLUSH, [ANN])
    assert orders.close(FLUSH).silent == (ANN,)
    orders.open(STATE, [ANN])
    assert orders.answered(_answer(FLUSH, ANN)) is None
    assert orders.late_answers == 1
    assert orders.answered(_answer(STATE, ANN)) is not None


def test_orders_of_several_kinds_are_under_way_together() -> None:
    orders = Orders()
    orders.open(FLUSH, [ANN, BOB])
    orders.open(STATE, [ANN, BOB])
    for rank in (ANN, BOB):
        last = orders.answered(_answer(STATE, rank))
    assert last is not None
    assert len(orders) == 1


def test_the_second_answer_of_a_rank_counts_for_nobody_else() -> None:
    orders = Orders()
    orders.open(FLUSH, [ANN, BOB])
    orders.answered(_answer(FLUSH, ANN))
    assert orders.answered(_answer(FLUSH, ANN)) is None
    assert orders.answered(_answer(FLUSH, Rank(9))) is None
    assert orders.late_answers == 2
    assert orders.close(FLUSH).silent == (BOB,)


def test_an_order_nobody_waits_for_is_forgotten() -> None:
    orders = Orders()
    orders.open(FLUSH, [ANN])
    orders.forget(FLUSH)
    orders.forget(FLUSH)
    assert orders.answered(_answer(FLUSH, ANN)) is None
    assert orders.late_answers == 1
