"""The connections that calls of one engine share."""

import asyncio
import os
import ssl
from collections.abc import Iterable
from typing import Final

from kvherd.adapters.grpc_stream import Receiver, WireStream
from kvherd.adapters.grpc_wire import GrpcWire
from kvherd.adapters.tls import HTTP_2, ClientTls, connected, why_untrusted
from kvherd.wire import http2

CONNECT_S: Final = 5.0


class GrpcWires:
    """The connections to one engine: one, unless it bounds the calls of each. Raises nothing that is not documented.

    With `tls` over TLS. Once something of it was renewed, calls go over new connections, and those under way end where
    they are.
    """

    def __init__(self, host: str, port: int, *, tls: ClientTls | None = None, most: int = 64) -> None:
        self._host = host
        self._port = port
        self._tls = tls
        self._secured_by: ssl.SSLContext | None = None
        self._most = most
        self._wires: list[GrpcWire] = []
        self._connecting = asyncio.Lock()
        self._closed = False

    @property
    def secured(self) -> bool:
        return self._tls is not None

    async def call(
        self,
        path: str,
        data: bytes,
        receiver: Receiver,
        metadata: Iterable[tuple[str, str]] = (),
        *,
        ends_s: float | None = None,
    ) -> WireStream:
        """Raises `OSError` if nobody can be reached, with the reason.

        The engine is told what is left until `ends_s`, by the event loop's clock; to end the call is the caller's.
        """
        if self._tls is not None and self._secured_by is not self._tls.context(HTTP_2):
            self._retire()
        wire = self._usable() or await self._connected()
        if ends_s is not None:
            left_s = ends_s - asyncio.get_running_loop().time()
            metadata = (*metadata, ("grpc-timeout", http2.timeout_value(left_s)))
        return wire.call(path, data, receiver, metadata)

    async def warm(self) -> None:
        """Connect, so that the first call does not wait for it. Raises `OSError`."""
        if self._usable() is None:
            await self._connected()

    def close(self) -> None:
        """End every call as UNAVAILABLE."""
        self._closed = True
        for wire in self._wires:
            wire.close()
        self._wires.clear()

    def _retire(self) -> None:
        assert self._tls is not None
        self._secured_by = self._tls.context(HTTP_2)
        for wire in self._wires:
            wire.leave()

    def _usable(self) -> GrpcWire | None:
        return next((wire for wire in self._wires if wire.usable), None)

    async def _connected(self) -> GrpcWire:
        async with self._connecting:
            wire = self._usable()
            if wire is not None:
                return wire
            self._wires = [one for one in self._wires if not one.over]
            self._check_open()
            if len(self._wires) >= self._most:
                raise OSError(f"it bounds the calls of a connection, and {self._most} connections are full")
            wire = await self._connect()
            self._wires.append(wire)
            if self._closed:  # meanwhile
                self.close()
            self._check_open()
            return wire

    def _check_open(self) -> None:
        if self._closed:
            raise OSError("the connection was closed here")

    async def _connect(self) -> GrpcWire:
        authority = f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"
        scheme = "http" if self._tls is None else "https"
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                return await connected(
                    loop,
                    lambda: GrpcWire(authority, scheme=scheme),
                    self._host,
                    self._port,
                    self._tls,
                    protocol=HTTP_2,
                )
        except TimeoutError:
            raise OSError(f"no connection within {CONNECT_S:g} s") from None
        except ssl.SSLError as error:
            raise OSError(why_untrusted(error)) from None
        except OSError as error:
            raise OSError(os.strerror(error.errno).lower() if error.errno else str(error)) from error
