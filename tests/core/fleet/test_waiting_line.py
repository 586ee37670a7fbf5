"""Whose turn it is: fair between names by weight, the shortest first within one, and nobody is passed over for ever."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvherd.core.fleet.waiting_line import Ticket, WaitingLine


def taken(line: WaitingLine[str]) -> list[str]:
    out = []
    while (ticket := line.take()) is not None:
        out.append(ticket.item)
    assert len(line) == 0
    return out


def test_the_shortest_goes_first_and_among_equals_who_came_first() -> None:
    line = WaitingLine[str]()
    for item, cost_s in (("long", 5.0), ("short", 1.0), ("as short", 1.0), ("shortest", 0.5)):
        line.join(item, cost_s=cost_s, now_s=0.0)
    assert taken(line) == ["shortest", "short", "as short", "long"]


@pytest.mark.parametrize(("ageing", "first"), [(1.0, "long"), (0.5, "late")])
def test_waiting_makes_up_for_length(ageing: float, first: str) -> None:
    line = WaitingLine[str](ageing=ageing)
    line.join("long", cost_s=5.0, now_s=0.0)
    line.join("late", cost_s=1.0, now_s=4.5)
    assert taken(line)[0] == first


@pytest.mark.parametrize("leaves", [False, True])
def test_when_nobody_waits_any_more_all_are_even_also_where_the_last_one_left(leaves: bool) -> None:
    line = WaitingLine[str]()
    line.join("a", name="a", cost_s=30.0, now_s=0.0)
    last = line.join("b", name="b", cost_s=30.0, now_s=0.0)
    line.take()
    if leaves:
        line.leave(last)
    else:
        line.take()
    for name in "aabbb":
        line.join(name, name=name, now_s=2.0)
    assert taken(line) == list("ababb")


def test_names_have_turns_by_their_weights() -> None:
    line = WaitingLine[str]()
    for _ in range(40):
        line.join("a", name="a", weight=3.0, now_s=0.0)
        line.join("b", name="b", now_s=0.0)
    assert Counter(taken(line)[:40]) == {"a": 30, "b": 10}


def test_what_is_dear_costs_its_name_more_turns() -> None:
    line = WaitingLine[str]()
    for _ in range(10):
        line.join("dear", name="dear", cost_s=4.0, now_s=0.0)
        line.join("cheap", name="cheap", cost_s=1.0, now_s=0.0)
    assert taken(line)[:10].count("cheap") == 8


def test_who_wanted_nothing_for_long_has_no_claim_from_then() -> None:
    line = WaitingLine[str]()
    for _ in range(30):
        line.join("busy", name="busy", now_s=0.0)
    for _ in range(20):
        line.take()
    for _ in range(10):
        line.join("late", name="late", now_s=1.0)
    assert taken(line)[:10].count("late") == 5


def test_who_was_served_dear_and_comes_again_at_once_still_owes_it() -> None:
    line = WaitingLine[str]()
    line.join("dear", name="a", cost_s=10.0, now_s=0.0)
    for _ in range(12):
        line.join("b", name="b", cost_s=1.0, now_s=0.0)
    assert line.take().item == "dear"  # type: ignore[union-attr]
    line.join("again", name="a", cost_s=0.1, now_s=0.0)
    assert taken(line).index("again") >= 10


def test_a_place_is_given_up_once() -> None:
    line = WaitingLine[str]()
    first, second = (line.join(item, now_s=0.0) for item in ("first", "second"))
    assert line.leave(first)
    assert not line.leave(first)
    assert line.take() is second
    assert not line.leave(second)
    assert len(line) == 0


def test_clocks_of_names_that_are_long_gone_are_forgotten() -> None:
    line = WaitingLine[str]()
    for number in range(1_000):
        line.join("x", name=str(number), now_s=0.0)
        line.take()
    assert len(line._clocks) <= 2


Arrival = tuple[str, float, float]
ARRIVALS = st.lists(
    st.tuples(st.sampled_from("abc"), st.floats(0.0, 50.0), st.floats(0.0, 5.0)), min_size=1, max_size=60
)
"""Name, cost, and how long after the one before it."""


def arrived(line: WaitingLine[float], arrivals: list[Arrival], *, name: str | None = None) -> list[Ticket[float]]:
    now_s, tickets = 0.0, []
    for said, cost_s, later_s in arrivals:
        now_s += later_s
        tickets.append(line.join(now_s, name=name or said, cost_s=cost_s, now_s=now_s))
    return tickets


@given(ARRIVALS, st.floats(0.1, 10.0))
def test_nobody_is_overtaken_by_those_who_come_long_after(arrivals: list[Arrival], ageing: float) -> None:
    """In a name; `item` is when one came. However much of what is short comes, it can only come so long."""
    line = WaitingLine[float](ageing=ageing)
    arrived(line, arrivals, name="one")
    order = []
    while (ticket := line.take()) is not None:
        order.append(ticket)
    for place, ticket in enumerate(order):
        overtakers = [one for one in order[:place] if one.item > ticket.item]
        assert all(one.item - ticket.item <= ticket.cost_s / ageing + 1e-6 for one in overtakers)


@given(ARRIVALS, st.dictionaries(st.sampled_from("abc"), st.floats(0.1, 10.0), min_size=3, max_size=3))
def test_names_that_wait_all_the_time_are_served_by_weight(arrivals: list[Arrival], weights: dict[str, float]) -> None:
    """While both wait, what two names had for their weights differs by no more than one turn of each."""
    line = WaitingLine[float]()
    for said, cost_s, _ in arrivals:
        line.join(0.0, name=said, weight=weights[said], cost_s=cost_s, now_s=0.0)
    left = Counter(said for said, *_ in arrivals)
    most = max((max(cost_s, 0.001) / weights[said] for said, cost_s, _ in arrivals), default=0.0)
    had = dict.fromkeys("abc", 0.0)
    while (ticket := line.take()) is not None:
        had[ticket.name] += ticket.cost_s / ticket.weight
        left[ticket.name] -= 1
        waiting = [had[name] for name in "abc" if left[name]]
        if waiting:
            assert max(waiting) - min(waiting) <= 2 * most + 1e-6


@given(ARRIVALS, st.lists(st.integers(0, 59), max_size=20))
def test_everyone_is_taken_once_or_has_left(arrivals: list[Arrival], leavers: list[int]) -> None:
    line = WaitingLine[float]()
    tickets = arrived(line, arrivals)
    gone = {number for number in leavers if number < len(tickets)}
    for number in gone:
        assert line.leave(tickets[number])
    assert len(line) == len(tickets) - len(gone)
    taken = []
    while (ticket := line.take()) is not None:
        taken.append(ticket.number)
    assert sorted(taken) == [ticket.number for number, ticket in enumerate(tickets) if number not in gone]
