"""A start of a gRPC server after which there is a server that serves, or none, and an end after which there is none.

`grpc.aio` forgets a server whose start is cancelled: according to the turn it goes on to serve with nobody to stop it,
or keeps its port without serving, and takes the thread that polls for every other server and channel with it when it
is collected. One whose stop is cancelled lets its calls go on for ever.
"""

import asyncio
import contextlib

import grpc.aio

_FINISH_S = 10.0
"""A start or a stop without grace takes some turns of the loop."""


async def start_or_leave_none(server: grpc.aio.Server) -> None:
    """Start it. Cancelled, however often, it lets the start end first (a turn or two of the loop), then stops."""
    starting = asyncio.ensure_future(server.start())
    try:
        await asyncio.shield(starting)
    except asyncio.CancelledError:
        await _finish(starting)
        await _finish(asyncio.ensure_future(server.stop(0)))
        raise


async def stop_within(server: grpc.aio.Server, grace_s: float) -> None:
    """Stop it; calls under way may go on for so long. Cancelled, however often, it cuts them off, and stops as well."""
    stopping = asyncio.ensure_future(server.stop(grace_s))
    try:
        await asyncio.shield(stopping)
    except asyncio.CancelledError:
        await _finish(asyncio.ensure_future(server.stop(0)))
        await _finish(stopping)
        raise


async def _finish(step: asyncio.Future[None]) -> None:
    """Whatever gRPC does, it is given up after a while."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + _FINISH_S
    while not step.done() and loop.time() < until_s:
        with contextlib.suppress(asyncio.CancelledError):  # the caller raises it again
            await asyncio.wait([step], timeout=until_s - loop.time())
    step.cancel()
