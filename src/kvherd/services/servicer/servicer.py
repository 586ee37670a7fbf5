"""The servicer: gRPC and HTTP in front of one engine's scheduler."""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from kvherd.core.errors import EngineError, StartFailed
from kvherd.ports.completions import Completions, NativeCompletions, Tokenizer
from kvherd.ports.kv_stream import KvEventDoor
from kvherd.ports.scheduler import Scheduler
from kvherd.services.servicer.config import ServicerConfig
from kvherd.services.servicer.facts import EngineFacts
from kvherd.services.servicer.generations import Generations
from kvherd.services.servicer.grpc_server import Health, grpc_server
from kvherd.services.servicer.grpc_service import SglangService
from kvherd.services.servicer.http_app import HttpDoor
from kvherd.services.servicer.http_server import http_server
from kvherd.services.servicer.metrics import EngineMetrics
from kvherd.services.servicer.operator_door import OperatorDoor
from kvherd.services.servicer.profiles import Profiles
from kvherd.services.servicer.sockets import listen

SIDECAR_OPTION = "--grpc-http-sidecar-port"

OnReady = Callable[[Scheduler, Mapping[str, object], Mapping[str, object]], Awaitable[None]]
"""Awaited with the manager of the ranks, the server's arguments and what its schedulers say, when all ranks are ready
and no door is open yet. What it raises ends the start."""


class Servicer:
    """Use as an async context manager: inside, both doors are open; leaving closes them in order, within bounds.

    The scheduler is the caller's and outlives the servicer. Entering raises `PortInUse`, what `on_ready` raises, or
    `StartFailed` if that takes too long, and leaves nothing behind.
    """

    def __init__(
        self,
        config: ServicerConfig,
        *,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        completions: Completions,
        native: NativeCompletions,
        events: KvEventDoor,
        on_ready: OnReady | None = None,
    ) -> None:
        self._config = config
        self._scheduler = scheduler
        self._on_ready = on_ready
        self._facts = EngineFacts(config, scheduler)
        metrics = EngineMetrics(config.model_name, scheduler)
        generations = Generations(scheduler, tokenizer, metrics)
        profiles = Profiles(scheduler, os.environ, timeout_s=config.order_timeout_s)
        self._operators = OperatorDoor(config, scheduler, self._facts, profiles, metrics)
        self._grpc = SglangService(
            config, scheduler, generations=generations, events=events, facts=self._facts, profiles=profiles
        )
        self._http = HttpDoor(
            config=config,
            scheduler=scheduler,
            generations=generations,
            completions=completions,
            native=native,
            tokenizer=tokenizer,
            facts=self._facts,
            operators=self._operators,
        )
        self._health = Health()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._say_ready()
        async with AsyncExitStack() as stack:
            listener = listen(self._config.host, self._config.http_port, option="--port")
            stack.callback(listener.close)
            sidecar = self._sidecar_listener(stack)
            await stack.enter_async_context(grpc_server(self._config, self._grpc, self._health))
            await stack.enter_async_context(http_server(self._http.app(), listener, drain_s=self._config.drain_s))
            if sidecar is not None:
                await stack.enter_async_context(
                    http_server(self._operators.app(), sidecar, drain_s=self._config.drain_s)
                )
            await self._health.set_serving(serving=self._facts.failure is None)
            self._stack = stack.pop_all()
        return self

    async def _say_ready(self) -> None:
        if self._on_ready is None:
            return
        report = await self._scheduler.state()
        limit_s = self._config.on_ready_within_s
        hook = self._on_ready(self._scheduler, self._facts.server_args(), self._facts.scheduler_info(report))
        try:
            async with asyncio.timeout(limit_s) as limit:
                await hook
        except TimeoutError:
            if not limit.expired():
                raise
            raise StartFailed("on_ready", f"it was not done within {limit_s:g} s") from None

    def _sidecar_listener(self, stack: AsyncExitStack) -> socket.socket | None:
        if not self._config.sidecar_port:
            return None
        listener = listen(self._config.host, self._config.sidecar_port, option=SIDECAR_OPTION)
        stack.callback(listener.close)
        return listener

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def fail(self, error: EngineError) -> None:
        """Tell everybody who asks that this engine can serve no more, for the first reason given.

        Its streams are the scheduler's to end.
        """
        self._facts.failure = self._facts.failure or error
        await self._health.set_serving(serving=False)
