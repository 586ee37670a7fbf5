"""Kept HTTP/1.1 connections to one worker."""

import asyncio
import errno
from collections import deque
from collections.abc import Callable
from typing import Final

from kvherd.adapters.http_connection import (
    NoDescriptor,
    Over,
    Sink,
    UpstreamBroken,
    UpstreamConnection,
    UpstreamUnreachable,
)
from kvherd.adapters.tls import ClientTls, connected, why_untrusted
from kvherd.ports.loop_turn import LoopTurn

PORTS: Final = 65_536
"""More connections to one address there cannot be. How many requests are under way is bounded where they are let in: a
second bound here would keep those waiting, unseen, for which a worker was chosen."""

_ROUNDS: Final = 4  # each wakes the process up, for each pool


class HttpPool:
    """Connections to one address, at most `max_connections`, kept for `idle_s` when idle.

    `idle_s` is below the 5 s after which uvicorn, and so vLLM and SGLang, drop an idle connection.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        tls: ClientTls | None = None,
        max_connections: int = PORTS,
        idle_s: float = 4.0,
        connect_timeout_s: float = 5.0,
        turn: LoopTurn | None = None,
    ) -> None:
        self._host = host
        self._port = port
        self._tls = tls
        self._max = max_connections
        self._idle_s = idle_s
        self._connect_timeout_s = connect_timeout_s
        self._turn = turn or LoopTurn()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._idle: deque[UpstreamConnection] = deque()
        self._open: set[UpstreamConnection] = set()
        self._connecting = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._reaping: asyncio.TimerHandle | None = None
        self._emptied: asyncio.Future[None] | None = None
        self._closed = False
        self._round = 0

    @property
    def open_connections(self) -> int:
        return len(self._open)

    @property
    def idle_connections(self) -> int:
        return len(self._idle)

    async def exchange(
        self,
        head: bytes,
        body: bytes,
        sink: Sink,
        *,
        repeatable: bool = True,
        sent: Callable[[], None] | None = None,
        waits: bool = True,
    ) -> None:
        """Run one request. Raises `UpstreamUnreachable` or `UpstreamBroken`.

        A request that met a kept connection just as the worker closed it is sent once more, on a new connection: if
        nothing of it had left, or if it is `repeatable` and nothing of an answer had come. One that does not wait has
        a connection of its own where all are in use.
        """
        try:
            await self._run(self._take_idle() or await self._new(waits=waits), head, body, sink, sent)
        except UpstreamBroken as broken:
            if not (broken.unsent or (broken.stale and repeatable)):
                raise
        else:
            return
        await self._run(await self._new(waits=waits), head, body, sink, sent)

    async def exchange_anew(self, head: bytes, body: bytes, sink: Sink) -> None:
        """`exchange` on a connection that has served nothing yet, and not a second time."""
        await self._run(await self._new(), head, body, sink, None)

    def begin(self, head: bytes, body: bytes, sink: Sink, over: Over) -> UpstreamConnection | None:
        """Run one request on an idle connection, `over` being called as `UpstreamConnection.begin` has it; None, and
        nothing has happened, if none is idle. Nothing is sent twice: that is left to who is told.
        """
        idle = self._idle
        while idle:
            connection = idle.pop()
            if connection.begin(head, body, sink, over):
                return connection
        return None

    async def _run(
        self, connection: UpstreamConnection, head: bytes, body: bytes, sink: Sink, sent: Callable[[], None] | None
    ) -> None:
        """Cancelled, it ends the connection."""
        over: asyncio.Future[Exception | None] = self.loop.create_future()
        ours = True

        def tell(outcome: Exception | None) -> None:
            nonlocal ours
            ours = False
            if not over.done():
                over.set_result(outcome)

        if not connection.begin(head, body, sink, tell):
            raise UpstreamBroken("the connection was closed", stale=True, unsent=True)
        try:
            if sent is not None:
                sent()
            outcome = await over
        except BaseException:
            if (
                ours
            ):  # an exchange may end, and the connection be another's, before its task learns that it is cancelled
                connection.cancel()
            raise
        if outcome is not None:
            raise outcome

    async def close(self) -> None:
        """End every connection, also those in use. Idempotent."""
        self._closed = True
        if self._reaping is not None:
            self._reaping.cancel()
            self._reaping = None
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)
        if self._open:
            if self._emptied is None:
                self._emptied = self.loop.create_future()
            for connection in list(self._open):
                connection.transport.abort()
            await asyncio.shield(self._emptied)  # another may wait for it, too

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:  # asked for once: each time costs a system call in 3.11
            self._loop = asyncio.get_running_loop()
        return self._loop

    def forget(self, connection: UpstreamConnection) -> None:
        """Called by a connection that is gone."""
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        self._let_next_in()
        if self._emptied is not None and not self._open and not self._emptied.done():
            self._emptied.set_result(None)

    def _take_idle(self) -> UpstreamConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable and not connection.transport.is_closing():
                return connection
        return None

    async def _new(self, *, waits: bool = True) -> UpstreamConnection:
        while waits and len(self._open) + self._connecting >= self._max:
            waiter = self.loop.create_future()
            self._waiting.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if not waiter.cancelled():
                    self._let_next_in()  # this one's turn came and is not used
                elif waiter in self._waiting:
                    self._waiting.remove(waiter)
                raise
            connection = self._take_idle()
            if connection is not None:
                return connection
        self._check_open()
        self._connecting += 1
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                made = await connected(self.loop, self._connection, self._host, self._port, self._tls)
        except TimeoutError:
            raise UpstreamUnreachable(f"no connection within {self._connect_timeout_s:g} s") from None
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise NoDescriptor("the gateway has no file descriptor left") from None
            raise UpstreamUnreachable(why_untrusted(error)) from None
        finally:
            self._connecting -= 1
            self._let_next_in()
        self._open.add(made)
        try:
            self._check_open()  # it may have been closed meanwhile
        except UpstreamUnreachable:
            made.transport.abort()
            raise
        return made

    def _connection(self) -> UpstreamConnection:
        return UpstreamConnection(self, self._turn)

    def _check_open(self) -> None:
        if self._closed:
            raise UpstreamUnreachable("its connections are closed here")

    def free(self, connection: UpstreamConnection) -> None:
        """Called by a connection whose exchange has ended."""
        if connection.lost:
            return
        if not connection.reusable or self._closed:
            connection.transport.close()
            return
        connection.idle_since = self._round
        self._idle.append(connection)
        if self._waiting:
            self._let_next_in()
        if self._reaping is None:
            self._reaping = self.loop.call_later(self._idle_s / _ROUNDS, self._reap)

    def _let_next_in(self) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def _reap(self) -> None:
        """Looked at in rounds, so that no clock is asked when a connection becomes idle."""
        self._reaping = None
        self._round += 1
        while self._idle and self._idle[0].idle_since <= self._round - _ROUNDS:
            self._idle.popleft().transport.close()
        if self._idle:
            self._reaping = self.loop.call_later(self._idle_s / _ROUNDS, self._reap)
