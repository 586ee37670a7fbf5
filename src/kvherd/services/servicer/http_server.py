"""uvicorn inside our own loop: our socket, our signals, our end."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncGenerator, Generator

import uvicorn
from starlette.types import ASGIApp

log = logging.getLogger(__name__)

START_DEADLINE_S = 10.0
STOP_GRACE_S = 5.0


class _QuietServer(uvicorn.Server):
    """Leaves signals to whoever runs the loop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


@contextlib.asynccontextmanager
async def http_server(app: ASGIApp, listener: socket.socket, *, drain_s: float) -> AsyncGenerator[None, None]:
    """Serve `app` on `listener` while inside; leaving lets answers finish for `drain_s`, then cuts them."""
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=max(1, round(drain_s)),
        timeout_keep_alive=75,
        server_header=False,
    )
    server = _QuietServer(config)
    try:
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(server.serve(sockets=[listener]))
            try:
                async with asyncio.timeout(START_DEADLINE_S):
                    while not server.started and not serving.done():  # noqa: ASYNC110 - uvicorn tells by this alone
                        await asyncio.sleep(0.001)
                yield
            finally:
                server.should_exit = True
                _, late = await asyncio.wait((serving,), timeout=drain_s + STOP_GRACE_S)
                if late:
                    log.warning("the HTTP server did not stop in time and is cut off")
                    serving.cancel()
    finally:
        _cut_off(server)
        listener.close()


def _cut_off(server: uvicorn.Server) -> None:
    """End what is left of it: uvicorn leaves everything as it is when it is cancelled."""
    for door in getattr(server, "servers", ()):
        door.close()
    for task in server.server_state.tasks:
        task.cancel()
    for connection in list(server.server_state.connections):
        transport = getattr(connection, "transport", None)
        if transport is not None:
            transport.abort()
