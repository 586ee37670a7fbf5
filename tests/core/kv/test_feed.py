"""Events in, instructions out: one rank's publisher as a sequence that is whole, or void."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from kvherd.core.kv.feed import ANSWERS_AT_ONCE, TRIES, RankFeed
from kvherd.core.kv.frames import (
    AskReplay,
    BeginLife,
    Connected,
    Disconnected,
    EndLife,
    FeedEvent,
    Forward,
    Frame,
    Idle,
    Instruction,
    Received,
    Replaced,
    Replayed,
)


def frame(number: int, life: str = "a") -> Frame:
    return Frame(number, f"{life}{number}".encode())


def frames(*numbers: int, life: str = "a") -> tuple[Frame, ...]:
    return tuple(frame(number, life) for number in numbers)


def forwarded(instructions: list[Instruction]) -> list[int]:
    return [one.frame.sequence for one in instructions if isinstance(one, Forward)]


def begun(*numbers: int) -> RankFeed:
    feed = RankFeed()
    assert feed.handle(Connected()) == [AskReplay(0)]
    feed.handle(Replayed(frames(*numbers), ended=True))
    feed.handle(Replayed(frames(*numbers[-1:]), ended=True))
    return feed


def test_a_life_begins_with_what_the_publisher_has_already_sent() -> None:
    feed = RankFeed()
    assert feed.handle(Connected()) == [AskReplay(0)]
    told = feed.handle(Replayed(frames(0, 1), ended=True))
    assert told == [BeginLife(0), Forward(frame(0)), Forward(frame(1)), AskReplay(1)]
    assert feed.handle(Replayed(frames(1), ended=True)) == []


def test_the_first_live_frame_is_forwarded_once_a_replay_has_brought_it_too() -> None:
    feed = begun(0, 1)
    assert feed.handle(Received(frame(2))) == [AskReplay(1)]
    assert forwarded(feed.handle(Replayed(frames(1, 2), ended=True))) == [2]
    feed.handle(Replayed(frames(2), ended=True))
    assert feed.handle(Received(frame(3))) == [Forward(frame(3))]


def test_a_life_that_is_joined_late_says_how_much_it_lacks() -> None:
    feed = RankFeed()
    feed.handle(Connected())
    assert feed.handle(Replayed(frames(5, 6), ended=True))[0] == BeginLife(5)


def test_a_publisher_that_has_sent_nothing_is_known_from_its_birth() -> None:
    feed = begun()
    assert feed.last == -1
    assert feed.handle(Received(frame(1))) == [AskReplay(0)]
    assert forwarded(feed.handle(Replayed(frames(0, 1), ended=True))) == [0, 1]


def test_a_gap_is_asked_for_from_the_last_frame_on_so_that_it_proves_itself() -> None:
    feed = begun(0, 1)
    assert feed.handle(Received(frame(4))) == [AskReplay(1)]
    assert forwarded(feed.handle(Replayed(frames(1, 2, 3, 4, 5), ended=True))) == [2, 3, 4, 5]


def test_the_frame_that_showed_a_gap_follows_what_fills_it() -> None:
    feed = begun(0, 1)
    feed.handle(Received(frame(1)))
    assert feed.handle(Received(frame(4))) == [AskReplay(1)]
    told = feed.handle(Replayed(frames(1, 2, 3), ended=True))
    assert forwarded(told) == [2, 3, 4]
    assert feed.handle(Replayed(frames(4), ended=True)) == []
    assert feed.handle(Received(frame(5))) == [Forward(frame(5))]


def test_an_answer_with_a_hole_counts_up_to_the_hole() -> None:
    feed = begun(0, 1)
    feed.handle(Received(frame(6)))
    told = feed.handle(Replayed(frames(1, 2, 4, 5), ended=True))
    assert forwarded(told) == [2]
    assert told[-1] == AskReplay(2)


def test_an_answer_of_another_life_ends_this_one() -> None:
    feed = begun(0, 1)
    feed.handle(Received(frame(4, "b")))
    end, ask = feed.handle(Replayed(frames(1, 2, 3, life="b"), ended=True))
    assert isinstance(end, EndLife)
    assert ask == AskReplay(0)
    assert forwarded(feed.handle(Replayed(frames(0, 1, 2, 3, 4, life="b"), ended=True))) == [0, 1, 2, 3, 4]


def test_an_answer_that_loses_the_middle_counts_as_far_as_it_goes() -> None:
    feed = begun(0, 1)
    feed.handle(Received(frame(6)))
    told = feed.handle(Replayed(frames(1, 2, 3), ended=False))
    assert forwarded(told) == [2, 3]
    assert told[-1] == AskReplay(3)
    assert forwarded(feed.handle(Replayed(frames(3, 4, 5, 6), ended=True))) == [4, 5, 6]


def test_answers_that_bring_nothing_new_are_asked_for_a_few_times_and_no_more() -> None:
    feed = begun(0, 1)
    told = feed.handle(Received(frame(6)))
    for _ in range(TRIES - 1):
        assert told == [AskReplay(1)]
        told = feed.handle(Replayed(frames(1), ended=True))
    assert told == [AskReplay(1)]
    end, begin, forward = feed.handle(Replayed(frames(1), ended=True))
    assert end == EndLife("batches 2 to 5 are lost and no replay brings them")
    assert (begin, forward) == (BeginLife(6), Forward(frame(6)))


def test_a_replay_that_begins_after_the_gap_cannot_fill_it() -> None:
    feed = begun(0, 1)
    feed.handle(Received(frame(6)))
    end, ask = feed.handle(Replayed(frames(4, 5, 6), ended=True))
    assert isinstance(end, EndLife)
    assert ask == AskReplay(0)
    assert feed.handle(Replayed(frames(4, 5, 6), ended=True))[0] == BeginLife(4)


def test_a_new_connection_to_the_same_publisher_goes_on() -> None:
    feed = begun(0, 1)
    assert feed.handle(Connected()) == [AskReplay(1)]
    assert forwarded(feed.handle(Replayed(frames(1, 2), ended=True))) == [2]
    assert feed.handle(Received(frame(2))) == []
    assert feed.handle(Received(frame(3))) == [Forward(frame(3))]


def test_a_new_connection_without_proof_ends_the_life() -> None:
    feed = begun(0, 1)
    told = feed.handle(Connected())
    for _ in range(TRIES):
        assert told == [AskReplay(1)]
        told = feed.handle(Replayed((), ended=False))
    (end,) = told
    assert isinstance(end, EndLife)
    assert feed.handle(Received(frame(9, "b"))) == [BeginLife(9), Forward(frame(9, "b"))]


def test_a_publisher_that_is_not_as_far_is_another_one() -> None:
    feed = begun(0, 1)
    feed.handle(Connected())
    end, ask = feed.handle(Replayed((), ended=True))
    assert isinstance(end, EndLife)
    assert ask == AskReplay(0)
    assert feed.handle(Replayed((), ended=True)) == [BeginLife(0)]


def test_a_sequence_that_goes_back_ends_the_life() -> None:
    feed = begun(0, 1, 2)
    end, ask = feed.handle(Received(frame(0, "b")))
    assert isinstance(end, EndLife)
    assert ask == AskReplay(0)
    assert forwarded(feed.handle(Replayed(frames(0, life="b"), ended=True))) == [0]


def test_a_quiet_publisher_is_asked_whether_that_was_all() -> None:
    feed = begun(0, 1)
    assert feed.handle(Idle()) == [AskReplay(1)]
    assert feed.handle(Replayed(frames(1), ended=True)) == []
    feed.handle(Idle())
    assert feed.handle(Replayed((), ended=False)) == []
    feed.handle(Idle())
    assert forwarded(feed.handle(Replayed(frames(1, 2), ended=True))) == [2]


def test_a_replaced_process_is_believed_without_asking() -> None:
    feed = begun(0, 1)
    assert feed.handle(Replaced()) == [EndLife("its process was replaced"), AskReplay(0)]


def test_without_replay_every_doubt_ends_the_life() -> None:
    feed = RankFeed(can_replay=False)
    assert feed.handle(Connected()) == []
    assert feed.handle(Idle()) == []
    assert feed.handle(Received(frame(3))) == [BeginLife(3), Forward(frame(3))]
    end, begin, forward = feed.handle(Received(frame(5)))
    assert isinstance(end, EndLife)
    assert (begin, forward) == (BeginLife(5), Forward(frame(5)))
    (end,) = feed.handle(Connected())
    assert isinstance(end, EndLife)
    assert feed.handle(Received(frame(6, "b"))) == [BeginLife(6), Forward(frame(6, "b"))]
    (end,) = feed.handle(Received(frame(2, "c")))
    assert isinstance(end, EndLife)
    assert feed.handle(Received(frame(3, "c"))) == [BeginLife(3), Forward(frame(3, "c"))]
    (end,) = feed.handle(Replaced())
    assert isinstance(end, EndLife)
    feed.handle(Received(frame(4, "c")))
    (end,) = feed.handle(Disconnected("its connection broke"))
    assert isinstance(end, EndLife)
    assert feed.doubt == "its connection broke"


# --- any history -------------------------------------------------------------------------------------------


@dataclass
class World:
    """A publisher, a network and a reader that carries instructions out as the relay does."""

    life: int = 0
    sent: list[Frame] = field(default_factory=list)
    kept: int = 1_000
    loses: frozenset[int] = frozenset()
    ends: bool = True
    feed: RankFeed = field(default_factory=RankFeed)
    known: list[Frame] | None = None
    unknown_before: int = 0
    hurries: int = 0
    """How many batches it publishes before it answers the next question."""
    queue: list[Frame] = field(default_factory=list)
    """Live frames that came while the reader waited for an answer."""

    def tell(self, event: FeedEvent) -> None:
        self._tell(event)
        while self.queue:
            self._tell(Received(self.queue.pop(0)))

    def _tell(self, event: FeedEvent) -> None:
        todo = list(self.feed.handle(event))
        for _ in range(500):
            if not todo:
                return
            match todo.pop(0):
                case Forward(one):
                    assert self.known is not None
                    self.known.append(one)
                case EndLife():
                    self.known = None
                case BeginLife(unknown_before):
                    self.known, self.unknown_before = [], unknown_before
                case AskReplay(start):
                    assert not todo
                    todo = list(self.feed.handle(self._replay(start)))
        raise AssertionError("the feed never comes to rest")

    def _replay(self, start: int) -> Replayed:
        for _ in range(self.hurries):
            self.queue.append(self._send())
        self.hurries = 0
        answer: list[Frame] = []
        for one in self.sent[-self.kept :] if self.kept else []:
            if one.sequence < start or one.sequence in self.loses:
                continue
            if answer and one.sequence != answer[-1].sequence + 1:
                return Replayed(tuple(answer), ended=False)
            answer.append(one)
        return Replayed(tuple(answer), ended=self.ends)

    def publish(self, *, lost: bool) -> None:
        one = self._send()
        if not lost:
            self.tell(Received(one))

    def _send(self) -> Frame:
        one = frame(len(self.sent), f"{self.life}-")
        self.sent.append(one)
        return one

    def restart(self, silent: int) -> None:
        self.life += 1
        self.sent = []
        for _ in range(silent):
            self.publish(lost=True)
        self.tell(Connected())

    def check(self) -> None:
        """What is known is a run of one life, without a hole."""
        if self.known:
            first = self.known[0].sequence
            assert [one.sequence for one in self.known] == list(range(first, first + len(self.known)))
            assert len({one.payload.split(b"-")[0] for one in self.known}) == 1
            assert first == self.unknown_before


PLAIN: dict[str, FeedEvent] = {
    "reconnect": Connected(),
    "disconnect": Disconnected("its connection broke"),
    "idle": Idle(),
}

acts = st.one_of(
    st.tuples(st.just("publish"), st.booleans()),
    st.tuples(st.just("publish"), st.booleans()),
    st.tuples(st.just("repeat"), st.integers(0, 6)),
    st.tuples(st.just("restart"), st.integers(0, 8)),
    st.tuples(st.just("reconnect"), st.none()),
    st.tuples(st.just("disconnect"), st.none()),
    st.tuples(st.just("idle"), st.none()),
    st.tuples(st.just("kept"), st.sampled_from([0, 1, 3, 1_000])),
    st.tuples(st.just("loses"), st.frozensets(st.integers(0, 12), max_size=3)),
    st.tuples(st.just("ends"), st.booleans()),
    st.tuples(st.just("hurries"), st.integers(1, 6)),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(acts, max_size=40))
def test_whatever_happens_what_is_known_is_one_life_without_a_hole(history: list[tuple[str, object]]) -> None:
    world = World()
    world.tell(Connected())
    for act, how in history:
        match act, how:
            case "publish", bool(lost):
                world.publish(lost=lost)
            case "repeat", int(back) if len(world.sent) > back and world.known and world.known[-1] == world.sent[-1]:
                world.tell(Received(world.sent[-1 - back]))
            case "restart", int(silent):
                world.restart(silent)
            case (("reconnect" | "disconnect" | "idle"), _):
                world.tell(PLAIN[act])
            case "kept", int(kept):
                world.kept = kept
            case "loses", frozenset() as numbers:
                world.loses = frozenset(number for number in numbers if isinstance(number, int))
            case "ends", bool(ends):
                world.ends = ends
            case "hurries", int(number):
                world.hurries = number
            case _:
                pass
        world.check()
    world.kept, world.loses, world.ends, world.hurries = 1_000, frozenset(), True, 0
    world.tell(Connected())
    world.publish(lost=False)
    world.tell(Idle())
    assert world.known is not None
    assert world.known == world.sent[world.unknown_before :]


def test_a_first_answer_that_does_not_come_is_asked_for_a_few_times() -> None:
    feed = RankFeed()
    told = feed.handle(Connected())
    for _ in range(TRIES):
        assert told == [AskReplay(0)]
        told = feed.handle(Replayed((), ended=False))
    assert told == []
    assert feed.handle(Received(frame(3))) == [BeginLife(3), Forward(frame(3))]


def test_a_live_frame_that_a_replay_contradicts_ends_the_life_until_they_agree() -> None:
    """1. Frame 4 of life b shows a gap. 2. The replay brings frame 4 of life a, proved by frame 1. 3. No frame that
    comes is believed, nor any replay, until one brings the frame too."""
    feed = begun(0, 1)
    feed.handle(Received(frame(4, "b")))
    (end,) = feed.handle(Replayed(frames(1, 2, 3, 4), ended=True))
    assert isinstance(end, EndLife)
    assert feed.handle(Idle()) == []
    assert feed.handle(Received(frame(5, "b"))) == [AskReplay(5)]
    assert feed.handle(Replayed(frames(5), ended=True)) == []
    assert "replays are not of the publisher" in feed.doubt
    assert feed.handle(Received(frame(6, "b"))) == [AskReplay(6)]
    assert feed.handle(Replayed(frames(6, life="b"), ended=True)) == [AskReplay(0)]
    told = feed.handle(Replayed(frames(4, 5, 6, life="b"), ended=True))
    assert told[0] == BeginLife(4)
    assert feed.handle(Received(frame(7, "b"))) == [Forward(frame(7, "b"))]


def test_a_new_connection_decides_between_a_live_frame_and_a_replay() -> None:
    feed = begun(0, 1)
    feed.handle(Received(frame(4, "b")))
    feed.handle(Replayed(frames(1, 2, 3, 4), ended=True))
    assert feed.handle(Connected()) == [AskReplay(0)]
    assert forwarded(feed.handle(Replayed(frames(0, 1, life="b"), ended=True))) == [0, 1]


def test_a_frame_of_a_dead_life_that_fits_the_new_one_is_not_forwarded() -> None:
    """1. A replay is answered by life b, before the end of life a's connection is noticed. 2. A frame of a comes that
    waited: its number is the next one of b."""
    feed = begun(0, 1)
    feed.handle(Received(frame(2)))
    feed.handle(Replayed(frames(1, 2), ended=True))
    feed.handle(Idle())
    (end,) = feed.handle(Replayed(frames(2, life="b"), ended=True))
    assert isinstance(end, EndLife)
    assert feed.handle(Received(frame(3))) == [AskReplay(3)]
    assert feed.handle(Replayed((), ended=True)) == []
    feed.handle(Connected())
    assert forwarded(feed.handle(Replayed(frames(0, 1, 2, life="b"), ended=True))) == [0, 1, 2]


def test_a_first_live_frame_that_no_replay_brings_begins_a_life_of_its_own() -> None:
    feed = begun(0, 1)
    told = feed.handle(Received(frame(2, "b")))
    for _ in range(TRIES):
        assert told == [AskReplay(1)]
        told = feed.handle(Replayed(frames(1), ended=True))
    assert told[1:] == [BeginLife(2), Forward(frame(2, "b"))]


def test_a_live_frame_older_than_all_that_is_known_is_in_doubt_until_a_later_one_speaks_for_it() -> None:
    """1. A busy publisher keeps two batches. 2. When it is asked it has moved on. 3. What was queued is read."""
    feed = begun(5, 6)
    for number in (3, 4):
        assert feed.handle(Received(frame(number))) == []
        assert "older than what its replay brings" in feed.doubt
        assert feed.unproved
    assert feed.handle(Received(frame(5))) == []
    assert not feed.doubt
    assert not feed.unproved
    assert feed.handle(Received(frame(6))) == []
    assert feed.handle(Received(frame(7))) == [Forward(frame(7))]
    assert any(isinstance(one, EndLife) for one in feed.handle(Received(frame(4)))), "now it has gone back"


def test_an_older_live_frame_of_another_life_is_found_out_by_the_next_that_can_be_compared() -> None:
    feed = begun(5, 6)
    assert feed.handle(Received(frame(4, "b"))) == []
    assert any(isinstance(one, EndLife) for one in feed.handle(Received(frame(5, "b"))))
    feed = begun(5, 6)
    feed.handle(Received(frame(4, "b")))
    assert feed.handle(Idle()) == [AskReplay(6)]
    assert any(isinstance(one, EndLife) for one in feed.handle(Replayed((), ended=True)))


def test_a_live_frame_that_a_replay_has_left_behind_contradicts_nothing() -> None:
    """1. The replay of a busy publisher begins after the frame that waits. 2. So does the one that begins a life."""
    feed = begun(0, 1)
    feed.handle(Received(frame(2)))
    end, ask = feed.handle(Replayed(frames(3, 4), ended=True))
    assert isinstance(end, EndLife)
    assert ask == AskReplay(0)
    assert forwarded(feed.handle(Replayed(frames(4, 5), ended=True))) == [4, 5]
    assert feed.handle(Replayed(frames(5), ended=True)) == []
    assert "older than what its replay brings" in feed.doubt
    feed.handle(Received(frame(3)))
    feed.handle(Received(frame(4)))
    assert not feed.doubt


def test_what_is_not_proved_is_in_doubt_and_says_why() -> None:
    feed = RankFeed()
    assert feed.doubt == "there was no connection to it yet"
    feed.handle(Connected())
    assert feed.doubt == "nothing is known of it yet"
    feed.handle(Replayed(frames(0), ended=True))
    feed.handle(Replayed(frames(0), ended=True))
    assert feed.doubt == ""
    feed.handle(Received(frame(3)))
    assert "batches are missing" in feed.doubt
    feed.handle(Replayed(frames(0, 1, 2, 3), ended=True))
    feed.handle(Replayed(frames(3), ended=True))
    assert feed.doubt == ""
    feed.handle(Idle())
    assert "does not answer" in feed.doubt
    assert feed.unproved == feed.doubt, "it may be dead, and its connection not be missed yet"
    feed.handle(Replayed((), ended=False))
    assert "does not answer" in feed.doubt
    assert feed.unproved == feed.doubt
    feed.handle(Received(frame(4)))
    assert "does not answer" in feed.doubt, "a later one may be lost as well"
    feed.handle(Idle())
    feed.handle(Replayed(frames(4), ended=True))
    assert feed.doubt == feed.unproved == ""
    feed.handle(Disconnected("its connection broke"))
    assert feed.doubt == "its connection broke"


def test_a_publisher_that_did_not_answer_at_first_is_asked_again_when_it_is_quiet() -> None:
    feed = RankFeed()
    told = feed.handle(Connected())
    for _ in range(TRIES):
        assert told == [AskReplay(0)]
        told = feed.handle(Replayed((), ended=False))
    assert feed.handle(Idle()) == [AskReplay(0)]
    assert feed.handle(Disconnected("its connection broke")) == []
    assert feed.handle(Idle()) == []


def test_a_publisher_that_is_never_quiet_is_not_asked_for_ever() -> None:
    feed = begun(0)
    told, number = feed.handle(Idle()), 0
    while told and number < 2 * ANSWERS_AT_ONCE:
        told = feed.handle(Replayed(frames(number, number + 1), ended=True))
        told = [one for one in told if isinstance(one, AskReplay)]
        number += 1
    assert 1 < number <= ANSWERS_AT_ONCE


# --- a publisher that keeps a single batch ---------------------------------------------------------------------


def linked(*numbers: int) -> RankFeed:
    """Its last frame came live, too."""
    feed = begun(*numbers)
    assert feed.handle(Received(frame(numbers[-1]))) == []
    return feed


def test_a_replay_that_cannot_reach_back_starts_a_life_over_once_and_then_live_frames_go_on() -> None:
    feed = begun(0, 1)
    assert feed.handle(Received(frame(2))) == [AskReplay(1)]
    ended = feed.handle(Replayed(frames(2), ended=True))
    assert ended == [EndLife("its replay begins with batch 2, which proves nothing"), AskReplay(0)]
    assert forwarded(feed.handle(Replayed(frames(2), ended=True))) == [2]
    feed.handle(Replayed(frames(2), ended=True))
    for number in range(3, 9):
        assert feed.handle(Received(frame(number))) == [Forward(frame(number))]
        assert feed.doubt == ""


def test_a_gap_of_one_is_filled_by_a_replay_that_brings_the_live_frame_too() -> None:
    feed = linked(0, 1)
    assert feed.handle(Received(frame(3))) == [AskReplay(1)]
    assert forwarded(feed.handle(Replayed(frames(2, 3), ended=True))) == [2, 3]


def test_a_replay_that_brings_another_live_frame_fills_nothing() -> None:
    feed = linked(0, 1)
    feed.handle(Received(frame(3)))
    told = feed.handle(Replayed(frames(2, 3, life="b"), ended=True))
    assert forwarded(told) == []
    assert any(isinstance(one, EndLife) for one in told)


def test_an_answer_that_is_a_batch_ahead_is_a_doubt_until_that_comes() -> None:
    feed = linked(0, 1)
    assert feed.handle(Idle()) == [AskReplay(1)]
    assert feed.handle(Replayed(frames(2), ended=True)) == []
    assert feed.doubt == "its replay begins after what was received, and that does not come"
    assert feed.handle(Received(frame(2))) == [Forward(frame(2))]
    assert feed.doubt == ""


def test_an_answer_further_ahead_loses_nothing_that_comes_over_the_connection() -> None:
    """1. A quiet publisher is asked. 2. It has sent three batches by then and keeps two. 3. All three are queued."""
    for feed in (linked(0, 1), begun(0, 1)):
        feed.handle(Idle())
        assert feed.handle(Replayed(frames(3, 4), ended=True)) == []
        assert feed.doubt == "its replay begins after what was received, and that does not come"
        feed.handle(Received(frame(1)))
        assert [forwarded(feed.handle(Received(frame(number)))) for number in (2, 3, 4)] == [[2], [3], [4]]
        assert feed.doubt == ""


def test_what_a_later_answer_begins_after_too_is_lost() -> None:
    feed = linked(0, 1)
    feed.handle(Idle())
    feed.handle(Replayed(frames(3, 4), ended=True))
    feed.handle(Idle())
    end, _ = feed.handle(Replayed(frames(3, 4), ended=True))
    assert end == EndLife("batches 2 to 2 are lost and its replay begins after them")


def test_a_last_batch_that_was_lost_and_cannot_be_proved_ends_the_life() -> None:
    feed = linked(0, 1)
    feed.handle(Idle())
    feed.handle(Replayed(frames(2), ended=True))
    assert feed.handle(Idle()) == [AskReplay(1)]
    assert any(isinstance(one, EndLife) for one in feed.handle(Replayed(frames(2), ended=True)))
    assert forwarded(feed.handle(Replayed(frames(2), ended=True))) == [2]


def test_a_batch_ahead_over_a_new_connection_is_no_doubt_but_another_life() -> None:
    feed = linked(0, 1)
    feed.handle(Disconnected("cut"))
    assert feed.handle(Connected()) == [AskReplay(1)]
    assert any(isinstance(one, EndLife) for one in feed.handle(Replayed(frames(2), ended=True)))
