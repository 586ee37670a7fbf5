"""The servicer: gRPC and HTTP in front of one engine's scheduler."""

from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from kvherd.core.errors import EngineError
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
from kvherd.services.servicer.sockets import listen


class Servicer:
    """Use as an async context manager: inside, both doors are open; leaving closes them in order, within bounds.

    The scheduler is the caller's and outlives the servicer. Entering raises `PortInUse` and leaves nothing behind.
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
    ) -> None:
        self._config = config
        self._facts = EngineFacts(config, scheduler)
        metrics = EngineMetrics(config.model_name, scheduler)
        generations = Generations(scheduler, tokenizer, metrics)
        self._grpc = SglangService(config, scheduler, generations, events, self._facts)
        self._http = HttpDoor(
            config=config,
            scheduler=scheduler,
            generations=generations,
            completions=completions,
            native=native,
            tokenizer=tokenizer,
            facts=self._facts,
            metrics=metrics,
        )
        self._health = Health()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            listener = listen(self._config.host, self._config.http_port, option="--port")
            stack.callback(listener.close)
            await stack.enter_async_context(grpc_server(self._config, self._grpc, self._health))
            await stack.enter_async_context(http_server(self._http.app(), listener, drain_s=self._config.drain_s))
            await self._health.set_serving(serving=self._facts.failure is None)
            self._stack = stack.pop_all()
        return self

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
