"""A step shared by rows: every row once and in order, similar cost, and keys before they are read."""

from contextlib import suppress
from threading import Event, Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvherd.runtime import row_shares
from kvherd.runtime.batch import SequenceRows
from kvherd.runtime.blas_threads import BlasThreads
from kvherd.runtime.row_shares import Relay, run_together, share_rows

DEADLINE_S = 10.0


@given(
    sizes=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 2000)), max_size=6),
    shares=st.integers(1, 5),
    cost=st.sampled_from([0.0, 1e-3, 1.0]),
)
def test_the_shares_are_the_batch_cut_in_order(sizes: list[tuple[int, int]], shares: int, cost: float) -> None:
    sequences = [
        SequenceRows([index] * count, first, [index], wants_logits=bool(index % 2))
        for index, (count, first) in enumerate(sizes)
    ]
    made = share_rows(sequences, shares, context_cost=cost)
    assert 1 <= len(made) <= shares
    rows: dict[int, int] = {}
    wanted: list[int] = []
    for part in [part for share in made for part in share]:
        index = part.token_ids[0]
        assert part.block_table == [index]
        assert part.first_position == sizes[index][1] + rows.get(index, 0)
        rows[index] = rows.get(index, 0) + len(part.token_ids)
        if part.wants_logits:
            assert rows[index] == sizes[index][0]
            wanted.append(index)
    assert rows == {index: count for index, (count, _) in enumerate(sizes)}
    assert wanted == [index for index in rows if index % 2]
    assert list(rows) == sorted(rows)
    assert len(made) == 1 or all(made)


def test_a_share_is_smaller_where_the_context_is_longer() -> None:
    (first, second) = share_rows([SequenceRows([1] * 512, 0, [])], 2, context_cost=0.0)
    assert len(first[0].token_ids) == len(second[0].token_ids) == 256
    (first, second) = share_rows([SequenceRows([1] * 512, 0, [])], 2, context_cost=0.01)
    assert 300 < len(first[0].token_ids) < 400


def test_a_few_rows_are_not_shared() -> None:
    few = [SequenceRows([1], 5, [0])] * (2 * row_shares.LEAST_ROWS - 1)
    assert share_rows(few, 2, context_cost=0.0) == [few]
    assert len(share_rows([*few, few[0]], 2, context_cost=0.0)) == 2


def test_a_share_waits_for_the_keys_of_all_before_it() -> None:
    first = Relay(2, None)
    second = Relay(2, first)
    third = Relay(2, second)
    passed = Event()

    def last_share() -> None:
        third.wrote(0)
        passed.set()

    thread = Thread(target=last_share, daemon=True)
    thread.start()
    first.wrote(0)
    assert not passed.wait(0.02)
    second.wrote(0)
    assert passed.wait(DEADLINE_S)
    thread.join(DEADLINE_S)


def test_nobody_waits_for_a_share_that_failed() -> None:
    first = Relay(1, None)
    second = Relay(1, first)

    def broken() -> str:
        try:
            raise ValueError("no")
        finally:
            first.give_up()

    def waiting() -> str:
        second.wrote(0)
        return "done"

    with pytest.raises(ValueError, match="no"):
        run_together([broken, waiting])


def test_results_come_in_the_order_of_the_calls() -> None:
    turn = Event()

    def late() -> str:
        turn.wait(DEADLINE_S)
        return "late"

    def early() -> str:
        turn.set()
        return "early"

    assert run_together([late, early]) == ["late", "early"]


def test_the_threads_of_products_are_as_before_afterwards() -> None:
    threads = BlasThreads()
    with suppress(KeyError), threads.single():
        assert BlasThreads().count == 1
        raise KeyError
    assert BlasThreads().count == threads.count >= 1
