"""The edge of every gRPC server before an engine: errors become statuses, and open calls end with a sentence."""

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import wraps
from typing import Any, Final, TypeAlias, TypeVar, cast

import grpc
from smg_grpc_proto.generated import common_pb2

from kvherd.core.errors import KvherdError
from kvherd.wire.status import public_message, status_of

log = logging.getLogger(__name__)

_CHUNK_BYTES = 2**20
_ABORT_S = 2.0
"""How long a status may wait behind messages that nobody takes. It is sent all the same once they are taken."""
_TURNS = 8
"""A process that was stalled finds its timers due before it looks at what was sent: that costs one turn of these."""

CONNECTION_OPTIONS: Final = (
    ("grpc.so_reuseport", 0),
    # a peer that vanished, or does not even answer pings, ends with its calls after 40 s
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # gateways keep idle connections alive; the default would answer their pings with "too many"
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
)

Context: TypeAlias = Any
"""A `grpc.aio.ServicerContext`; grpc has no types."""

Handler: TypeAlias = Callable[..., Awaitable[Any]]
H = TypeVar("H", bound=Handler)


async def refuse(context: Context, error: Exception) -> None:
    """End the call with the status of `error`; never returns. An unforeseen one is logged and leaves no detail."""
    if not isinstance(error, KvherdError):
        log.error("an RPC failed unforeseen", exc_info=error)
    await end(context, grpc.StatusCode[status_of(error).grpc], public_message(error))


async def end(context: Context, code: grpc.StatusCode, details: str) -> None:
    """Abort the call, whether or not its caller still reads; never returns."""
    await _within_turns(asyncio.ensure_future(context.abort(code, details)))
    raise asyncio.CancelledError  # gRPC takes only its own `AbortError` for one


async def send_headers(context: Context, metadata: Sequence[tuple[str, str | bytes]]) -> None:
    """Send them whole, though the call is cancelled meanwhile: until they are sent, gRPC can send no status."""
    sending = asyncio.ensure_future(context.send_initial_metadata(metadata))
    try:
        await asyncio.wait((sending,))
    except asyncio.CancelledError:
        await _within_turns(sending)
        raise
    sending.result()


async def _within_turns(act: asyncio.Future[None]) -> None:
    """Wait for what gRPC is doing, and raise what it raises; after a while it is given up."""
    try:
        for _ in range(_TURNS):
            await asyncio.wait((act,), timeout=_ABORT_S / _TURNS)
            if act.done():
                return act.result()
    finally:
        act.cancel()


async def hand_out(archive: bytes, context: Context) -> None:
    """Answer GetTokenizer: the archive in chunks, its SHA-256 on the last."""
    digest = hashlib.sha256(archive).hexdigest()
    for start in range(0, len(archive), _CHUNK_BYTES):
        last = start + _CHUNK_BYTES >= len(archive)
        chunk = archive[start : start + _CHUNK_BYTES]
        await context.write(common_pb2.GetTokenizerChunk(data=chunk, sha256=digest if last else ""))


def rpc(handler: H) -> H:
    """Make a handler that raises into one that answers with a status."""

    @wraps(handler)
    async def guarded(service: object, request: object, context: Context) -> Any:  # noqa: ANN401
        try:
            return await handler(service, request, context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001 - the process boundary: the caller gets a status, whatever it was
            await refuse(context, error)

    return cast(H, guarded)


class OpenCalls:
    """Calls that would outlast their server: `close` ends each with UNAVAILABLE, in words. `server` is what stops."""

    def __init__(self, server: str) -> None:
        self._server = server
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing = False

    def __len__(self) -> int:
        return len(self._tasks)

    @asynccontextmanager
    async def one(self, context: Context) -> AsyncGenerator[None, None]:
        """The call that runs in this task is open while inside."""
        task = asyncio.current_task()
        assert task is not None, "an RPC runs in a task"
        self._tasks.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if not self._closing:
                raise
            task.uncancel()
            try:
                await end(context, grpc.StatusCode.UNAVAILABLE, f"{self._server} is stopping")
            except grpc.aio.InternalError:  # the caller left at the same moment: there is nobody to tell
                raise asyncio.CancelledError from None
        finally:
            self._tasks.discard(task)

    def close(self) -> None:
        self._closing = True
        for task in self._tasks:
            task.cancel()
