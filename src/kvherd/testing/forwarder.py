"""A TCP port that passes on to another, until it is told not to."""

import asyncio
from contextlib import suppress
from types import TracebackType
from typing import Self

_PIECE_BYTES = 65_536


class Forwarder:
    """An async context manager; `port` is where it listens.

    `cut` breaks every connection and every new one at once; `freeze` keeps them, and passes nothing on, as a cable does
    that was pulled out. `mend` ends both.
    """

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._is_cut = False
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._serving: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        await self.cut()
        for _ in range(10):  # connections that were accepted a moment ago find out that they came too late
            await asyncio.sleep(0)

    async def cut(self) -> None:
        self._is_cut = True
        self._flowing.set()
        serving = list(self._serving)
        for one in serving:
            one.cancel()
        await asyncio.gather(*serving, return_exceptions=True)

    def freeze(self) -> None:
        self._flowing.clear()

    def mend(self) -> None:
        self._is_cut = False
        self._flowing.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if self._is_cut or task is None:
            writer.transport.abort()
            return
        self._serving.add(task)
        try:
            with suppress(OSError):
                there, back = await asyncio.open_connection("127.0.0.1", self._target_port)
                try:
                    async with asyncio.TaskGroup() as group:
                        group.create_task(self._pass(reader, back))
                        group.create_task(self._pass(there, writer))
                finally:
                    back.transport.abort()
        finally:
            writer.transport.abort()
            self._serving.discard(task)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until either end is gone; then the other one's end is gone too."""
        with suppress(OSError):
            while data := await reader.read(_PIECE_BYTES):
                await self._flowing.wait()
                writer.write(data)
                await writer.drain()
        writer.transport.abort()
