"""Generations as both doors of a servicer want them: checked, timed, and ended by their stop strings."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import cast

from kvherd.core.engine.admission import check_request
from kvherd.core.engine.generation import FinishReason, GenerationRequest, TokenDelta
from kvherd.core.errors import RequestDuplicate
from kvherd.core.ids import RequestId
from kvherd.core.text.choice import Choice
from kvherd.ports.completions import Tokenizer
from kvherd.ports.scheduler import Scheduler
from kvherd.services.servicer.metrics import EngineMetrics, Outcome

QUEUED_DELTAS = 64

Deltas = AsyncGenerator[TokenDelta, None]


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """News of choice `index` of one call."""

    index: int
    delta: TokenDelta


class Generations:
    """Runs generations on one scheduler."""

    def __init__(self, scheduler: Scheduler, tokenizer: Tokenizer, metrics: EngineMetrics) -> None:
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._calls: dict[RequestId, tuple[RequestId, ...]] = {}

    async def generate(self, request: GenerationRequest) -> Deltas:
        """As the scheduler's, but nothing wrong reaches it: raises `CallerError` first. Stop strings are ignored."""
        check_request(request, self._scheduler.ranks)
        began_s = time.perf_counter()
        last_s: float | None = None
        outcome = Outcome.LEFT
        try:
            async with aclosing(cast(Deltas, self._scheduler.generate(request))) as deltas:
                async for delta in deltas:
                    if delta.token_ids:
                        now_s = time.perf_counter()
                        if last_s is None:
                            self._metrics.first_token(now_s - began_s)
                        else:
                            self._metrics.next_tokens(now_s - last_s, len(delta.token_ids))
                        last_s = now_s
                    if delta.finish is not None:
                        outcome = Outcome.ABORTED if delta.finish.reason is FinishReason.ABORT else Outcome.FINISHED
                    yield delta
        finally:
            self._metrics.ended(time.perf_counter() - began_s, outcome)

    async def until_stop(self, request: GenerationRequest) -> Deltas:
        """As `generate`; a stop string ends it with the token that completes the string, and aborts the rest."""
        if not request.limits.stop:
            async with aclosing(self.generate(request)) as plain:
                async for delta in plain:
                    yield delta
            return
        choice = Choice(self._decode, request.limits, request.prompt_token_ids)
        async with aclosing(self.generate(request)) as deltas:
            async for delta in deltas:
                before = delta.completion_tokens - len(delta.token_ids)
                choice.feed(delta)
                if choice.finish is None:
                    yield delta
                    continue
                kept = choice.completion_tokens - before
                yield replace(
                    delta,
                    token_ids=delta.token_ids[:kept],
                    logprobs=delta.logprobs[:kept],
                    completion_tokens=choice.completion_tokens,
                    finish=choice.finish,
                )
                return

    async def abort(self, call: RequestId, reason: str) -> bool:
        """End every choice of a call; False if none of it is alive."""
        choices = self._calls.get(call, (call,))
        return any([await self._scheduler.abort(choice, reason=reason) for choice in choices])

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    async def choices(
        self, call: RequestId, requests: Sequence[GenerationRequest]
    ) -> AsyncGenerator[ChoiceDelta, None]:
        """The news of all choices of `call`, each in order, until every one has finished.

        The first error ends all and is raised; closing it aborts all. Raises `RequestDuplicate` if such a call is
        alive; it is no longer when its last news is told.
        """
        if call in self._calls:
            raise RequestDuplicate(call)
        self._calls[call] = choices = tuple(request.request for request in requests)
        unfinished = len(choices)
        try:
            async with aclosing(self._one(requests[0]) if unfinished == 1 else self._several(requests)) as news:
                async for each in news:
                    unfinished -= each.delta.finish is not None
                    if not unfinished:
                        self._forget(call, choices)
                    yield each
        finally:
            self._forget(call, choices)

    def _forget(self, call: RequestId, choices: tuple[RequestId, ...]) -> None:
        if self._calls.get(call) is choices:  # not its successor's
            del self._calls[call]

    async def _one(self, request: GenerationRequest) -> AsyncGenerator[ChoiceDelta, None]:
        async with aclosing(self.until_stop(request)) as deltas:
            async for delta in deltas:
                yield ChoiceDelta(0, delta)

    async def _several(self, requests: Sequence[GenerationRequest]) -> AsyncGenerator[ChoiceDelta, None]:
        queue: asyncio.Queue[ChoiceDelta | Exception] = asyncio.Queue(QUEUED_DELTAS)
        failure: Exception | None = None
        async with asyncio.TaskGroup() as group:
            pumps = [group.create_task(self._pump(index, each, queue)) for index, each in enumerate(requests)]
            unfinished = len(pumps)
            try:
                while unfinished and failure is None:
                    news = await queue.get()
                    if isinstance(news, Exception):
                        failure = news
                    else:
                        unfinished -= news.delta.finish is not None
                        yield news
            except GeneratorExit:
                pass  # closed: the group would wrap this into a group of errors, and the close would raise that
            finally:
                for pump in pumps:
                    pump.cancel()
        if failure is not None:
            raise failure

    async def _pump(
        self, index: int, request: GenerationRequest, queue: asyncio.Queue[ChoiceDelta | Exception]
    ) -> None:
        try:
            async with aclosing(self.until_stop(request)) as deltas:
                async for delta in deltas:
                    await queue.put(ChoiceDelta(index, delta))
        except Exception as error:  # noqa: BLE001 - raised where the choices are read, not in this task's group
            await queue.put(error)
