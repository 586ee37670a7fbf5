"""A start of a gRPC server after which there is a server that serves, or none.

`grpc.aio` forgets a server whose start is cancelled: according to the turn it goes on to serve with nobody to stop it,
or keeps its port without serving, and takes the thread that polls for every other server and channel with it when it
is collected.
"""

import asyncio
import contextlib

import grpc.aio


async def start_or_leave_none(server: grpc.aio.Server) -> None:
    """Start it. Cancelled, however often, it lets the start end first (a turn or two of the loop), then stops."""
    starting = asyncio.ensure_future(server.start())
    try:
        await asyncio.shield(starting)
    except asyncio.CancelledError:
        await _finish(starting)
        await _finish(asyncio.ensure_future(server.stop(0)))
        raise


async def _finish(step: asyncio.Future[None]) -> None:
    while not step.done():
        with contextlib.suppress(asyncio.CancelledError):  # the caller raises it again
            await asyncio.wait([step])
