"""Kept HTTP/1.1 connections to one worker, on bare protocols: what a relay needs of a client and no more.

An answer's bytes go to a `Sink` from inside the read callback: no queue, no task and no wake-up for each piece. So
that a sink which cannot keep up bounds what is read, after every `_SETTLE_BYTES` reading stops until `settle` returns.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol, cast

import httptools

from kvherd.adapters.tls import ClientTls, connected, why_untrusted

_SETTLE_BYTES = 64 * 1024
_HEAD_BYTES = 64 * 1024
_JOIN_BYTES = 16 * 1024
_BODYLESS = frozenset({204, 304})


class Sink(Protocol):
    """Where an answer goes. `head` is called once, then `body` for each piece; both are cheap."""

    def head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None: ...

    def body(self, data: bytes) -> None: ...

    async def settle(self) -> None:
        """Wait until more may come."""
        ...


class UpstreamUnreachable(Exception):
    """No connection could be made."""


class UpstreamBroken(Exception):
    """The exchange cannot be completed; `reason` is for people.

    `stale`: a kept connection ended before any byte of an answer, as an idle one may at any moment. `unsent`: nothing
    of the request had left, so that it can be sent again whatever it is.
    """

    def __init__(self, reason: str, *, stale: bool = False, unsent: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.stale = stale
        self.unsent = unsent


class UpstreamConnection(asyncio.Protocol):
    """One connection, one exchange at a time; `reusable` says whether another may follow."""

    __slots__ = (
        "_begun",
        "_framed",
        "_head_fed",
        "_headers",
        "_in_body",
        "_interim",
        "_loop",
        "_outcome",
        "_parser",
        "_paused",
        "_pool",
        "_sink",
        "_unsettled",
        "_used",
        "_wake",
        "idle_since_s",
        "lost",
        "reusable",
        "transport",
    )

    transport: asyncio.Transport

    def __init__(self, pool: "HttpPool") -> None:
        self._pool = pool
        self._loop = pool.loop
        self._parser = httptools.HttpResponseParser(self)
        self._sink: Sink | None = None
        self._wake: asyncio.Future[None] | None = None
        self._outcome: bool | Exception = False
        self._headers: list[tuple[bytes, bytes]] = []
        self._begun = self._used = self._in_body = self._framed = self._interim = self._paused = False
        self._unsettled = self._head_fed = 0
        self.lost = False
        self.reusable = True
        self.idle_since_s = 0.0

    async def exchange(self, head: bytes, body: bytes, sink: Sink, sent: Callable[[], None] | None) -> None:
        """Send one request and give its answer to the sink. Raises `UpstreamBroken`. Cancelled, it ends the
        connection, which is how an engine learns that nobody waits any more.
        """
        if self.lost or self.transport.is_closing():
            self.reusable = False
            raise UpstreamBroken("the connection was closed", stale=True, unsent=True)
        self._sink = sink
        self._outcome = self._begun = self._in_body = False
        self._unsettled = self._head_fed = 0
        if len(body) <= _JOIN_BYTES:
            self.transport.write(head + body)
        else:
            self.transport.writelines((head, body))
        if sent is not None:
            sent()
        try:
            while self._outcome is False:
                self._wake = self._loop.create_future()
                await self._wake
                if self._paused and self._outcome is False:
                    await sink.settle()
                    self._unsettled = 0
                    self._resume()
        except BaseException:
            self.reusable = False
            self.transport.abort()
            raise
        finally:
            self._sink = None
            self._used = True
        if self._paused:
            self._resume()
        self._raise_if_broken()

    def _raise_if_broken(self) -> None:
        if isinstance(self._outcome, Exception):
            self.transport.abort()
            raise self._outcome

    def _resume(self) -> None:
        if self._paused and not self.lost:
            self.transport.resume_reading()
        self._paused = False

    # --- called by the event loop ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is none by class

    def data_received(self, data: bytes) -> None:
        if self._sink is None:  # an answer that nobody asked for must not become the next request's
            self.reusable = False
            self.transport.abort()
            return
        self._begun = True
        if not self._in_body:
            self._head_fed += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self._finish(error.__context__ if isinstance(error.__context__, Exception) else error)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._finish(UpstreamBroken(f"its answer is not HTTP/1.1: {error}"))
        if not self._in_body:
            if self._head_fed > _HEAD_BYTES and self._outcome is False:
                self._finish(UpstreamBroken(f"the headers of its answer are larger than {_HEAD_BYTES} bytes"))
        elif self._unsettled > _SETTLE_BYTES and not self._paused and self._outcome is False:
            self._paused = True
            self.transport.pause_reading()
            self._wake_up()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self.reusable = False
        if self._sink is not None:
            if self._in_body and not self._framed and exc is None:
                self._finish(True)
            else:
                when = "in the middle of its answer" if self._begun else "before it answered"
                why = f" ({exc})" if exc is not None else ""
                stale = self._used and not self._begun
                self._finish(UpstreamBroken(f"it closed the connection {when}{why}", stale=stale))
        self._pool.forget(self)
        del self._parser  # it refers back to this object

    # --- called by llhttp -----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._outcome is not False:
            raise UpstreamBroken("it sent more than was asked for")
        self._headers = []
        self._framed = self._interim = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_body:  # a trailer
            return
        name = name.lower()
        if name == b"content-length":
            self._framed = True
        elif name == b"transfer-encoding":
            if value.lower() != b"chunked":
                raise UpstreamBroken(f"its answer has an unknown transfer-encoding {value.decode('latin-1')!r}")
            self._framed = True
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            if status == 101:
                raise UpstreamBroken("it switched protocols unasked")
            self._interim = True
            return
        self._in_body = True
        self._framed = self._framed or status in _BODYLESS
        if self._sink is not None:
            self._sink.head(status, self._headers)

    def on_body(self, data: bytes) -> None:
        self._unsettled += len(data)
        if self._sink is not None:
            self._sink.body(data)

    def on_message_complete(self) -> None:
        if self._interim:
            self._head_fed = 0
            return
        if not self._parser.should_keep_alive() or self.transport.get_write_buffer_size():
            self.reusable = False
        self._finish(True)

    def _finish(self, outcome: bool | Exception) -> None:
        if isinstance(outcome, Exception):
            self.reusable = False
        if self._outcome is False:
            self._outcome = outcome
            self._wake_up()

    def _wake_up(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


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
        max_connections: int = 1024,
        idle_s: float = 4.0,
        connect_timeout_s: float = 5.0,
    ) -> None:
        self._host = host
        self._port = port
        self._tls = tls
        self._max = max_connections
        self._idle_s = idle_s
        self._connect_timeout_s = connect_timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._idle: deque[UpstreamConnection] = deque()
        self._open: set[UpstreamConnection] = set()
        self._connecting = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._reaping: asyncio.TimerHandle | None = None
        self._emptied: asyncio.Future[None] | None = None
        self._closed = False

    @property
    def open_connections(self) -> int:
        return len(self._open)

    @property
    def idle_connections(self) -> int:
        return len(self._idle)

    async def exchange(
        self, head: bytes, body: bytes, sink: Sink, *, repeatable: bool = True, sent: Callable[[], None] | None = None
    ) -> None:
        """Run one request. Raises `UpstreamUnreachable` or `UpstreamBroken`.

        A request that met a kept connection just as the worker closed it is sent once more, on a new connection: if
        nothing of it had left, or if it is `repeatable` and nothing of an answer had come.
        """
        connection = self._take_idle() or await self._new()
        try:
            await connection.exchange(head, body, sink, sent)
        except UpstreamBroken as broken:
            if not (broken.unsent or (broken.stale and repeatable)):
                raise
        else:
            return
        finally:
            self._release(connection)
        connection = await self._new()
        try:
            await connection.exchange(head, body, sink, sent)
        finally:
            self._release(connection)

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
            self._emptied = self.loop.create_future()
            for connection in list(self._open):
                connection.transport.abort()
            await self._emptied

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

    async def _new(self) -> UpstreamConnection:
        while len(self._open) + self._connecting >= self._max:
            waiter = self.loop.create_future()
            self._waiting.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    self._let_next_in()  # this one's turn came and is not used
                raise
            connection = self._take_idle()
            if connection is not None:
                return connection
        self._check_open()
        self._connecting += 1
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                made = await connected(self.loop, lambda: UpstreamConnection(self), self._host, self._port, self._tls)
        except TimeoutError:
            raise UpstreamUnreachable(f"no connection within {self._connect_timeout_s:g} s") from None
        except OSError as error:
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

    def _check_open(self) -> None:
        if self._closed:
            raise UpstreamUnreachable("its connections are closed here")

    def _release(self, connection: UpstreamConnection) -> None:
        if not connection.reusable or self._closed:
            connection.transport.close()
            return
        connection.idle_since_s = self.loop.time()
        self._idle.append(connection)
        if self._waiting:
            self._let_next_in()
        if self._reaping is None:
            self._reaping = self.loop.call_later(self._idle_s, self._reap)

    def _let_next_in(self) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def _reap(self) -> None:
        self._reaping = None
        oldest_s = self.loop.time() - self._idle_s
        while self._idle and self._idle[0].idle_since_s <= oldest_s:
            self._idle.popleft().transport.close()
        if self._idle:
            self._reaping = self.loop.call_later(self._idle[0].idle_since_s - oldest_s, self._reap)
