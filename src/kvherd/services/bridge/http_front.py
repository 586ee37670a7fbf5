"""Before an engine on HTTP: both engine protocols, made of its KV events and of what it can be asked."""

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from smg_grpc_proto.generated import sglang_scheduler_pb2_grpc, vllm_engine_pb2_grpc

from kvherd.ports.kv_stream import KvEventDoor
from kvherd.ports.worker import Worker
from kvherd.services.bridge.engine_doors import SGLANG_SERVICE, VLLM_SERVICE, SglangDoor, VllmDoor
from kvherd.services.bridge.flushes import Flushes

_SERVICES = (SGLANG_SERVICE.full_name, VLLM_SERVICE.full_name)


class HttpFront:
    """Implements `services.bridge.bridge.Front`. `tokenizer_zip` is what GetTokenizer hands out, if anything."""

    def __init__(
        self, engine: Worker, events: KvEventDoor, flushes: Flushes, *, tokenizer_zip: bytes | None = None
    ) -> None:
        self._sglang = SglangDoor(engine, events, flushes, tokenizer_zip=tokenizer_zip)
        self._vllm = VllmDoor(engine, events, flushes, tokenizer_zip=tokenizer_zip)
        self._events = events
        self._health = health.aio.HealthServicer()

    async def serve_on(self, server: grpc.aio.Server) -> None:
        sglang_scheduler_pb2_grpc.add_SglangSchedulerServicer_to_server(self._sglang, server)
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(self._vllm, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        for name in ("", *_SERVICES):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def close(self) -> None:
        await self._health.enter_graceful_shutdown()
        self._events.close()

    def cut(self) -> None:
        """Its calls have deadlines of their own."""
