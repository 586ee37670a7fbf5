"""The edge of the gRPC server: errors become statuses here, and nowhere else."""

import logging
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, TypeAlias, TypeVar, cast

import grpc

from kvherd.core.errors import KvherdError
from kvherd.wire.status import public_message, status_of

log = logging.getLogger(__name__)

Context: TypeAlias = Any
"""A `grpc.aio.ServicerContext`; grpc has no types."""

Handler: TypeAlias = Callable[..., Awaitable[Any]]
H = TypeVar("H", bound=Handler)


async def refuse(context: Context, error: Exception) -> None:
    """End the call with the status of `error`; never returns. An unforeseen one is logged and leaves no detail."""
    if not isinstance(error, KvherdError):
        log.error("an RPC failed unforeseen", exc_info=error)
    await context.abort(grpc.StatusCode[status_of(error).grpc], public_message(error))


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
