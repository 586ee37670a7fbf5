"""A flush that the engine may obey is heard to its end, however long its caller waits."""

import asyncio
from dataclasses import dataclass, field

import pytest

from kvherd.core.errors import WorkerError, WorkerFailed, WorkerRefused, WorkerTimedOut
from kvherd.core.ids import WorkerId
from kvherd.ports.worker import FlushAnswer
from kvherd.services.bridge.flushes import LATE_S, MOST_LATE, Flushes
from kvherd.testing.workers import HOURS, FakeWorker

ANN = WorkerId("http://ann")


@dataclass
class Heard:
    """What was said of flushes."""

    obeyed: list[float] = field(default_factory=list)
    unknown: int = 0

    def not_known(self) -> None:
        self.unknown += 1


def flushes(heard: Heard, engine: FakeWorker) -> Flushes:
    return Flushes(engine, obeyed=heard.obeyed.append, unknown=heard.not_known)


async def given_up(order: Flushes) -> None:
    with pytest.raises(WorkerTimedOut):
        await order.flush(timeout_s=1.0, hold=False, within_s=6.0)


async def test_an_answer_that_comes_after_its_caller_gave_up_is_heard() -> None:
    heard = Heard()
    async with flushes(heard, FakeWorker(ANN, takes_s=60.0, takes_back=False)) as it:
        await given_up(it)
        assert heard.obeyed == []
        await asyncio.sleep(60.0)
        assert heard.obeyed == [0.0], "with the time of its order"
    assert heard.unknown == 0


async def test_a_caller_that_leaves_leaves_its_order_to_be_heard() -> None:
    heard = Heard()
    async with flushes(heard, FakeWorker(ANN, takes_s=60.0, takes_back=False)) as it:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3.0):
                await it.flush(timeout_s=30.0, hold=False, within_s=35.0)
        await asyncio.sleep(60.0)
        assert heard.obeyed == [0.0]


async def test_a_late_refusal_says_nothing() -> None:
    heard, busy = Heard(), FlushAnswer(done=False, message="busy")
    async with flushes(heard, FakeWorker(ANN, takes_s=60.0, takes_back=False, answer=busy)) as it:
        await given_up(it)
        await asyncio.sleep(60.0)
    assert (heard.obeyed, heard.unknown) == ([], 0)


async def test_an_order_that_can_be_taken_back_ends_with_its_caller() -> None:
    heard = Heard()
    async with flushes(heard, FakeWorker(ANN, takes_s=60.0)) as it:
        await given_up(it)
        await asyncio.sleep(600.0)
    assert (heard.obeyed, heard.unknown) == ([], 0)


@pytest.mark.parametrize("waits_s", [10.0, 0.0])
async def test_a_connection_that_breaks_before_the_answer_leaves_what_is_held_unknown(waits_s: float) -> None:
    heard = Heard()
    engine = FakeWorker(ANN, takes_s=waits_s, takes_back=False, cut=WorkerFailed(ANN, "its connection was cut"))
    async with flushes(heard, engine) as it:
        with pytest.raises(WorkerError):
            await it.flush(timeout_s=1.0, hold=False, within_s=6.0)
        await asyncio.sleep(waits_s)
        assert (heard.obeyed, heard.unknown) == ([], 1)


async def test_what_the_engine_refuses_in_words_leaves_nothing_unknown() -> None:
    heard = Heard()
    async with flushes(heard, FakeWorker(ANN, takes_back=False, cut=WorkerRefused(ANN, "no"))) as it:
        with pytest.raises(WorkerRefused):
            await it.flush(timeout_s=1.0, hold=False, within_s=6.0)
    assert heard.unknown == 0


async def test_an_answer_that_never_comes_is_given_up_in_the_end() -> None:
    heard = Heard()
    async with flushes(heard, FakeWorker(ANN, takes_s=9 * HOURS, takes_back=False)) as it:
        await given_up(it)
        await asyncio.sleep(LATE_S - 1)
        assert heard.unknown == 0
        await asyncio.sleep(1.1)
        assert heard.unknown == 1


async def test_only_so_many_answers_are_awaited_for_callers_that_left() -> None:
    heard = Heard()
    async with flushes(heard, FakeWorker(ANN, takes_s=9 * HOURS, takes_back=False)) as it:
        async with asyncio.TaskGroup() as group:
            for _ in range(MOST_LATE + 2):
                group.create_task(given_up(it))
        assert heard.unknown == 2
    assert heard.unknown == 2, "who stops knows of nothing more"
    assert len(asyncio.all_tasks()) == 1


async def test_whoever_stops_waits_for_no_answer() -> None:
    heard = Heard()
    async with flushes(heard, FakeWorker(ANN, takes_s=9 * HOURS, takes_back=False)) as it:
        await given_up(it)
    assert (heard.obeyed, heard.unknown) == ([], 0)
    assert len(asyncio.all_tasks()) == 1
