"""The listening side of the relay, from binding its port to letting the last stream end."""

import asyncio
import resource
import socket
import ssl
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Self, cast

from kvherd.ports.loop_turn import LoopTurn
from kvherd.services.gateway.listening import listen, take_callers
from kvherd.services.gateway.relay.connection import Connection
from kvherd.services.gateway.relay.edge import AsgiApp, DataHandler, Judge, Launch, RelayLimits, Unread
from kvherd.services.gateway.relay.handshake import Handshakes
from kvherd.services.gateway.relay.memory import make_room
from kvherd.services.gateway.relay.premises import Premises

_BACKLOG = 2048
_FAREWELL_S = 1.0
_DOORS = 16
"""uvloop takes one connection a turn of the loop from a listening socket, so that hundreds who come at once to a busy
gateway would wait for seconds; it takes one from each duplicate of it."""
_SPARE = 64


def _within_descriptors(limits: RelayLimits) -> RelayLimits:
    """As many connections as this process has descriptors for, each with one to a worker, and some for itself: who
    comes too many is told so, where the system itself would only close.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return limits
    return replace(limits, connections=max(1, min(limits.connections, (most - min(_SPARE, most // 2)) // 2)))


class RelayServer:
    """An async context manager: inside it, requests are answered.

    Entering raises `PortInUse` or `OptionInvalid`. The port is bound without SO_REUSEPORT, so that two gateways never
    share it by accident. Leaving stops accepting, lets answers under way finish for up to `limits.drain_s`, ends the
    rest with an error event or a 503, and returns when no connection and no task is left.
    """

    def __init__(
        self,
        handler: DataHandler,
        app: AsgiApp,
        *,
        launch: Launch | None = None,
        judge: Judge | None = None,
        unread: Unread = lambda _, __: None,
        host: str = "127.0.0.1",
        port: int = 0,
        limits: RelayLimits | None = None,
        tls: ssl.SSLContext | None = None,
        tls_refused: Callable[[str], None] = lambda _: None,
        port_option: str = "--port",
        host_option: str = "--host",
        turn: LoopTurn | None = None,
    ) -> None:
        self._handler = handler
        self._turn = turn or LoopTurn()
        self._launch = launch
        self._judge = judge
        self._unread = unread
        self._app = app
        self._host = host
        self._port = port
        self._limits = _within_descriptors(limits or RelayLimits())
        self._tls = tls
        self._tls_refused = tls_refused
        self._handshakes: list[Handshakes] = []
        self._port_option = port_option
        self._host_option = host_option
        self._group = asyncio.TaskGroup()
        self._doors: list[asyncio.Server] = []

    @property
    def port(self) -> int:
        """The port in use; known once entered."""
        return self._port

    @property
    def connections(self) -> int:
        return len(self._premises.connections)

    async def __aenter__(self) -> Self:
        listeners = listen(
            self._host, self._port, backlog=_BACKLOG, port_option=self._port_option, host_option=self._host_option
        )
        self._port = listeners[0].getsockname()[1]
        loop = asyncio.get_running_loop()
        premises = Premises(
            self._handler,
            self._launch,
            self._app,
            self._limits,
            self._group,
            loop,
            self._turn,
            self._unread,
            self._judge,
            now_s=loop.time(),
        )
        self._premises = premises
        await self._group.__aenter__()
        try:
            with ExitStack() as opening:
                for listener in listeners:
                    opening.enter_context(listener)
                for listener in listeners:
                    await self._open_doors(listener, premises)
        except BaseException:
            self._close_doors()
            await self._group.__aexit__(None, None, None)
            raise
        self._ticking = self._group.create_task(self._tick())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._drain()
        finally:
            for connection in list(self._premises.connections):
                connection.transport.abort()
            self._ticking.cancel()
            await self._group.__aexit__(None, None, None)

    async def _open_doors(self, listener: socket.socket, premises: Premises) -> None:
        if self._tls is not None:
            limits = self._limits
            handshakes = Handshakes(
                self._tls,
                self._group,
                make=lambda: _as_protocol(Connection(premises, secured=True)),
                at_most=limits.connections,
                within_s=limits.head_s,
                refused=self._tls_refused,
            )
            self._handshakes.append(handshakes)
            handshakes.open(listener.dup())
            return
        for _ in range(_DOORS):
            await take_callers(
                listener.dup(), lambda: _as_protocol(Connection(premises)), self._doors, backlog=_BACKLOG
            )

    def _close_doors(self) -> None:
        for door in self._doors:
            door.close()
        for handshakes in self._handshakes:
            handshakes.close()

    async def _drain(self) -> None:
        premises = self._premises
        self._close_doors()
        premises.stopping = True
        for connection in list(premises.connections):
            connection.stop()
        try:
            if premises.connections:
                await self._deserted_within(self._limits.drain_s)
        finally:  # also where this is cancelled: that must be quick, and yet no client is left without a word
            if premises.connections:
                for connection in list(premises.connections):
                    connection.cut_off()
                await self._deserted_within(_FAREWELL_S)

    async def _deserted_within(self, bound_s: float) -> bool:
        try:
            async with asyncio.timeout(bound_s):
                await self._premises.deserted.wait()
        except TimeoutError:
            return False
        return True

    async def _tick(self) -> None:
        premises = self._premises
        while True:
            await asyncio.sleep(self._limits.tick_s)
            premises.now_s = premises.loop.time()
            for connection in list(premises.connections):
                connection.check(premises.now_s)
            make_room(premises.connections, self._limits.bodies_bytes)


def _as_protocol(connection: Connection) -> asyncio.Protocol:
    """It is one by what it does: a class of the interpreter's as base would keep it from being compiled."""
    return cast("asyncio.Protocol", connection)
