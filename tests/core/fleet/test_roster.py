import pytest

from kvherd.core.fleet.roster import Member, Roster, WorkerState
from kvherd.core.ids import Rank, RequestId, WorkerId
from kvherd.core.routing.candidate import KvKnowledge


def member(name: str = "grpc://127.0.0.1:51000", **known: object) -> Member:
    return Member(WorkerId(name), detected=True, models=("m",), **known)  # type: ignore[arg-type]


def test_a_worker_is_connecting_until_it_said_what_it_is() -> None:
    one = Member(WorkerId("http://a"), problem="connection refused")
    assert one.state is WorkerState.CONNECTING
    assert one.unavailable(0.0) == "is not connected: connection refused"


def test_a_suspect_serves_and_one_that_is_down_does_not() -> None:
    one = member()
    one.health.failed("slow")
    assert (one.state, one.unavailable(0.0)) == (WorkerState.SUSPECT, "")
    one.health.failed("refused", certain=True)
    assert (one.state, one.unavailable(0.0)) == (WorkerState.DOWN, "is down: refused")


def test_a_draining_worker_takes_no_new_request() -> None:
    one = member(draining=True)
    assert (one.state, one.unavailable(0.0)) == (WorkerState.DRAINING, "is draining")


def test_a_broken_circuit_rules_out_and_half_open_lets_one_try() -> None:
    one = member()
    for _ in range(5):
        one.breaker.failed(RequestId("r"), 0.0, 1.0)
    assert one.unavailable(0.1) == "failed too often lately; its circuit breaker is open"
    assert one.unavailable(2.0) == ""
    one.begin(RequestId("r"), prompt_tokens=1, uncached_tokens=1, now_s=2.0)
    assert one.unavailable(2.0) == "failed too often lately; one request is trying it"


def test_backlog_ends_with_the_first_token_and_the_request_with_its_end() -> None:
    one = member()
    one.begin(RequestId("r"), prompt_tokens=900, uncached_tokens=500, now_s=0.0)
    known = one.candidate(0.0, matched_tokens=0, prompt_tokens=10, kv=KvKnowledge.KNOWN)
    assert (known.backlog_s, known.in_flight) == (0.5, 1)
    one.prefilled(RequestId("r"), now_s=0.0)
    known = one.candidate(0.0, matched_tokens=0, prompt_tokens=10, kv=KvKnowledge.KNOWN)
    assert (known.backlog_s, known.in_flight) == (0.0, 1)
    one.end(RequestId("r"), now_s=0.0)
    assert not one.in_flight


def test_what_does_not_fit_pushes_something_out() -> None:
    one = member(capacity_tokens=1000, used_tokens=900)
    assert one.candidate(0.0, matched_tokens=100, prompt_tokens=400, kv=KvKnowledge.KNOWN).evicted_tokens == 200
    assert one.candidate(0.0, matched_tokens=350, prompt_tokens=400, kv=KvKnowledge.KNOWN).evicted_tokens == 0
    unknown = member()
    assert unknown.candidate(0.0, matched_tokens=0, prompt_tokens=400, kv=KvKnowledge.UNTOLD).evicted_tokens == 0


def waits_s(one: Member, rank: Rank | None = None) -> float:
    return one.candidate(0.0, matched_tokens=0, prompt_tokens=10, kv=KvKnowledge.KNOWN, rank=rank).slot_wait_s


def begin(one: Member, *names: str, rank: Rank | None = None, now_s: float = 0.0) -> None:
    for name in names:
        one.begin(RequestId(name), prompt_tokens=10, uncached_tokens=0, now_s=now_s, rank=rank)


def test_who_finds_no_slot_free_waits_for_one() -> None:
    one = member(max_running=2)
    one.slot_time.observe(4.0, 1, 2)
    begin(one, "a")
    assert waits_s(one) == 0.0
    begin(one, "b")
    assert waits_s(one) == one.slot_wait_s() == 2.0
    begin(one, "c")
    assert waits_s(one) == 4.0
    one.end(RequestId("a"), now_s=1.0)
    one.end(RequestId("b"), now_s=1.0)
    assert waits_s(one) == one.slot_wait_s() == 0.0


def test_where_nobody_knows_how_many_slots_there_are_none_is_waited_for() -> None:
    one = member(running=300, waiting=50, foreign=350)
    begin(one, "a", "b")
    assert waits_s(one) == one.slot_wait_s() == 0.0


def test_what_others_sent_there_has_slots_too() -> None:
    one = member(max_running=2, running=1, foreign=1)
    one.slot_time.observe(4.0, 1, 2)
    begin(one, "a")
    assert waits_s(one) == 2.0


def test_what_a_worker_said_of_our_own_requests_does_not_count_once_they_have_ended() -> None:
    one = member(max_running=2)
    begin(one, "a", "b", "c")
    one.running, one.waiting = 2, 1  # as it said, of these three
    for name in "abc":
        one.end(RequestId(name), now_s=0.0)
    assert waits_s(one) == 0.0


def test_each_rank_has_its_part_of_the_slots() -> None:
    one = member(max_running=4, ranks=2, addressable=True, foreign=2)
    one.slot_time.observe(4.0, 1, 2)
    begin(one, "a", rank=Rank(0))
    assert (waits_s(one, Rank(0)), waits_s(one, Rank(1))) == (2.0, 0.0)
    assert (waits_s(one), one.slot_wait_s()) == (0.0, 0.0), "one of it has a slot free"
    begin(one, "b", rank=Rank(1))
    assert (waits_s(one), one.slot_wait_s()) == (1.0, 2.0), "for one of any rank's, and for one of a rank's own"


def test_a_whole_answer_teaches_how_long_a_slot_is_kept_there_and_elsewhere() -> None:
    roster, one, other = Roster(), member(max_running=2), member("grpc://b", max_running=2)
    roster.join(one)
    roster.join(other)
    begin(one, "a", "b", "c")
    first, last = one.in_flight[RequestId("b")], one.in_flight[RequestId("c")]
    assert (first.queued, last.queued) == (False, True)
    one.served(first, now_s=6.0)
    assert (one.slot_time.seconds, other.slot_time.seconds) == (6.0, 6.0)
    one.served(last, now_s=9.0)  # of which it waited 3 s
    assert one.slot_time.seconds == 6.0


def test_there_is_room_where_a_slot_is_free_soon_or_nobody_knows_when() -> None:
    roster, one = Roster(), member(max_running=1)
    roster.join(one)
    begin(one, "a")
    assert roster.room_in_s("m", 0.3, 0.0) == 0.0, "nobody knows how long a slot is kept"
    one.served(one.in_flight[RequestId("a")], now_s=2.0)
    assert roster.room_in_s("m", 0.3, 0.0) == pytest.approx(1.7)
    idle = member("grpc://idle", max_running=1)
    roster.join(idle)
    assert roster.room_in_s("m", 0.3, 0.0) == 0.0
    begin(idle, "b")
    assert roster.room_in_s("m", 0.3, 0.0) == pytest.approx(1.7)


def test_members_are_found_by_url_and_by_slug() -> None:
    roster = Roster()
    one = member()
    roster.join(one)
    assert one.slug == "grpc-127.0.0.1-51000"
    assert roster.find("grpc://127.0.0.1:51000") is roster.find("grpc-127.0.0.1-51000") is one
    roster.leave(one.worker)
    assert (roster.find(one.slug), len(roster)) == (None, 0)


def test_a_model_is_served_while_any_worker_takes_requests_for_it() -> None:
    roster = Roster()
    first, second = member("http://a"), Member(WorkerId("http://b"), detected=True, models=("m", "n"))
    roster.join(first)
    roster.join(second)
    assert roster.models() == ("m", "n")
    assert roster.unserved(0.0) == ()
    second.health.failed("gone", certain=True)
    assert roster.unserved(0.0) == ("n",)


def test_what_one_worker_shows_is_usual_for_those_that_have_shown_nothing() -> None:
    roster = Roster()
    first, second = member("http://a"), member("http://b")
    roster.join(first)
    roster.join(second)
    roster.prefilled(first, 8000, 1.0, now_s=0.0)
    third = member("http://c")
    roster.join(third)
    assert [one.rate.at(0.0) for one in (first, second, third)] == [8000.0] * 3
    roster.prefilled(second, 2000, 1.0, now_s=0.0)
    assert [one.rate.at(0.0) for one in (first, second, third)] == [8000.0, 2000.0, 5000.0]


def busy(name: str, tokens: int, *, rate: float = 100.0, **known: object) -> Member:
    one = member(name, **known)
    one.rate.usual = rate  # and so it does not drift
    one.rate.observe(1_000, 1_000 / rate, 0.0)
    one.begin(RequestId(name), prompt_tokens=tokens, uncached_tokens=tokens, now_s=0.0)
    return one


def test_there_is_room_when_the_least_busy_worker_has_little_left() -> None:
    roster = Roster()
    roster.join(busy("http://a", 500))
    roster.join(busy("http://b", 200))
    assert roster.room_in_s("m", 0.5, 0.0) == pytest.approx(1.5)
    assert roster.room_in_s("m", 0.5, 1.0) == pytest.approx(0.5)
    assert roster.room_in_s("m", 0.5, 1.6) == 0.0
    roster.join(member("http://c"))
    assert roster.room_in_s("m", 0.5, 1.6) == 0.0


def test_who_serves_another_model_or_takes_no_request_is_not_waited_for() -> None:
    roster = Roster()
    roster.join(busy("http://a", 500))
    roster.join(member("http://b", draining=True))
    other = member("http://c")
    other.models = ("n",)
    roster.join(other)
    assert roster.room_in_s("m", 0.5, 0.0) == pytest.approx(4.5)
    assert roster.room_in_s("x", 0.5, 0.0) == 0.0, "there is nobody to wait for"


def test_of_a_worker_whose_rate_nobody_knows_a_backlog_says_nothing() -> None:
    roster = Roster()
    untaught = member("http://a")
    untaught.begin(RequestId("r"), prompt_tokens=10**6, uncached_tokens=10**6, now_s=0.0)
    roster.join(untaught)
    assert roster.room_in_s("m", 0.5, 0.0) == 0.0
    peer = member("http://b")
    roster.join(peer)
    peer.draining = True
    roster.prefilled(peer, 500, 1.0, 0.0)
    assert roster.room_in_s("m", 0.5, 0.0) > 0.0, "a peer has shown what is usual"


def test_one_idle_rank_of_many_is_room() -> None:
    one = busy("http://a", 500, ranks=2, addressable=True)
    assert one.room_in_s(0.5, 0.0) == 0.0
    for rank in (0, 1):
        one.begin(RequestId(f"{rank}"), prompt_tokens=300, uncached_tokens=300, now_s=0.0, rank=Rank(rank))
    assert one.room_in_s(0.5, 0.0) == pytest.approx(2.5)
