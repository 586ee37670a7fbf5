"""The gateway's door for gRPC: it listens, and has the server come when the first caller says something.

The library costs a third of all the memory of an idle gateway, and most gateways get their orders over HTTP. Callers'
bytes are passed on as they are, TLS included, to a port of the loopback interface; who is behind a connection there is
known here, and anybody else who finds that port is nobody.
"""

import asyncio
import logging
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, cast

from kvherd.ports.tls import ServerTls
from kvherd.services.gateway.doors.console import Console
from kvherd.services.gateway.listening import listen, take_callers

if TYPE_CHECKING:
    from kvherd.services.gateway.doors.grpc_orders import GrpcOrders

log = logging.getLogger(__name__)

_LOOPBACK: Final = "127.0.0.1"
_BACKLOG: Final = 128
_MOST_CALLERS: Final = 1024
_FIRST_WORD_S: Final = 60.0
_START_S: Final = 30.0


class GatewayGrpc:
    """Serves one console; an async context manager. `port` 0 takes a free one.

    Raises `PortInUse`, or `OptionInvalid` for a host that is not this machine's, at start.
    """

    def __init__(self, console: Console, *, host: str, port: int, tls: ServerTls | None = None) -> None:
        self._console = console
        self._tls = tls
        self._host = host
        self.port = port
        self._orders: GrpcOrders | None = None
        self._starting = asyncio.Lock()
        self._stopping = False
        self._callers: set[_Caller] = set()
        self._behind: dict[int, _Inner] = {}
        self._passing: set[asyncio.Task[None]] = set()
        self._group = asyncio.TaskGroup()
        self._doors: list[asyncio.Server] = []

    async def __aenter__(self) -> Self:
        listeners = listen(self._host, self.port, backlog=_BACKLOG, port_option="--grpc-port")
        self.port = listeners[0].getsockname()[1]
        await self._group.__aenter__()
        try:
            for listener in listeners:
                await take_callers(listener, lambda: _Caller(self._came), self._doors, backlog=_BACKLOG)
        except BaseException:
            await self.__aexit__(None, None, None)
            for listener in listeners:  # some have no door yet that closes them
                listener.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping = True
        for door in self._doors:
            door.close()
        for task in self._passing:
            task.cancel()
        try:
            async with self._starting:
                if self._orders is not None:
                    await self._orders.__aexit__(None, None, None)
        finally:
            for caller in list(self._callers):
                caller.transport.abort()
            await self._group.__aexit__(None, None, None)

    def _came(self, caller: "_Caller") -> None:
        """A caller has connected, has said its first word, or is gone."""
        if caller.gone:
            self._callers.discard(caller)
        elif self._stopping:  # it was on its way in
            caller.transport.abort()
        elif caller.said:
            task = self._group.create_task(self._pass_on(caller))
            self._passing.add(task)
            task.add_done_callback(self._passing.discard)
        elif len(self._callers) >= _MOST_CALLERS:
            caller.transport.abort()
        else:
            self._callers.add(caller)

    async def _pass_on(self, caller: "_Caller") -> None:
        try:
            async with asyncio.timeout(_START_S):
                orders = await self._started()
                loop = asyncio.get_running_loop()
                _, inner = await loop.create_connection(lambda: _Inner(self._behind, caller), _LOOPBACK, orders.port)
        except (OSError, TimeoutError) as error:
            log.warning("a caller over gRPC cannot be served: %s", error or f"no server within {_START_S:g} s")
            caller.transport.abort()
        except Exception:  # a library that does not start must cost its callers, and not the gateway
            log.exception("gRPC failed to start unforeseen")
            caller.transport.abort()
        else:
            caller.join(inner)

    async def _started(self) -> "GrpcOrders":
        async with self._starting:
            if self._orders is None:
                await asyncio.to_thread(_load)
                from kvherd.services.gateway.doors.grpc_orders import GrpcOrders

                self._orders = await GrpcOrders(self._console, host_of=self._host_of, tls=self._tls).__aenter__()
            return self._orders

    def _host_of(self, peer: str) -> str:
        """Of a peer such as `ipv4:127.0.0.1:1234`."""
        port = peer.rpartition(":")[2]
        inner = self._behind.get(int(port)) if port.isdecimal() else None
        return inner.host if inner is not None else ""


class _End(asyncio.Protocol):
    """One end of what is passed on: what it says is written to the other, no faster than that takes it."""

    transport: asyncio.Transport
    other: "_End | None" = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is none by class

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        if self.other is not None and not self.other.transport.is_closing():
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and not self.other.transport.is_closing():
            self.other.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        if self.other is not None:
            self.other.transport.close()


class _Caller(_End):
    """`news` is called when it has connected, when it has said something for the first time, and when it is gone."""

    def __init__(self, news: "Callable[[_Caller], None]") -> None:
        self._news = news
        self.said = b""
        self.gone = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._silent = asyncio.get_running_loop().call_later(_FIRST_WORD_S, transport.abort)  # type: ignore[attr-defined]
        self._news(self)

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            self.other.transport.write(data)
            return
        self._silent.cancel()
        first, self.said = not self.said, self.said + data
        if first:
            self.transport.pause_reading()
            self._news(self)

    def join(self, inner: "_Inner") -> None:
        if self.gone:
            inner.transport.abort()
            return
        self.other = inner
        inner.transport.write(self.said)
        self.said = b""
        self.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self.gone = True
        self._silent.cancel()
        self._news(self)
        super().connection_lost(error)


class _Inner(_End):
    """To the server. While it lasts, `behind` has it by its own port; `host` is where its caller is."""

    def __init__(self, behind: "dict[int, _Inner]", caller: _Caller) -> None:
        self._behind = behind
        self.other = caller
        peer = caller.transport.get_extra_info("peername")
        self.host = str(peer[0]) if peer else ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._port = int(transport.get_extra_info("sockname")[1])
        self._behind[self._port] = self

    def connection_lost(self, error: Exception | None) -> None:
        if self._behind.get(self._port) is self:
            del self._behind[self._port]
        super().connection_lost(error)


def _load() -> None:
    """Up to half a second, off the event loop."""
    import kvherd.services.gateway.doors.grpc_orders  # noqa: F401
