"""One order to all: each worker's entry is its own, whatever the others do."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from kvherd.core.errors import WorkerError, WorkerFailed, WorkerRefused, WorkerUnreachable
from kvherd.core.fleet.fanout import FanoutReport, Outcome
from kvherd.core.ids import WorkerId
from kvherd.ports.worker import FlushAnswer
from kvherd.services.gateway.fleet.orders import UNHEEDED, Addressee, flush_fleet
from kvherd.testing.workers import HOURS, FakeWorker, cannot_flush, refusing_ranks

ANN, BOB, CAT = WorkerId("http://ann"), WorkerId("http://bob"), WorkerId("grpc://cat")


async def flush(*workers: FakeWorker, timeout_s: float = 30.0, **bounds: float) -> FanoutReport:
    fleet = [Addressee(worker, "fake") for worker in workers]
    return await flush_fleet(fleet, timeout_s=timeout_s, heed=UNHEEDED, **bounds)  # type: ignore[arg-type]


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def test_a_worker_that_hangs_costs_its_own_entry_and_no_more() -> None:
    down = WorkerUnreachable(BOB)
    report = await flush(FakeWorker(ANN), FakeWorker(BOB, fails=down), FakeWorker(CAT, takes_s=9 * HOURS))
    assert [result.outcome for result in report.results] == [Outcome.DONE, Outcome.UNREACHABLE, Outcome.TIMED_OUT]
    assert report.obeyed == [ANN]
    assert report.results[1].message == str(down)
    assert report.results[2].message == "grpc://cat gave no answer within 35 s"
    assert report.http_status == 207


async def test_two_hundred_workers_with_one_stalled_and_one_dead_take_one_deadline() -> None:
    workers = [FakeWorker(WorkerId(f"http://w{n}"), opens_s=0.01) for n in range(198)]
    stalled = FakeWorker(WorkerId("http://stalled"), takes_s=9 * HOURS)
    dead = FakeWorker(WorkerId("http://dead"), fails=WorkerUnreachable(WorkerId("http://dead")))
    report = await flush(stalled, dead, *workers, timeout_s=5.0)
    assert now_s() == pytest.approx(10.0)
    assert len(report.obeyed) == 198
    assert max(result.seconds for result in report.results[1:]) < 0.2


async def test_no_more_are_being_opened_at_once_than_allowed() -> None:
    workers = [FakeWorker(WorkerId(f"http://w{n}"), opens_s=0.5) for n in range(200)]
    most = 0

    async def watch() -> None:
        nonlocal most
        while any(worker.flushes == 0 for worker in workers):
            most = max(most, sum(worker.opening_now for worker in workers))
            await asyncio.sleep(0.05)

    async with asyncio.TaskGroup() as group:
        group.create_task(watch())
        report = await flush(*workers)
    assert most == 32
    assert report.success
    assert now_s() == pytest.approx(3.5, abs=0.06)  # 200 / 32 is seven waves of half a second


async def test_a_worker_that_waits_on_its_engine_holds_no_slot() -> None:
    waiting = [FakeWorker(WorkerId(f"http://w{n}"), takes_s=20.0) for n in range(64)]
    quick = FakeWorker(ANN)
    report = await flush(*waiting, quick, at_once=4)
    assert report.success
    assert now_s() == pytest.approx(20.0)
    assert report.results[-1].seconds == pytest.approx(0.0)


async def test_hosts_that_swallow_connections_do_not_keep_the_living_from_being_reached() -> None:
    black_holes = [FakeWorker(WorkerId(f"http://h{n}"), opens_s=9 * HOURS) for n in range(40)]
    report = await flush(*black_holes, FakeWorker(ANN))
    assert report.obeyed == [ANN]
    assert report.results[-1].seconds == pytest.approx(1.0)


async def test_no_more_are_in_flight_than_allowed() -> None:
    workers = [FakeWorker(WorkerId(f"http://w{n}"), takes_s=1.0) for n in range(10)]
    report = await flush(*workers, in_flight=5)
    assert report.success
    assert now_s() == pytest.approx(2.0)


async def test_the_deadline_includes_connecting_and_waiting_for_a_slot() -> None:
    report = await flush(FakeWorker(ANN, opens_s=34.9), FakeWorker(BOB, opens_s=35.1))
    assert [result.outcome for result in report.results] == [Outcome.DONE, Outcome.TIMED_OUT]
    assert now_s() == pytest.approx(35.0)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (WorkerRefused(ANN, "busy"), Outcome.REFUSED),
        (cannot_flush(ANN), Outcome.UNSUPPORTED),
        (WorkerUnreachable(ANN), Outcome.UNREACHABLE),
        (WorkerFailed(ANN, "died"), Outcome.FAILED),
    ],
)
async def test_each_error_has_its_outcome(error: WorkerError, outcome: Outcome) -> None:
    report = await flush(FakeWorker(ANN, fails=error))
    assert report.results[0].outcome is outcome
    assert report.results[0].message == str(error)
    assert report.http_status == 502


async def test_a_refusal_names_the_ranks_that_refused() -> None:
    report = await flush(FakeWorker(ANN, answer=refusing_ranks("", "2 requests are running")))
    (result,) = report.results
    assert result.outcome is Outcome.REFUSED
    assert [(rank.rank, rank.outcome, rank.message) for rank in result.ranks] == [
        (0, Outcome.DONE, ""),
        (1, Outcome.REFUSED, "2 requests are running"),
    ]


async def test_a_defect_in_one_adapter_costs_that_worker_alone() -> None:
    class Broken(FakeWorker):
        async def flush(self, **_: object) -> FlushAnswer:
            raise ZeroDivisionError("secret")

    report = await flush(Broken(BOB), FakeWorker(ANN))
    assert report.results[0].outcome is Outcome.FAILED
    assert "secret" not in report.results[0].message
    assert report.obeyed == [ANN]


async def test_an_engine_whose_wait_ended_has_timed_out_and_not_refused() -> None:
    late = FlushAnswer(done=False, message="not idle within 2 s: 1 running", timed_out=True)
    report = await flush(FakeWorker(ANN, answer=late))
    assert (report.results[0].outcome, report.results[0].message) == (Outcome.TIMED_OUT, late.message)


async def test_only_those_that_obeyed_are_said_to_be_flushed() -> None:
    told: list[WorkerId] = []
    fleet = [Addressee(FakeWorker(ANN), ""), Addressee(FakeWorker(BOB, fails=WorkerUnreachable(BOB)), "")]
    await flush_fleet(fleet, timeout_s=0.0, heed=replace(UNHEEDED, obeyed=lambda worker, _: told.append(worker)))
    assert told == [ANN]


@pytest.mark.parametrize(
    ("acts", "doubted"),
    [
        ({"takes_back": False, "takes_s": 9 * HOURS}, True),
        ({"takes_back": False, "cut": WorkerFailed(ANN, "its connection was cut")}, True),
        ({"takes_back": False, "cut": WorkerRefused(ANN, "busy")}, False),
        ({"takes_back": False}, False),
        ({"takes_back": False, "fails": WorkerUnreachable(ANN)}, False),
        ({"takes_back": False, "opens_s": 9 * HOURS}, False),
        ({"takes_back": True, "takes_s": 9 * HOURS}, False),
    ],
)
async def test_an_order_that_was_sent_and_neither_answered_nor_taken_back_leaves_its_worker_in_doubt(
    acts: dict[str, Any], doubted: bool
) -> None:
    heard: list[tuple[WorkerId, float]] = []
    heed = replace(UNHEEDED, in_doubt=lambda worker, ordered_s: heard.append((worker, ordered_s)))
    await asyncio.sleep(2.0)
    await flush_fleet([Addressee(FakeWorker(ANN, **acts), "")], timeout_s=1.0, heed=heed)
    assert heard == ([(ANN, 2.0)] if doubted else [])


async def test_a_caller_that_leaves_orders_which_cannot_be_taken_back_leaves_their_workers_in_doubt() -> None:
    heard: list[WorkerId] = []
    heed = replace(UNHEEDED, in_doubt=lambda worker, _: heard.append(worker))
    fleet = [Addressee(FakeWorker(one, takes_s=9 * HOURS, takes_back=one == ANN), "") for one in (ANN, BOB)]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(3.0):
            await flush_fleet(fleet, timeout_s=30.0, heed=heed)
    assert heard == [BOB]


async def test_a_caller_that_leaves_withdraws_the_orders() -> None:
    worker = FakeWorker(ANN, takes_s=9 * HOURS)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(3.0):
            await flush(worker)
    assert now_s() == pytest.approx(3.0)


async def test_every_worker_is_told_to_hold_when_the_order_says_so() -> None:
    ann, bob = FakeWorker(ANN), FakeWorker(BOB)
    await flush(ann, bob)
    assert (ann.held, bob.held) == (0, 0)
    await flush(ann, bob, hold=True)
    assert (ann.held, bob.held) == (1, 1)
