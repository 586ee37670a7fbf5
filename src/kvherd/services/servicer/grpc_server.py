"""The gRPC server: one port that nobody else shares, health and reflection beside the service."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from smg_grpc_proto.generated import sglang_scheduler_pb2, sglang_scheduler_pb2_grpc

from kvherd.core.errors import PortInUse
from kvherd.services.grpc_lifetime import start_or_leave_none, stop_within
from kvherd.services.kv_relay.grpc_edge import CONNECTION_OPTIONS
from kvherd.services.servicer.config import ServicerConfig
from kvherd.services.servicer.grpc_service import SglangService
from kvherd.services.servicer.sockets import listen

SERVICE = sglang_scheduler_pb2.DESCRIPTOR.services_by_name["SglangScheduler"].full_name


class Health:
    """`grpc.health.v1` for the whole server and for the service."""

    def __init__(self) -> None:
        self.servicer = health.aio.HealthServicer()

    async def set_serving(self, *, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", SERVICE):
            await self.servicer.set(name, status)


@contextlib.asynccontextmanager
async def grpc_server(config: ServicerConfig, service: SglangService, status: Health) -> AsyncGenerator[None, None]:
    """Serve while inside; leaving takes no new call, ends event streams and lets the others finish for `drain_s`."""
    # grpc says of a taken port only that it could not bind: a probe tells why, and rules out a shared port.
    listen(config.host, config.port, option="--port").close()
    server = grpc.aio.server(
        options=[
            *CONNECTION_OPTIONS,
            ("grpc.max_receive_message_length", config.message_limit_bytes),
            ("grpc.max_send_message_length", config.message_limit_bytes),
        ]
    )
    sglang_scheduler_pb2_grpc.add_SglangSchedulerServicer_to_server(service, server)
    health_pb2_grpc.add_HealthServicer_to_server(status.servicer, server)
    reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    try:
        bound = server.add_insecure_port(_address(config.host, config.port))
    except RuntimeError:
        raise PortInUse(config.port, "--port") from None
    if bound != config.port:
        raise PortInUse(config.port, "--port")
    await start_or_leave_none(server)
    try:
        yield
    finally:
        try:
            await status.set_serving(serving=False)
        finally:
            service.event_streams.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(config.drain_s + 5.0):
                    await stop_within(server, config.drain_s)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
