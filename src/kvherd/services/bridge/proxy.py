"""Before an engine on gRPC: every call is passed on to it and answered by it, bytes in, bytes out.

What is kept: messages and their order, metadata both ways, the status with its words, headers as early as the engine
sends them, none where it sends none, the deadline, a cancellation by either side, and back-pressure: the next message
is read when the one before was taken. With a relay, SubscribeKvEvents is the relay's, and it is told of the flushes
that the engine obeyed.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from smg_grpc_proto.generated import common_pb2, sglang_scheduler_pb2, vllm_engine_pb2

from kvherd.core.errors import WorkerUnreachable
from kvherd.core.ids import WorkerId
from kvherd.ports.kv_stream import Flushed, KvEventDoor
from kvherd.services.kv_relay.grpc_edge import Context, OpenCalls, rpc, send_headers
from kvherd.wire.grpc_keys import AUTHORIZATION, bearer

_SERVICES: Final = (
    sglang_scheduler_pb2.DESCRIPTOR.services_by_name["SglangScheduler"].full_name,
    vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"].full_name,
)
_EVENTS: Final = frozenset(f"/{service}/SubscribeKvEvents" for service in _SERVICES)
_FLUSH: Final = frozenset(f"/{service}/FlushCache" for service in _SERVICES)
_ENDLESS: Final = frozenset({"SubscribeKvEvents", "Watch", "ServerReflectionInfo"})
"""Calls that nobody ends while the server lives."""
_LONE_REQUEST_S: Final = 0.02
"""How long after a call's first request its end may come for the call to count as one of a single request."""
_NO_HEADERS_S: Final = 0.1
"""A refusal without headers looks like empty headers until its status is read, a moment later."""
_CHANNEL_TELLS_S: Final = 0.2
"""How long after its calls a broken channel may still say that it is ready. Seen: less than a millisecond, mostly."""

_HOP: Final = frozenset({"user-agent", "te", "content-type", "connection", "host", "lb-token", "lb-cost-bin"})
_PASSED: Final = frozenset({"grpc-status-details-bin", "grpc-trace-bin", "grpc-tags-bin"})
"""Of the names that gRPC keeps for itself, those that speak to the other end and not to the next hop."""

Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]
Upstream: TypeAlias = Any
"""A `grpc.aio` call; grpc has no types."""


def passed_on(metadata: Iterable[tuple[str, str | bytes]] | None) -> Metadata:
    """What of a call's metadata is for the other end."""
    return tuple(
        (key, value)
        for key, value in metadata or ()
        if key in _PASSED or not (key in _HOP or key.startswith(("grpc-", ":")))
    )


class ProxyFront:
    """Implements `services.bridge.bridge.Front` for the engine at the other end of `channel`, which is the caller's.

    `events`: who serves SubscribeKvEvents; None: the engine. `flushed` is told of flushes that the engine obeyed.
    `server` is what is stopping when calls end with it. With `api_key` every call has it in its metadata, instead of
    whatever authorization its client sent.
    """

    def __init__(
        self,
        engine: WorkerId,
        channel: grpc.aio.Channel,
        *,
        events: KvEventDoor | None = None,
        flushed: Flushed | None = None,
        server: str,
        api_key: str | None = None,
    ) -> None:
        self._proxy = EngineProxy(engine, channel, flushed=flushed, server=server, api_key=api_key)
        self._events = events

    async def serve_on(self, server: grpc.aio.Server) -> None:
        handlers: list[grpc.GenericRpcHandler] = [self._proxy]
        if self._events is not None:
            handlers.insert(0, _EventsHandler(self._events))
        server.add_generic_rpc_handlers(tuple(handlers))

    async def close(self) -> None:
        if self._events is not None:
            self._events.close()
        self._proxy.endless.close()

    def cut(self) -> None:
        self._proxy.calls.close()


class EngineProxy(grpc.GenericRpcHandler):  # type: ignore[misc] # grpc has no types
    """Any method of any service, as the engine has it. `endless` and `calls` are the calls under way."""

    def __init__(
        self,
        engine: WorkerId,
        channel: grpc.aio.Channel,
        *,
        flushed: Flushed | None,
        server: str,
        api_key: str | None = None,
    ) -> None:
        self._authorization = bearer(api_key)
        self._engine = engine
        self._channel = channel
        self._flushed = flushed
        self.endless = OpenCalls(server)
        self.calls = OpenCalls(server)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.stream_stream_rpc_method_handler(_Method(self, handler_call_details.method).serve)

    async def relay(self, method: str, context: Context) -> None:
        """Answer one call. Raises `WorkerUnreachable` if the connection to the engine is what failed."""
        calls = self.endless if method.rpartition("/")[2] in _ENDLESS else self.calls
        async with calls.one(context):
            async with asyncio.TaskGroup() as group:
                requests = _Requests(context, group)
                up = await self._begin(method, context, requests)
                try:
                    await _relay_answer(up, context, group, self._heed(method))
                finally:
                    requests.stop()
                    up.cancel()
            await self._end(up, context)

    def _heed(self, method: str) -> Callable[[bytes], None]:
        """What is done with each message of the answer before it is passed on."""
        flushed = self._flushed
        if flushed is None or method not in _FLUSH:
            return _nothing
        ordered_s = asyncio.get_running_loop().time()
        return lambda message: flushed(ordered_s) if _obeyed(message) else None

    async def _begin(self, method: str, context: Context, requests: "_Requests") -> Upstream:
        lone = await requests.lone()
        metadata, timeout_s = passed_on(context.invocation_metadata()), context.time_remaining()
        if self._authorization:
            metadata = (*(pair for pair in metadata if pair[0] != AUTHORIZATION), *self._authorization)
        if lone is not None:
            # All in one go: an engine that refuses before it has read would make a write fail, and hide its status.
            return self._channel.unary_stream(method)(lone, metadata=metadata, timeout=timeout_s)
        up = self._channel.stream_stream(method)(metadata=metadata, timeout=timeout_s)
        requests.send_to(up)
        return up

    async def _end(self, up: Upstream, context: Context) -> None:
        code, details = await up.code(), await up.details() or ""
        trailers = passed_on(await up.trailing_metadata())
        if code is grpc.StatusCode.OK:
            context.set_trailing_metadata(trailers)
            context.set_details(details)
            return
        if code is grpc.StatusCode.UNAVAILABLE and await self._connection_lost():
            raise WorkerUnreachable(self._engine, details)
        await context.abort(code, details, trailers)

    async def _connection_lost(self) -> bool:
        """Whether the connection is what ended a call: gRPC ends the calls first and tells of it a moment later."""
        until_s = asyncio.get_running_loop().time() + _CHANNEL_TELLS_S
        while self._channel.get_state() is grpc.ChannelConnectivity.READY:
            if asyncio.get_running_loop().time() >= until_s:
                return False
            await asyncio.sleep(_CHANNEL_TELLS_S / 20)
        return True


class _Method:
    def __init__(self, proxy: EngineProxy, name: str) -> None:
        self._proxy = proxy
        self._name = name

    @rpc
    async def serve(self, _requests: object, context: Context) -> None:
        await self._proxy.relay(self._name, context)


class _Requests:
    """What the client of a call sends, one message at a time. `stop` it before its group ends."""

    def __init__(self, context: Context, group: asyncio.TaskGroup) -> None:
        self._context = context
        self._group = group
        self._first: bytes | None = None
        self._next = self._read()
        self._sending: asyncio.Task[None] | None = None

    async def lone(self) -> bytes | None:
        """The only message, if it is there and followed by the end within a moment."""
        while True:
            await asyncio.wait([self._next], timeout=_LONE_REQUEST_S)
            if not self._next.done():
                return None
            if self._next.result() is grpc.aio.EOF:
                return self._first
            if self._first is not None:
                return None
            self._first, self._next = self._next.result(), self._read()

    def send_to(self, up: Upstream) -> None:
        self._sending = self._group.create_task(self._send(up))

    def stop(self) -> None:
        self._next.cancel()
        if self._sending is not None:
            self._sending.cancel()

    def _read(self) -> asyncio.Task[Any]:
        return self._group.create_task(self._context.read())

    async def _send(self, up: Upstream) -> None:
        try:
            if self._first is not None:
                await up.write(self._first)
                self._first = None
            while (message := await self._next) is not grpc.aio.EOF:
                await up.write(message)
                self._next = self._read()
            await up.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the engine has ended the call; its status tells the client why


class _EventsHandler(grpc.GenericRpcHandler):  # type: ignore[misc] # grpc has no types
    """SubscribeKvEvents under each of its names."""

    def __init__(self, events: KvEventDoor) -> None:
        self._events = events

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        if handler_call_details.method not in _EVENTS:
            return None
        return grpc.unary_stream_rpc_method_handler(
            self._serve,
            request_deserializer=common_pb2.SubscribeKvEventsRequest.FromString,
            response_serializer=common_pb2.KvEventBatch.SerializeToString,
        )

    @rpc
    async def _serve(self, request: common_pb2.SubscribeKvEventsRequest, context: Context) -> None:
        await self._events.serve(request.start_sequence_number, context)


def _nothing(_message: bytes) -> None:
    return


def _obeyed(answer: bytes) -> bool:
    try:
        return bool(common_pb2.FlushCacheResponse.FromString(answer).success)
    except DecodeError:
        return False


async def _relay_answer(
    up: Upstream, context: Context, group: asyncio.TaskGroup, heed: Callable[[bytes], None]
) -> None:
    """Headers and messages; the status is the caller's to read."""
    headers = await up.initial_metadata()
    reading = group.create_task(_next_of(up))
    if not headers:
        await asyncio.wait([reading], timeout=_NO_HEADERS_S)
    if headers or not reading.done() or reading.result() is not grpc.aio.EOF:
        await send_headers(context, passed_on(headers))
    message = await reading
    while message is not grpc.aio.EOF:
        heed(message)
        await context.write(message)
        message = await _next_of(up)


async def _next_of(up: Upstream) -> Any:  # noqa: ANN401 - bytes, or grpc's mark of the end
    try:
        return await up.read()
    except grpc.aio.AioRpcError:
        return grpc.aio.EOF
