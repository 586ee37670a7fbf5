"""Connections to gRPC workers: how they are kept, and what their statuses mean."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import grpc
import grpc.aio

from kvherd.adapters.grpc_url import grpc_target
from kvherd.adapters.tls import ClientTls, trusting_this_machine
from kvherd.core.errors import WorkerError, WorkerUnreachable
from kvherd.core.ids import WorkerId
from kvherd.ports.tls import Pem
from kvherd.wire.grpc_keys import bearer
from kvherd.wire.status import worker_error

_MOST_MESSAGE_BYTES = 64 << 20
_OPTIONS: list[tuple[str, str | int]] = [
    ("grpc.max_receive_message_length", _MOST_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MOST_MESSAGE_BYTES),
    # a host that vanished without a word is noticed in the middle of a silent prefill, too
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # whether and where to try again is the gateway's decision
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # two channels to one worker are two connections: closing one must not disturb the other
    ("grpc.use_local_subchannel_pool", 1),
]


def open_channel(target: str, tls: ClientTls | None = None, *, api_key: str | None = None) -> grpc.aio.Channel:
    """A channel to `host:port`, `grpc://host:port` or, over TLS, `grpcs://host:port`; it connects when first used.

    To be closed by the caller. `tls` None: trusting whom this machine trusts. With `api_key` its calls of one request
    and one answer have it in their metadata.
    """
    keys = [_Bearer(api_key)] if api_key else None
    address, secured = grpc_target(target)
    if secured:
        return secure_channel(address, tls or trusting_this_machine(), _OPTIONS, keys)
    return grpc.aio.insecure_channel(address, options=_OPTIONS, interceptors=keys)


def secure_channel(
    address: str, tls: ClientTls, options: list[tuple[str, str | int]], interceptors: list[Any] | None = None
) -> grpc.aio.Channel:
    """A channel to HOST:PORT over TLS; to be closed by the caller."""
    named = [("grpc.ssl_target_name_override", tls.server_name)] if tls.server_name else []
    credentials = _credentials(tls.pem())
    return grpc.aio.secure_channel(address, credentials, options=[*options, *named], interceptors=interceptors)


@lru_cache(maxsize=4)
def _credentials(pem: Pem) -> grpc.ChannelCredentials:
    """Shared by the channels that use the same files: each holds all the authorities that a machine trusts."""
    return grpc.ssl_channel_credentials(pem.authorities, pem.key or None, pem.certificate or None)


class _Bearer(grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[misc] # grpc has no types
    def __init__(self, api_key: str) -> None:
        self._pairs = bearer(api_key)

    async def intercept_unary_unary(
        self, continuation: Callable[..., Any], client_call_details: grpc.aio.ClientCallDetails, request: object
    ) -> object:
        metadata = grpc.aio.Metadata(*(client_call_details.metadata or ()), *self._pairs)
        return await continuation(client_call_details._replace(metadata=metadata), request)


async def connect(channel: grpc.aio.Channel, worker: WorkerId) -> None:
    """Return when connected. Raises `WorkerUnreachable` when an attempt failed; without end if none does."""
    state = channel.get_state(try_to_connect=True)
    while state is not grpc.ChannelConnectivity.READY:
        if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
            raise WorkerUnreachable(worker)
        await channel.wait_for_state_change(state)
        state = channel.get_state(try_to_connect=True)


@contextmanager
def rpc_errors(worker: WorkerId, what: str, *, after_s: float | None = None) -> Iterator[None]:
    """Raise what a failed call of `what` means as a `WorkerError`; `after_s` is the deadline it was given."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise as_worker_error(worker, error, what, after_s=after_s) from error
    except grpc.aio.UsageError as error:
        raise WorkerUnreachable(worker, "the connection was closed here") from error
    except asyncio.CancelledError as error:
        # a channel that is closed cancels its calls, and each looks as if its task had been cancelled
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise WorkerUnreachable(worker, "the connection was closed here") from error


def as_worker_error(
    worker: WorkerId, error: grpc.aio.AioRpcError, what: str, *, after_s: float | None = None
) -> WorkerError:
    return worker_error(worker, error.code().name, error.details() or "", what=what, after_s=after_s)
