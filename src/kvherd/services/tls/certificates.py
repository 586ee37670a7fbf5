"""Certificates are looked at now and then, so that those that are renewed take effect without a restart."""

import asyncio
import logging
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from kvherd.core.ids import WorkerId
from kvherd.ports.tls import ServerTls, WorkerTls

log = logging.getLogger(__name__)

_REMIND_S: Final = 3600.0


class CertificateWatch:
    """An async context manager. `workers_renewed` is called whenever those of `workers` have changed."""

    def __init__(
        self,
        *,
        own: ServerTls | None,
        workers: WorkerTls | None,
        workers_renewed: Callable[[], None] = lambda: None,
        period_s: float = 2.0,
        whose: str = "this gateway's",
    ) -> None:
        self._whose = whose
        self._own = own
        self._workers = workers
        self._workers_renewed = workers_renewed
        self._period_s = period_s
        self._reminded_s: dict[str, float] = {}
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
            self._remind(f"{self._whose} certificate has expired, and clients refuse it", self._own.expires_at_s)
        if self._workers is not None:
            if await asyncio.to_thread(self._workers.refresh):
                self._workers_renewed()
            self._remind("the certificate that workers are shown has expired", self._workers.expires_at_s)

    def _remind(self, what: str, expires_at_s: float | None) -> None:
        now_s = time.time()
        if expires_at_s is not None and now_s > expires_at_s and now_s - self._reminded_s.get(what, 0.0) > _REMIND_S:
            self._reminded_s[what] = now_s
            log.error("%s: put a new one in its place", what)


def remark_on_expiry(tls: WorkerTls | None) -> Callable[[WorkerId], str]:
    """What is to be said of a worker that failed, where the reason may be here: servers that refuse an expired
    certificate mostly just close the connection.
    """

    def remark(worker: WorkerId) -> str:
        expires_at_s = tls.expires_at_s if tls is not None else None
        if expires_at_s is None or time.time() < expires_at_s or not worker.startswith(("https://", "grpcs://")):
            return ""
        return "; the certificate that it is shown has expired"

    return remark
