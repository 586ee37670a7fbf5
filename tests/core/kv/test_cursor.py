"""The judge of sequences: every batch once and in order, whatever happens on the way."""

from hypothesis import given
from hypothesis import strategies as st

from kvherd.core.kv.cursor import BIRTH, MARKS_KEPT, Admitted, Missing, RankCursor, Repeated, Restarted


def test_any_number_may_come_first_and_then_only_the_next() -> None:
    cursor = RankCursor()
    assert cursor.judge(7, 70) == Admitted()
    assert cursor.judge(8, 80) == Admitted()
    assert cursor.judge(11, 110) == Missing(9, 10)
    assert cursor.last == 8
    assert cursor.judge(9, 90) == Admitted()


def test_a_publisher_that_has_sent_nothing_must_begin_at_zero() -> None:
    cursor = RankCursor(BIRTH)
    assert cursor.judge(1, 1) == Missing(0, 0)
    assert cursor.judge(0, 0) == Admitted()


def test_an_old_number_with_other_bytes_is_another_life() -> None:
    cursor = RankCursor()
    cursor.judge(0, 1)
    cursor.judge(1, 2)
    assert cursor.judge(1, 2) == Repeated()
    assert cursor.judge(0, 1) == Repeated()
    assert cursor.judge(1, 9) == Restarted()
    assert cursor.judge(0, 9) == Restarted()
    assert cursor.last == 1


def test_a_number_too_old_to_compare_counts_as_another_life() -> None:
    cursor = RankCursor()
    for number in range(MARKS_KEPT + 1):
        cursor.judge(number, number)
    assert cursor.judge(0, 0) == Restarted()
    assert cursor.judge(1, 1) == Repeated()


class Reader:
    """Fetches what is missing and begins anew when told, as every user of a cursor does."""

    def __init__(self) -> None:
        self.cursor = RankCursor(BIRTH)
        self.admitted: list[tuple[int, int]] = []
        self.lives: list[list[tuple[int, int]]] = [self.admitted]

    def receive(self, life: int, number: int) -> None:
        match self.cursor.judge(number, hash((life, number))):
            case Missing(first, last):
                assert (first, last) == (len(self.admitted), number - 1)
                for one in range(first, number + 1):
                    self.receive(life, one)
            case Restarted():
                self.cursor, self.admitted = RankCursor(BIRTH), []
                self.lives.append(self.admitted)
                self.receive(life, number)
            case Admitted():
                self.admitted.append((life, number))
            case Repeated():
                assert (life, number) in self.admitted


moves = st.lists(
    st.one_of(
        st.tuples(st.just("lost"), st.integers(0, 4)),
        st.tuples(st.just("repeat"), st.integers(0, 5)),
        st.tuples(st.just("restart"), st.just(0)),
    ),
    max_size=60,
)


@given(moves)
def test_every_batch_of_every_life_is_admitted_once_and_in_order(history: list[tuple[str, int]]) -> None:
    """A publisher sends, loses, repeats, and restarts at a number that was already sent."""
    reader, life, sent = Reader(), 0, 0
    for move, count in history:
        if move == "lost":
            sent += count + 1
        elif move == "restart" and sent:
            life, sent = life + 1, 1
        if sent:
            back = min(count, sent - 1) if move == "repeat" else 0
            reader.receive(life, sent - 1 - back)
    for life, admitted in enumerate(reader.lives):
        assert admitted == [(life, number) for number in range(len(admitted))]


def test_a_live_stream_thousands_of_batches_behind_a_replay_is_no_restart() -> None:
    cursor = RankCursor()
    for number in range(5_000):
        cursor.judge(number, number)
    assert {type(cursor.judge(number, number)) for number in range(5_000)} == {Repeated}
