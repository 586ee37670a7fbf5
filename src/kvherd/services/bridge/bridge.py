"""The bridge: a gRPC server beside a stock engine, which has none of its own for KV events."""

import asyncio
import logging
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from smg_grpc_proto.generated import sglang_scheduler_pb2_grpc, vllm_engine_pb2_grpc

from kvherd.core.errors import PortInUse, WorkerError
from kvherd.ports.kv_stream import KvEventDoor
from kvherd.ports.worker import Worker
from kvherd.services.bridge.engine_doors import ANSWER_S, SGLANG_SERVICE, VLLM_SERVICE, SglangDoor, VllmDoor

log = logging.getLogger(__name__)

_GRACE_S = 1.0
_MESSAGE_LIMIT_BYTES = 64 * 2**20
_SERVICES = (SGLANG_SERVICE.full_name, VLLM_SERVICE.full_name)


@dataclass(frozen=True, slots=True)
class BridgeConfig:
    """`ranks` is how many the operator said the engine has; `retry_s`, how often an engine that is away is tried;
    `tokenizer_zip`, what GetTokenizer hands out, if anything.
    """

    host: str = "127.0.0.1"
    port: int = 50061
    ranks: int = 1
    retry_s: float = 5.0
    tokenizer_zip: bytes | None = None


class Bridge:
    """Use as an async context manager: inside, it serves. Leaving ends event streams as UNAVAILABLE, then the rest.

    The engine and the events are the caller's and outlive it. Entering raises `PortInUse` and leaves nothing behind.
    """

    def __init__(self, config: BridgeConfig, *, engine: Worker, events: KvEventDoor) -> None:
        self._config = config
        self._engine = engine
        self._events = events

    async def __aenter__(self) -> Self:
        self._server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", _MESSAGE_LIMIT_BYTES),
                ("grpc.max_send_message_length", _MESSAGE_LIMIT_BYTES),
                # gateways keep idle connections alive; the default would answer their pings with "too many"
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
                ("grpc.keepalive_permit_without_calls", 1),
            ]
        )
        sglang_scheduler_pb2_grpc.add_SglangSchedulerServicer_to_server(
            SglangDoor(self._engine, self._events, self._config.tokenizer_zip), self._server
        )
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(
            VllmDoor(self._engine, self._events, self._config.tokenizer_zip), self._server
        )
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        try:
            self._server.add_insecure_port(_address(self._config.host, self._config.port))
        except RuntimeError:
            await self._server.stop(0)
            raise PortInUse(self._config.port, "--listen") from None
        await self._server.start()
        for name in ("", *_SERVICES):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._health.enter_graceful_shutdown()
        self._events.close()
        await self._server.stop(_GRACE_S)

    async def announce_engine(self) -> None:
        """Return once the engine has said what it is, and the log has it. Events do not wait for that."""
        told = ""
        while True:
            try:
                async with asyncio.timeout(ANSWER_S):
                    facts = await self._engine.detect()
            except (WorkerError, TimeoutError) as error:
                problem = str(error) or f"no answer within {ANSWER_S:g} s"
                if problem != told:
                    log.warning("the engine does not say what it is yet: %s", problem)
                told = problem
                await asyncio.sleep(self._config.retry_s)
            else:
                break
        log.info("the engine is %s %s, blocks of %d tokens", facts.kind, facts.version, facts.block_size)
        if facts.ranks != self._config.ranks:
            log.warning(
                "the engine has %d ranks, and the KV events of %d are followed: start the bridge with --ranks %d",
                facts.ranks,
                self._config.ranks,
                facts.ranks,
            )


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
