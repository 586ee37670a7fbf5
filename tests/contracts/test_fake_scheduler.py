"""The fake scheduler keeps the promises of the port."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from kvherd.core.errors import EngineStopping, SchedulerDied
from kvherd.ports.scheduler import Scheduler
from kvherd.testing.scheduler import FakeScheduler, rank_facts
from kvherd.testing.scheduler_contract import SchedulerContract, asked, read_all


class TestFakeScheduler(SchedulerContract):
    def opened(self) -> AbstractAsyncContextManager[Scheduler]:
        return _opened()


@asynccontextmanager
async def _opened() -> AsyncIterator[Scheduler]:
    yield FakeScheduler([rank_facts(0), rank_facts(1)], step_s=0.01)


async def test_a_killed_scheduler_fails_what_is_asked_of_it() -> None:
    scheduler = FakeScheduler()
    scheduler.die("SIGKILL")
    with pytest.raises(SchedulerDied, match="SIGKILL"):
        await read_all(scheduler, asked("a"))
    with pytest.raises(SchedulerDied):
        await scheduler.flush(timeout_s=0.0)
    scheduler.stop()
    with pytest.raises(EngineStopping):
        await scheduler.state()
