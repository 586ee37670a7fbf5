"""Whether the engine behind a bridge can be reached: asked now and then, for those who watch."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import NoReturn

from kvherd.core.errors import WorkerError
from kvherd.services.bridge.engine_doors import HEALTH_S


class Pulse:
    """`probe` returns if the engine is well, or raises a `WorkerError`. `up` is None until the first answer."""

    def __init__(self, probe: Callable[[], Awaitable[None]], *, period_s: float = 5.0) -> None:
        self._probe = probe
        self._period_s = period_s
        self.up: bool | None = None
        self.problem = ""

    async def watch(self) -> NoReturn:
        while True:
            try:
                async with asyncio.timeout(HEALTH_S):
                    await self._probe()
            except (WorkerError, TimeoutError) as error:
                self.up, self.problem = False, str(error) or f"no answer within {HEALTH_S:g} s"
            else:
                self.up, self.problem = True, ""
            await asyncio.sleep(self._period_s)


@asynccontextmanager
async def watched(pulse: Pulse) -> AsyncGenerator[None, None]:
    """The engine is asked while inside."""
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(pulse.watch())
        try:
            yield
        finally:
            watching.cancel()
