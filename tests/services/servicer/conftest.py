"""A servicer with real doors on loopback over a scheduler that does what a test says."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace

import grpc
import httpx
import pytest
from smg_grpc_proto.generated.sglang_scheduler_pb2_grpc import SglangSchedulerStub

from kvherd.adapters.completions import OpenAiCompletions
from kvherd.adapters.native_completions import NativeCompletions
from kvherd.core.ids import Epoch, Rank
from kvherd.core.kv.events import KvEventBatch, SnapshotChunk
from kvherd.services.kv_relay.event_streams import EventStreams
from kvherd.services.servicer.config import ServicerConfig
from kvherd.services.servicer.servicer import Servicer
from kvherd.testing.processes import free_ports
from kvherd.testing.scheduler import FakeScheduler
from kvherd.testing.text import ByteTokenizer

Item = KvEventBatch | SnapshotChunk | Exception


class ScriptedSubscription:
    def __init__(self, epoch: Epoch, items: "asyncio.Queue[Item]") -> None:
        self.epoch = epoch
        self._items = items

    async def __aiter__(self) -> AsyncIterator[KvEventBatch | SnapshotChunk]:
        while True:
            item = await self._items.get()
            if isinstance(item, Exception):
                raise item
            yield item


class ScriptedEvents:
    """A `KvStream` that says what was put into `items`, to one subscriber, or refuses with `refusal`."""

    def __init__(self) -> None:
        self.epoch = Epoch("e" * 32)
        self.items: asyncio.Queue[Item] = asyncio.Queue()
        self.refusal: Exception | None = None
        self.asked: list[tuple[int, dict[Rank, int], Epoch | None]] = []

    def subscribe(
        self,
        *,
        start_sequence_number: int = 0,
        cursors: Mapping[Rank, int] | None = None,
        epoch: Epoch | None = None,
    ) -> ScriptedSubscription:
        self.asked.append((start_sequence_number, dict(cursors or {}), epoch))
        if self.refusal is not None:
            raise self.refusal
        return ScriptedSubscription(self.epoch, self.items)


@dataclass(slots=True)
class Doors:
    """An open servicer and what is around it."""

    servicer: Servicer
    config: ServicerConfig
    scheduler: FakeScheduler
    events: ScriptedEvents
    stub: SglangSchedulerStub
    channel: grpc.aio.Channel
    http: httpx.AsyncClient
    sidecar: httpx.AsyncClient


OpenDoors = Callable[..., AbstractAsyncContextManager[Doors]]


def config_of(port: int) -> ServicerConfig:
    return ServicerConfig(
        model_name="letters",
        model_path="/models/letters",
        tokenizer_zip=bytes(range(256)) * 10_000,
        port=port,
        http_port=port + 2,
        sidecar_port=port + 1,
        drain_s=0.5,
    )


@asynccontextmanager
async def open_doors(scheduler: FakeScheduler | None = None, **options: object) -> AsyncIterator[Doors]:
    scheduler = scheduler or FakeScheduler(step_s=0.002)
    config = replace(config_of(free_ports((0, 1, 2))), **options)  # type: ignore[arg-type]
    tokenizer, events = ByteTokenizer(), ScriptedEvents()
    completions = OpenAiCompletions(tokenizer, config.model_name, scheduler.ranks[0].max_context_tokens)
    async with (
        Servicer(
            config,
            scheduler=scheduler,
            tokenizer=tokenizer,
            completions=completions,
            native=NativeCompletions(completions),
            events=EventStreams(events),
        ) as servicer,
        grpc.aio.insecure_channel(f"127.0.0.1:{config.port}") as channel,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{config.http_port}", timeout=10) as http,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{config.sidecar_port}", timeout=10) as sidecar,
    ):
        yield Doors(servicer, config, scheduler, events, SglangSchedulerStub(channel), channel, http, sidecar)


@pytest.fixture
def doors() -> OpenDoors:
    return open_doors
