"""Flushes of one engine, whose answers are heard to the end though their callers may not wait so long.

An engine that stands still finds the order when it goes on, and obeys; vLLM tells of that with its next step only,
which is a request too late. So an order that was sent and cannot be taken back is not forgotten with its caller.
"""

import asyncio
import logging
from collections.abc import Callable
from types import TracebackType
from typing import Self

from kvherd.core.errors import WorkerTimedOut
from kvherd.core.fleet.fanout import is_own_answer
from kvherd.ports.kv_stream import Flushed
from kvherd.ports.worker import FlushAnswer, Worker

log = logging.getLogger(__name__)

LATE_S = 600.0
"""How long an answer may come after its caller has left."""
MOST_LATE = 8
"""So many answers are awaited for callers that left; of more it is not known whether they are obeyed."""


class _Order:
    """`in_doubt`: it was sent, cannot be taken back and is not answered."""

    __slots__ = ("in_doubt",)

    def __init__(self) -> None:
        self.in_doubt = False

    def set_doubt(self, is_so: bool) -> None:
        self.in_doubt = is_so


class Flushes:
    """An async context manager; answers that are still awaited when it is left are given up.

    `obeyed` is told of every flush that the engine says it has done, however late, and before its caller is answered.
    `unknown` is called where nobody will ever know.
    """

    def __init__(self, engine: Worker, *, obeyed: Flushed, unknown: Callable[[], None], late_s: float = LATE_S) -> None:
        self._engine = engine
        self._obeyed = obeyed
        self._unknown = unknown
        self._late_s = late_s
        self._late: set[asyncio.Task[FlushAnswer]] = set()
        self._leaving = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leaving = True
        late = list(self._late)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    async def flush(self, *, timeout_s: float, hold: bool, within_s: float) -> FlushAnswer:
        """As `Worker.flush`; raises `WorkerTimedOut` after `within_s`."""
        order = _Order()
        task = asyncio.create_task(self._give(order, timeout_s, hold), name=f"flush {self._engine.id}")
        try:
            done, _ = await asyncio.wait([task], timeout=within_s)
        except asyncio.CancelledError:
            await self._leave(task, order)
            raise
        if not done:
            await self._leave(task, order)
            raise WorkerTimedOut(self._engine.id, within_s)
        return task.result()

    async def _leave(self, task: asyncio.Task[FlushAnswer], order: _Order) -> None:
        """Its caller waits no longer: take the order back where that can be, and wait on for its answer where not."""
        if self._leaving or not order.in_doubt or len(self._late) >= MOST_LATE:
            task.cancel()
            await asyncio.wait([task])
            return
        log.warning("%s gave no answer to a flush that it may obey yet: it is waited for", self._engine.id)
        self._late.add(task)
        task.add_done_callback(self._over)
        timer = asyncio.get_running_loop().call_later(self._late_s, task.cancel)
        task.add_done_callback(lambda _: timer.cancel())

    def _over(self, task: asyncio.Task[FlushAnswer]) -> None:
        self._late.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.warning("a flush that nobody waits for any more: %s", error)

    async def _give(self, order: _Order, timeout_s: float, hold: bool) -> FlushAnswer:
        ordered_s = asyncio.get_running_loop().time()
        try:
            answer = await self._engine.flush(timeout_s=timeout_s, hold=hold, in_doubt=order.set_doubt)
        except BaseException as error:
            if order.in_doubt and not self._leaving and not is_own_answer(error):
                self._unknown()
            raise
        if answer.done:
            self._obeyed(ordered_s)
        return answer
