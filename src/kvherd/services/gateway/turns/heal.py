"""Healing: bringing credit back to workers that may hold blocks nobody told of.

An engine cannot list what it holds, and hot prefixes are never announced again by themselves. vLLM can be made to
(`report`): a request may ask it to tell the whole cached chain of its prompt anew. Any engine can be cleared while it
is idle (`flush`): then nothing is held, and that is known. A flush costs what was cached, so it is done only where an
operator chose it.
"""

import asyncio
import logging
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from kvherd.core.errors import WorkerError
from kvherd.core.fleet.fanout import Outcome
from kvherd.core.fleet.roster import Member
from kvherd.core.ids import WorkerId
from kvherd.core.routing.candidate import KvKnowledge
from kvherd.ports.worker import WorkerKind
from kvherd.services.gateway.fleet.fleet import Fleet
from kvherd.services.gateway.fleet.orders import Addressee, FlushHeed, flush_fleet
from kvherd.services.gateway.metrics import GatewayMetrics
from kvherd.services.gateway.reading.prompts import LONG_CHAT_BYTES
from kvherd.services.gateway.settings import HealMode
from kvherd.services.gateway.turns.turn import Turn
from kvherd.wire.openai.edits import with_full_report

log: Final = logging.getLogger(__name__)

_PATHS: Final = frozenset({"/v1/chat/completions", "/v1/completions"})
_VLLM: Final = WorkerKind.VLLM_HTTP.value
LOOK_S: Final = 1.0
PAUSE_S: Final = 60.0
"""One worker is flushed at most that often."""

LOAD_DEADLINE_S: Final = 2.0

Incomplete = Callable[[WorkerId], bool]
"""Whether a worker may hold blocks that nobody told of."""


class FullReports:
    """Adds the request for a full report where it could tell something."""

    def __init__(self, mode: HealMode, incomplete: Incomplete, metrics: GatewayMetrics) -> None:
        self._on = mode is HealMode.REPORT
        self._incomplete = incomplete
        self._metrics = metrics

    def ask(self, turn: Turn, member: Member, body: bytes) -> bytes | None:
        """The body that has vLLM tell the prompt's chain; None if this request is left as it is."""
        if not self._on or member.kind != _VLLM or turn.incoming.path not in _PATHS:
            return None
        if len(body) >= LONG_CHAT_BYTES:  # each try to edit it reads all of it, and there are many short ones
            return None
        match = turn.match
        if match.exact or match.kv is not KvKnowledge.KNOWN or match.whole or not self._incomplete(member.worker):
            return None
        asking = with_full_report(body, turn.asked)
        if asking is not None:
            member.healings += 1
            self._metrics.healed(member.worker, HealMode.REPORT)
        return asking


class IdleFlushes:
    """An async context manager: while it is entered, workers that may hold blocks nobody told of are flushed once they
    are idle.
    """

    def __init__(self, fleet: Fleet, incomplete: Incomplete, heed: FlushHeed, metrics: GatewayMetrics) -> None:
        self._fleet = fleet
        self._incomplete = incomplete
        self._heed = heed
        self._metrics = metrics
        self._tried_s: dict[WorkerId, float] = {}
        self._group = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        self._looking = self._group.create_task(self._look(), name="flush idle workers")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._looking.cancel()
        await self._group.__aexit__(None, None, None)  # given the error, the group would wrap it

    async def _look(self) -> None:
        while True:
            now_s = asyncio.get_running_loop().time()
            due = [member for member in self._fleet.roster if self._due(member, now_s)]
            self._tried_s = {worker: at_s for worker, at_s in self._tried_s.items() if now_s - at_s < PAUSE_S}
            for member in due:
                if await self._idle(member):
                    self._tried_s[member.worker] = now_s
                    await self._flush(member)
            await asyncio.sleep(LOOK_S)

    def _due(self, member: Member, now_s: float) -> bool:
        tried_s = self._tried_s.get(member.worker)
        return (
            not member.in_flight
            and not member.unavailable(now_s)
            and self._incomplete(member.worker)
            and (tried_s is None or now_s - tried_s >= PAUSE_S)
        )

    async def _idle(self, member: Member) -> bool:
        """By its own word, of this moment. One that tells no load is never taken for idle."""
        if self._fleet.roster.get(member.worker) is not member:
            return False  # it left while others were asked
        try:
            async with asyncio.timeout(LOAD_DEADLINE_S):
                load = await self._fleet.worker(member.worker).load()
        except (TimeoutError, WorkerError):
            return False
        return load.running + load.waiting == 0 and not member.in_flight

    async def _flush(self, member: Member) -> None:
        to = Addressee(self._fleet.worker(member.worker), member.kind)
        report = await flush_fleet([to], timeout_s=0.0, heed=self._heed)
        (result,) = report.results
        if result.outcome is Outcome.DONE:
            member.healings += 1
            self._metrics.healed(member.worker, HealMode.FLUSH)
            log.warning("%s was idle and is flushed, as it may hold blocks that nobody told of", member.worker)
        else:
            log.warning(
                "%s may hold blocks that nobody told of, and was not flushed: %s", member.worker, result.message
            )
