"""Certificates are looked at now and then, so that those that are renewed take effect without a restart."""

import asyncio
import logging
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from kvherd.ports.tls import Renewed, ServerTls

log = logging.getLogger(__name__)

_REMIND_S: Final = 3600.0


class CertificateWatch:
    """An async context manager. `workers_renewed` is called whenever those of `workers` have changed."""

    def __init__(
        self,
        *,
        own: ServerTls | None,
        workers: Renewed | None,
        workers_renewed: Callable[[], None],
        period_s: float,
    ) -> None:
        self._own = own
        self._workers = workers
        self._workers_renewed = workers_renewed
        self._period_s = period_s
        self._reminded_s = 0.0
        self._group = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        self._watching = self._group.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watching.cancel()
        await self._group.__aexit__(None, None, None)

    async def _watch(self) -> None:
        while self._own is not None or self._workers is not None:
            await asyncio.sleep(self._period_s)
            try:
                await self._look()
            except Exception:  # a defect in reading must cost a renewal, and not the gateway
                log.exception("looking at certificates failed unforeseen")

    async def _look(self) -> None:
        if self._own is not None:
            await asyncio.to_thread(self._own.refresh)
            self._remind(self._own.expires_at_s)
        if self._workers is not None and await asyncio.to_thread(self._workers.refresh):
            self._workers_renewed()

    def _remind(self, expires_at_s: float) -> None:
        now_s = time.time()
        if now_s > expires_at_s and now_s - self._reminded_s > _REMIND_S:
            self._reminded_s = now_s
            log.error("this gateway's certificate has expired, and clients refuse it: put a new one in its place")
