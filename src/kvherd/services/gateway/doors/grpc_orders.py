"""The gateway's gRPC server, behind the door in `grpc`: `kvherd.gateway.v1`, with health and reflection."""

import asyncio
import logging
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from kvherd.core.errors import KvherdError
from kvherd.ports.tls import ServerTls
from kvherd.services.gateway.doors.caller import caller
from kvherd.services.gateway.doors.console import Console
from kvherd.services.grpc_lifetime import start_or_leave_none, stop_within
from kvherd.services.tls.grpc_credentials import server_credentials
from kvherd.wire.gateway_pb import flush_response, worker_message
from kvherd.wire.proto import kvherd_gateway_v1_pb2 as pb
from kvherd.wire.proto import kvherd_gateway_v1_pb2_grpc as pb_grpc
from kvherd.wire.status import public_message, status_of

log = logging.getLogger(__name__)


_SERVICE = pb.DESCRIPTOR.services_by_name["Gateway"].full_name
_GRACE_S = 1.0

LOOPBACK: Final = "127.0.0.1"


class _Gateway(pb_grpc.GatewayServicer):
    def __init__(self, console: Console, host_of: Callable[[str], str]) -> None:
        self._console = console
        self._host_of = host_of

    async def FlushCache(  # noqa: N802 - the protocol names it
        self, request: pb.FlushCacheRequest, context: grpc.aio.ServicerContext
    ) -> pb.FlushCacheResponse:
        try:
            self._admit(context)
            return flush_response(await self._console.flush(request.timeout_s, hold=request.hold))
        except Exception as error:  # the edge of the process: every error leaves it as a status
            await _abort(context, error)
            raise

    async def ListWorkers(  # noqa: N802 - the protocol names it
        self, request: pb.ListWorkersRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListWorkersResponse:
        try:
            self._admit(context)
            return pb.ListWorkersResponse(workers=self._workers())
        except Exception as error:  # the edge of the process: every error leaves it as a status
            await _abort(context, error)
            raise

    def _workers(self) -> list[pb.Worker]:
        now_s = asyncio.get_running_loop().time()
        return [worker_message(one, self._console.kv(one.worker), now_s) for one in self._console.fleet.roster]

    def _admit(self, context: grpc.aio.ServicerContext) -> None:
        metadata = dict(context.invocation_metadata() or ())
        host = caller(self._host_of(context.peer()), metadata)
        self._console.admit(host=host, authorization=str(metadata.get("authorization", "")))


class GrpcOrders:
    """Serves one console on a port of the loopback interface that the system chooses; an async context manager.

    `host_of` says who is behind a peer of that port, as gRPC names peers; empty if nobody is known. Entering raises
    `OSError` if there is no such port.
    """

    def __init__(self, console: Console, *, host_of: Callable[[str], str], tls: ServerTls | None = None) -> None:
        self._gateway = _Gateway(console, host_of)
        self._handshakes = console.metrics.grpc_handshakes
        self._tls = tls
        self.port = 0

    async def __aenter__(self) -> Self:
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        pb_grpc.add_GatewayServicer_to_server(self._gateway, self._server)  # type: ignore[no-untyped-call]
        self._health = health_aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (_SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        try:
            if self._tls is None:
                self.port = self._server.add_insecure_port(f"{LOOPBACK}:0")
            else:
                self.port = self._server.add_secure_port(
                    f"{LOOPBACK}:0", server_credentials(self._tls, self._handshakes)
                )
        except RuntimeError as error:
            await self._server.stop(0)
            raise OSError(f"no port for gRPC on {LOOPBACK}: {error}") from None
        for name in ("", _SERVICE):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        await start_or_leave_none(self._server)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._health.enter_graceful_shutdown()
        finally:
            await stop_within(self._server, _GRACE_S)


async def _abort(context: grpc.aio.ServicerContext, error: Exception) -> None:
    if isinstance(error, grpc.aio.AbortError):
        return
    if not isinstance(error, KvherdError):
        log.error("a call failed unforeseen", exc_info=error)
    await context.abort(grpc.StatusCode[status_of(error).grpc], public_message(error))
