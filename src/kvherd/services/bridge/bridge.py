"""The bridge: a gRPC server beside one engine, whose KV events it makes complete, or says that they are not."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

import grpc
import grpc.aio

from kvherd.core.errors import PortInUse, WorkerError
from kvherd.ports.tls import ServerTls
from kvherd.ports.worker import WorkerFacts
from kvherd.services.bridge.engine_doors import ANSWER_S
from kvherd.services.grpc_lifetime import start_or_leave_none, stop_within
from kvherd.services.kv_relay.grpc_edge import CONNECTION_OPTIONS
from kvherd.services.tls.grpc_credentials import server_credentials
from kvherd.services.tls.handshakes import Handshakes

log = logging.getLogger(__name__)

_GRACE_S = 1.0
_MESSAGE_LIMIT_BYTES = 64 * 2**20


class Front(Protocol):
    """What is served for one engine."""

    async def serve_on(self, server: grpc.aio.Server) -> None:
        """Register every call; the server is not started yet."""
        ...

    async def close(self) -> None:
        """End the calls that would never end by themselves."""
        ...

    def cut(self) -> None:
        """End every call that is still open."""
        ...


@dataclass(frozen=True, slots=True)
class BridgeConfig:
    """`ranks` is how many the operator said the engine has, None if its events are not followed; `retry_s`, how often
    an engine that is away is tried; `drain_s`, what calls get to end in when the bridge stops.
    """

    host: str = "127.0.0.1"
    port: int = 50061
    ranks: int | None = 1
    retry_s: float = 5.0
    drain_s: float = 5.0


class Bridge:
    """Use as an async context manager: inside, it serves. Leaving takes no new call, ends event streams as UNAVAILABLE
    and lets the others finish for a while.

    The engine and its events are the caller's and outlive it. Entering raises `PortInUse` and leaves nothing behind.
    `identify` asks the engine what it is; it may raise a `WorkerError`.
    """

    def __init__(
        self,
        config: BridgeConfig,
        front: Front,
        *,
        identify: Callable[[], Awaitable[WorkerFacts]],
        tls: ServerTls | None = None,
    ) -> None:
        """With `tls` it serves over TLS."""
        self._config = config
        self.handshakes = Handshakes()
        self._tls = tls
        self._front = front
        self._identify = identify

    async def __aenter__(self) -> Self:
        self._server = grpc.aio.server(
            options=[
                *CONNECTION_OPTIONS,
                ("grpc.max_receive_message_length", _MESSAGE_LIMIT_BYTES),
                ("grpc.max_send_message_length", _MESSAGE_LIMIT_BYTES),
            ]
        )
        await self._front.serve_on(self._server)
        try:
            address = _address(self._config.host, self._config.port)
            if self._tls is None:
                self._server.add_insecure_port(address)
            else:
                self._server.add_secure_port(address, server_credentials(self._tls, self.handshakes))
        except RuntimeError:
            await self._server.stop(0)
            raise PortInUse(self._config.port, "--listen") from None
        await start_or_leave_none(self._server)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        cut = asyncio.get_running_loop().call_later(self._config.drain_s, self._front.cut)
        try:
            await self._front.close()
        finally:
            try:
                await stop_within(self._server, self._config.drain_s + _GRACE_S)
            finally:
                cut.cancel()

    async def announce_engine(self) -> None:
        """Return once the engine has said what it is, and the log has it. Events do not wait for that."""
        told = ""
        while True:
            try:
                async with asyncio.timeout(ANSWER_S):
                    facts = await self._identify()
            except (WorkerError, TimeoutError) as error:
                problem = str(error) or f"no answer within {ANSWER_S:g} s"
                if problem != told:
                    log.warning("the engine does not say what it is yet: %s", problem)
                told = problem
                await asyncio.sleep(self._config.retry_s)
            else:
                break
        log.info("the engine is %s %s, blocks of %d tokens", facts.kind, facts.version, facts.block_size)
        if self._config.ranks not in (None, facts.ranks):
            log.warning(
                "the engine has %d ranks, and the KV events of %d are followed: start the bridge with --ranks %d",
                facts.ranks,
                self._config.ranks,
                facts.ranks,
            )


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
