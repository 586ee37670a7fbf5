"""Real rank processes behind ZMQ sockets keep the promises of the port."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from kvherd.adapters.zmq_scheduler import ZmqScheduler
from kvherd.ports.scheduler import Scheduler
from kvherd.services.engine.rank_plan import ipc_directory, rank_configs
from kvherd.services.engine.ranks import RankProcesses
from kvherd.testing.scheduler_contract import SchedulerContract


@pytest.mark.engine
class TestZmqScheduler(SchedulerContract):
    def opened(self) -> AbstractAsyncContextManager[Scheduler]:
        return _opened()


@asynccontextmanager
async def _opened() -> AsyncIterator[Scheduler]:
    with ipc_directory() as ipc_dir:
        configs = rank_configs("tiny", ranks=1, port=0, ipc_dir=ipc_dir)
        async with ZmqScheduler(ipc_dir) as scheduler, RankProcesses(configs, on_exit=scheduler.rank_died):
            await scheduler.ready(1, deadline_s=30)
            yield scheduler
