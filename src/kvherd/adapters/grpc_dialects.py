"""The engine protocols on gRPC that a worker may speak, and how to find out which."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import ModuleType

import grpc.aio
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from smg_grpc_proto.generated import (
    sglang_scheduler_pb2,
    sglang_scheduler_pb2_grpc,
    vllm_engine_pb2,
    vllm_engine_pb2_grpc,
)

from kvherd.adapters.generate_dialects import SGLANG_GENERATE, VLLM_GENERATE, GenerateDialect
from kvherd.adapters.grpc_channel import rpc_errors
from kvherd.core.errors import WorkerUnsupported
from kvherd.core.ids import WorkerId
from kvherd.ports.worker import WorkerKind


@dataclass(frozen=True, slots=True)
class Dialect:
    """`messages` and `stub` are of one service; None where we can name the kind and no more."""

    kind: WorkerKind
    service: str
    messages: ModuleType | None = None
    stub: type | None = None
    generate: GenerateDialect | None = None


SGLANG = Dialect(
    WorkerKind.SGLANG_GRPC,
    "sglang.grpc.scheduler.SglangScheduler",
    sglang_scheduler_pb2,
    sglang_scheduler_pb2_grpc.SglangSchedulerStub,
    SGLANG_GENERATE,
)
DIALECTS = (
    SGLANG,
    Dialect(
        WorkerKind.VLLM_GRPC,
        "vllm.grpc.engine.VllmEngine",
        vllm_engine_pb2,
        vllm_engine_pb2_grpc.VllmEngineStub,
        VLLM_GENERATE,
    ),
    Dialect(WorkerKind.TRTLLM_GRPC, "trtllm.TrtllmService"),
    Dialect(WorkerKind.MLX_GRPC, "mlx.grpc.engine.MlxEngine"),
)


async def find_dialect(channel: grpc.aio.Channel, worker: WorkerId) -> Dialect:
    """Ask the worker which services it has. Raises `WorkerUnsupported` if none is an engine's that we know."""
    services = await _services(channel, worker)
    for dialect in DIALECTS:
        if dialect.service in services:
            return dialect
    raise WorkerUnsupported(worker, "any engine protocol known here")


async def _services(channel: grpc.aio.Channel, worker: WorkerId) -> set[str]:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)

    async def ask() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        yield reflection_pb2.ServerReflectionRequest(list_services="")

    with rpc_errors(worker, "reflection, by which its protocol would be found"):
        call = stub.ServerReflectionInfo(ask())
        try:
            async for response in call:
                return {service.name for service in response.list_services_response.service}
        finally:
            call.cancel()
    return set()
