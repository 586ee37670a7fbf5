from kvherd.core.ids import EngineHash, Rank
from kvherd.core.kv.events import BlocksStored, CacheCleared, KvEvent, KvEventBatch
from kvherd.core.kv.watch import Watch

STORED = BlocksStored((EngineHash(1),), None, (1, 2), 2)


def saw(at_s: float, *events: KvEvent, least_lag_s: float = 0.001) -> str:
    watch = Watch(sent_s=100.0)
    watch.saw(KvEventBatch(1, at_s, Rank(0), events), least_lag_s=least_lag_s)
    return watch.disturbed


def test_events_of_the_request_itself_disturb_nothing() -> None:
    assert saw(100.02, STORED) == ""


def test_events_from_before_the_request_that_came_after_it_were_not_in_the_prediction() -> None:
    assert saw(99.999, STORED) == "late events"
    assert saw(99.999) == "", "a batch without events changes nothing"


def test_a_host_whose_clock_is_an_hour_behind_is_no_hour_late() -> None:
    assert saw(100.02 - 3600, STORED, least_lag_s=3600.001) == ""
    assert saw(99.999 - 3600, STORED, least_lag_s=3600.001) == "late events"


def test_a_clear_in_between_is_told_and_the_first_thing_that_happened_stays() -> None:
    assert saw(100.02, STORED, CacheCleared()) == "cleared"
    watch = Watch(sent_s=100.0, disturbed="overlap")
    watch.happened("cleared")
    assert watch.disturbed == "overlap"
