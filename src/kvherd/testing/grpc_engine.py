"""An engine on gRPC that does as the method's name says, for whoever stands before engines that it does not know."""

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Final, Self

import grpc
import grpc.aio

Metadata = tuple[tuple[str, str | bytes], ...]
_LIMIT_BYTES: Final = 80 << 20
_OPTIONS: Final = [("grpc.max_receive_message_length", _LIMIT_BYTES), ("grpc.max_send_message_length", _LIMIT_BYTES)]


class FakeGrpcEngine(grpc.GenericRpcHandler):  # type: ignore[misc] # grpc has no types
    """An async context manager; `port` is where it listens. Every method of `/any.Service/` is bytes both ways.

    `Echo` answers each request with itself, `Hold` sends headers and waits for ever, `Mute` not even headers, `Flood`
    sends 64 KiB messages for ever, `Deaf` reads nothing; `calls[NAME]` answers further names.
    """

    def __init__(self, *, credentials: grpc.ServerCredentials | None = None) -> None:
        """With `credentials` over TLS."""
        self._credentials = credentials
        self.port = 0
        self.seen: list[tuple[str, Metadata, float | None]] = []
        self.ended: list[str] = []
        """Names of calls that were cancelled here."""
        self.sent = 0
        self.calls: dict[str, Callable[[Any], Awaitable[None]]] = {
            "Echo": _echo,
            "Hold": _hold,
            "Mute": _mute,
            "Flood": self._flood,
            "Deaf": _mute,
        }

    async def __aenter__(self) -> Self:
        self._server = grpc.aio.server(options=_OPTIONS)
        self._server.add_generic_rpc_handlers((self,))
        address = f"127.0.0.1:{self.port}"
        if self._credentials is None:
            self.port = self._server.add_insecure_port(address)
        else:
            self.port = self._server.add_secure_port(address, self._credentials)
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._server.stop(0)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        name = handler_call_details.method.rpartition("/")[2]
        answer = self.calls.get(name)
        if answer is None:
            return None

        async def serve(_requests: object, context: Any) -> None:  # noqa: ANN401 - grpc has no types
            self.seen.append((name, tuple(context.invocation_metadata() or ()), context.time_remaining()))
            try:
                await answer(context)
            except asyncio.CancelledError:
                self.ended.append(name)
                raise

        return grpc.stream_stream_rpc_method_handler(serve)

    async def _flood(self, context: Any) -> None:  # noqa: ANN401 - grpc has no types
        while True:
            await context.write(bytes(65_536))
            self.sent += 1


async def _echo(context: Any) -> None:  # noqa: ANN401 - grpc has no types
    while (message := await context.read()) is not grpc.aio.EOF:
        await context.write(message)


async def _hold(context: Any) -> None:  # noqa: ANN401 - grpc has no types
    await context.send_initial_metadata((("held", "yes"),))
    await asyncio.Event().wait()


async def _mute(_context: object) -> None:
    await asyncio.Event().wait()
