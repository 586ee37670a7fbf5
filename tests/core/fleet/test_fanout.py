"""What a fleet's answers add up to."""

import pytest

from kvherd.core.fleet.fanout import FanoutReport, Outcome, WorkerResult
from kvherd.core.ids import WorkerId

DONE, REFUSED, UNSUPPORTED, LATE = Outcome.DONE, Outcome.REFUSED, Outcome.UNSUPPORTED, Outcome.TIMED_OUT


def report(*outcomes: Outcome) -> FanoutReport:
    return FanoutReport(
        tuple(WorkerResult(WorkerId(f"http://w{n}"), "", outcome, "", 0.0) for n, outcome in enumerate(outcomes))
    )


@pytest.mark.parametrize(
    ("outcomes", "status", "success"),
    [
        ((), 503, False),
        ((DONE, DONE), 200, True),
        ((DONE, REFUSED), 207, False),
        ((DONE, UNSUPPORTED), 200, False),
        ((DONE, UNSUPPORTED, LATE), 207, False),
        ((UNSUPPORTED,), 502, False),
        ((REFUSED, LATE), 502, False),
    ],
)
def test_the_status_says_how_many_of_those_that_can_obey_did(
    outcomes: tuple[Outcome, ...], status: int, success: bool
) -> None:
    answer = report(*outcomes)
    assert (answer.http_status, answer.success) == (status, success)


def test_the_message_names_whoever_did_not_obey() -> None:
    assert report(DONE, UNSUPPORTED, LATE).message("flushed") == (
        "1 of 3 workers flushed; unsupported: http://w1; timed_out: http://w2"
    )
    assert report(DONE).message("flushed") == "1 of 1 worker flushed"
    assert report().message("flushed") == "no worker is registered; nothing was flushed"


def test_a_long_list_of_failures_is_cut() -> None:
    assert report(*[LATE] * 9).message("flushed").endswith("http://w4 and 4 more")
