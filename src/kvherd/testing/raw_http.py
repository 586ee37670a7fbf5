"""HTTP/1.1 by hand over real sockets: a client that reads answers, and a server that does what a test says."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

DEADLINE_S = 10.0


@dataclass(frozen=True)
class RawAnswer:
    """`pieces` are the chunks as they were framed; `whole` is false if the connection ended before the answer did."""

    status: int
    headers: dict[str, str]
    body: bytes
    pieces: tuple[bytes, ...] = ()
    whole: bool = True


class RawClient:
    """One connection to a server on loopback. Every read has a deadline.

    `kernel_bytes` is what the system may receive for it before anybody reads; by itself it takes megabytes. So does
    the other side's system for what it sends, ten segments and more: on loopback one has 64 KB, on a network 1460.
    """

    def __init__(
        self,
        port: int,
        *,
        read_limit_bytes: int = 2**16,
        kernel_bytes: int | None = None,
        segment_bytes: int | None = None,
    ) -> None:
        self._port = port
        self._limit = read_limit_bytes
        self._kernel_bytes = kernel_bytes
        self._segment_bytes = segment_bytes

    async def __aenter__(self) -> Self:
        own = socket.socket()
        own.setblocking(False)
        if self._kernel_bytes is not None:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._kernel_bytes)
        if self._segment_bytes is not None:
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, self._segment_bytes)
        try:
            await asyncio.get_running_loop().sock_connect(own, ("127.0.0.1", self._port))
            self.reader, self.writer = await asyncio.open_connection(sock=own, limit=self._limit)
        except BaseException:
            own.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.writer.transport.abort()
        await asyncio.sleep(0)

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def ask(self, data: bytes) -> RawAnswer:
        self.send(data)
        return await self.answer()

    async def answer_to(self, data: bytes, *, within_s: float) -> RawAnswer:
        self.send(data)
        return await self.answer(within_s=within_s)

    async def answer(self, *, to_head: bool = False, within_s: float = DEADLINE_S) -> RawAnswer:
        async with asyncio.timeout(within_s):
            return await self._answer(to_head=to_head)

    async def ended(self) -> bytes:
        """What still came until the server closed."""
        async with asyncio.timeout(DEADLINE_S):
            try:
                return await self.reader.read(-1)
            except ConnectionResetError:
                return b""

    async def _answer(self, *, to_head: bool) -> RawAnswer:
        head = await self.reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")[:-2]
        status = int(first.split(" ")[1])
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        if to_head or status in {100, 204, 304}:
            return RawAnswer(status, headers, b"")
        if headers.get("transfer-encoding") == "chunked":
            return await self._chunks(status, headers)
        try:
            if "content-length" in headers:
                return RawAnswer(status, headers, await self.reader.readexactly(int(headers["content-length"])))
            return RawAnswer(status, headers, await self.reader.read(-1))
        except asyncio.IncompleteReadError as error:
            return RawAnswer(status, headers, error.partial, whole=False)
        except ConnectionResetError:
            return RawAnswer(status, headers, b"", whole=False)

    async def _chunks(self, status: int, headers: dict[str, str]) -> RawAnswer:
        pieces: list[bytes] = []
        try:
            while size := int(await self.reader.readuntil(b"\r\n"), 16):
                pieces.append((await self.reader.readexactly(size + 2))[:-2])
            await self.reader.readexactly(2)
        except (asyncio.IncompleteReadError, ConnectionResetError):
            return RawAnswer(status, headers, b"".join(pieces), tuple(pieces), whole=False)
        return RawAnswer(status, headers, b"".join(pieces), tuple(pieces))


@dataclass(frozen=True)
class RawRequest:
    """`connection` counts the connections of its server from 1."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes
    connection: int

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)


Script = Callable[[RawRequest, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class RawServer:
    """Reads requests with a content-length and lets the script answer each. A script that closes its writer ends the
    connection. `left` counts connections that the other side ended. `kernel_bytes`
    is what the system may keep of what it sends, beside what the other side's has.
    """

    script: Script
    requests: list[RawRequest] = field(default_factory=list)
    connections: int = 0
    left: int = 0
    port: int = 0
    kernel_bytes: int | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        listening = self._server.sockets[0]
        self.port = listening.getsockname()[1]
        if self.kernel_bytes is not None:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self.kernel_bytes)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        mine = self.connections
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while not writer.is_closing():
                request = await self._read(reader, mine)
                self.requests.append(request)
                await self.script(request, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.left += 1
        except (
            asyncio.CancelledError
        ):  # only ever by __aexit__; the streams of 3.11 log a cancelled callback as an error
            return
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _read(self, reader: asyncio.StreamReader, connection: int) -> RawRequest:
        head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")[:-2]
        method, target, _ = first.split(" ")
        headers = [(name.lower(), value) for name, value in (line.split(": ", 1) for line in lines)]
        size_bytes = next((int(value) for name, value in headers if name == "content-length"), 0)
        return RawRequest(method, target, headers, await reader.readexactly(size_bytes), connection)


def json_answer(body: bytes, status: str = "200 OK", extra: bytes = b"") -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-type: application/json\r\n%bcontent-length: %d\r\n\r\n%b" % (
        status.encode(),
        extra,
        len(body),
        body,
    )


SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def until(condition: Callable[[], bool], what: str, within_s: float = DEADLINE_S) -> None:
    """Wait until it holds; fail by name if it does not in time."""
    try:
        async with asyncio.timeout(within_s):
            while not condition():  # noqa: ASYNC110 - what is waited for may be the kernel's or another process's
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"in {within_s:g} s it never came true that {what}") from None
