"""Answers into bytes: one object for each request, so that nothing said late can reach the next answer."""

import asyncio
import socket
import struct
from collections.abc import Callable, Coroutine, Sequence
from http import HTTPStatus
from typing import Any, Final, Protocol

import msgspec

from kvherd.core.errors import WorkerFailed
from kvherd.core.ids import RequestId, WorkerId
from kvherd.services.gateway.relay.incoming import Incoming
from kvherd.wire.http_chunks import content
from kvherd.wire.http_heads import Block, Header, KnownHeaders
from kvherd.wire.openai.errors import error_body, error_object


class Outlet(Protocol):
    """The connection as an answer sees it."""

    transport: asyncio.Transport

    def send(self, data: bytes) -> None:
        """In order, and soon."""
        ...

    def release(self) -> None:
        """Write what was sent and waits."""
        ...

    async def drain(self) -> None: ...

    def when_drained(self, then: Callable[[], None]) -> None: ...

    def landed(
        self, responder: "ConnectionResponder", outcome: Exception | Coroutine[Any, Any, None] | None
    ) -> None: ...


_STATUS_LINES: Final = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
_OF_THE_CONNECTION: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"upgrade", b"transfer-encoding"}
)
_NOTABLE: Final = _OF_THE_CONNECTION | {b"content-length", b"content-type", b"x-request-id"}
_NEEDS_THE_WHOLE: Final = frozenset({b"connection", b"content-length", b"x-request-id"})
_USUAL_TOKENS: Final = frozenset({b"keep-alive", b"close", b"upgrade"})
_FRAMING: Final = frozenset({b"content-length", b"content-type", b"transfer-encoding"})
_BODYLESS: Final = frozenset({204, 304})
_MOST_PADDING: Final = 8  # some clients read at most so many digits of a chunk's size, and sixteen are enough for all
_MOST_SAID: Final = 1024
_MOST_SAID_BYTES: Final = 256
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_WITHOUT_LENGTH: Final = -1


class HeaderUnsafe(ValueError):
    """A header of an answer held a line break or had no valid form; sending it would let it forge others."""


class _Noted:
    """What is written for a block of headers. Not `plain`: nothing can be said without the whole message."""

    __slots__ = ("_begin", "_lines", "_more", "_status", "head", "plain", "sse")

    def __init__(self, block: Block) -> None:
        self.plain = {name for name, _ in block.headers}.isdisjoint(_NEEDS_THE_WHOLE)
        self.sse = (block.first(b"content-type") or b"").startswith(b"text/event-stream")
        self._lines = block.lines(_OF_THE_CONNECTION)
        self._status = 0
        self._more: tuple[Header, ...] = ()
        self._begin = self.head = b""
        """The beginning of an answer with these headers, the status and the other headers asked for last."""

    def knows(self, status: int, more: tuple[Header, ...]) -> bool:
        """Whether `head` begins an answer of this status with `more` headers, which are the same again and again.
        Raises `HeaderUnsafe`.
        """
        if status == self._status:
            if more is self._more:
                return True
        else:
            begin = (_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status) + self._lines
            _check_lines(begin, self._lines.count(b"\n") + 1)
            self._status, self._begin = status, begin
            self._more, self.head = (), begin
        lines = _said.get(more) or _say(more)
        if not lines and more:
            return False
        self._more, self.head = more, self._begin + lines
        return True


_said: Final[dict[tuple[Header, ...], bytes]] = {}
"""Headers that the gateway added lately, as they are sent: of most answers the same few."""


def _say(more: tuple[Header, ...]) -> bytes:
    """Nothing if they cannot be written behind others as they are. Raises `HeaderUnsafe`."""
    parts: list[bytes] = []
    for name, value in more:
        if name in _NOTABLE:
            return b""
        parts += (name, b": ", value, b"\r\n")
    lines = b"".join(parts)
    _check_lines(lines, len(more))
    if len(lines) <= _MOST_SAID_BYTES:
        if len(_said) >= _MOST_SAID:
            _said.clear()
        _said[more] = lines
    return lines


class ConnectionResponder:
    """`ports.worker.Responder` for one request of one connection.

    After `start`, `keep_alive` says whether the connection may serve another request once this answer has ended.
    """

    __slots__ = (
        "_chunked",
        "_ended",
        "_held_head",
        "_incoming",
        "_left",
        "_outlet",
        "_padding",
        "_silent",
        "_sse",
        "_tail",
        "keep_alive",
        "started",
    )

    def __init__(self, outlet: Outlet, incoming: Incoming) -> None:
        self._outlet = outlet
        self._incoming = incoming
        self.keep_alive = incoming.keep_alive
        self.started = False
        self._ended = False
        self._chunked = False
        self._silent = False
        self._sse = False
        self._padding = 0
        self._left = _WITHOUT_LENGTH
        self._tail = self._held_head = b""

    @property
    def request(self) -> RequestId:
        return self._incoming.request.request

    @property
    def request_bytes(self) -> int:
        """Of the request's body."""
        return len(self._incoming.request.body)

    @property
    def ended(self) -> bool:
        return self._ended

    def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        if self.started:
            raise RuntimeError("an answer starts once")
        if self._ended:
            self.started = True
            return
        head = self._known_head(status, headers) if type(headers) is KnownHeaders else self._head(status, headers)
        self.started = True
        if self._left > 0 and not self._silent:
            self._held_head = head  # a body follows for certain: one write for both saves a system call
        else:
            self._outlet.send(head)

    def write(self, data: bytes) -> None:
        if self._ended or self._silent or not data:
            return
        if self._chunked:
            self._tail = data
            self._padding = 0
            self._outlet.send(b"%x\r\n%b\r\n" % (len(data), data))
            return
        if self._left != _WITHOUT_LENGTH:
            if len(data) > self._left:  # more than was declared would be read as the next answer
                data = data[: self._left]
                self.keep_alive = False
            self._left -= len(data)
            if self._held_head:
                data = self._held_head + data
                self._held_head = b""
        self._outlet.send(data)

    def write_chunk(self, chunk: bytes) -> None:
        if self._chunked and not self._ended:
            self._tail = b""  # it ends an event
            self._padding = 0
            self._outlet.send(chunk)
        else:
            self.write(content(chunk))

    def end(self) -> None:
        if self._ended:
            return
        if not self._silent and self._left > 0:
            self._cut()
            return
        self._ended = True
        if self._chunked:
            self._outlet.send(b"0\r\n\r\n")

    def fail(self, reason: str) -> None:
        self.fail_with(WorkerFailed(WorkerId("the worker"), reason), message=reason)

    def fail_with(self, error: BaseException, *, message: str | None = None) -> None:
        """`fail` with an error's own type and code in the event."""
        if self._ended:
            return
        if not (self._sse and self._chunked):
            self._cut()
            return
        told = error_object(error)
        if message is not None:
            told["message"] = message
        apart = b"" if self._tail.endswith(b"\n\n") or not self._tail else b"\n\n"
        self.write(apart + b"data: " + msgspec.json.encode({"error": told}) + b"\n\n")
        self.end()

    def refuse(self, error: BaseException) -> None:
        """Answer with an error, in place of everything else. Only before `start`."""
        status, body = error_body(error)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        if status == HTTPStatus.UNAUTHORIZED:
            headers.append((b"www-authenticate", b"Bearer"))
        elif status in (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS):
            headers.append((b"retry-after", b"%d" % retry_after_s(error)))
        self.start(status, headers)
        self.write(body)
        self.end()

    def _head(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
        self._chunked = self._sse = False  # an earlier try may have failed
        self._left = _WITHOUT_LENGTH
        request, http10 = self._incoming.request, self._incoming.http10
        parts = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status]
        lines = 2  # the status line and the empty one
        has_id = False
        for name, value in headers:
            lower = name.lower()
            if lower in _NOTABLE:
                if lower in _OF_THE_CONNECTION:
                    if lower == b"connection" and value.lower() not in _USUAL_TOKENS:
                        return self._head(status, _without_nominated(headers))
                    continue
                has_id = has_id or lower == b"x-request-id"
                self._note(lower, value)
            parts += (name, b": ", value, b"\r\n")
            lines += 1
        if not has_id:
            parts += (b"x-request-id: ", self._incoming.name, b"\r\n")
            lines += 1
        self._silent = request.method == "HEAD" or status in _BODYLESS
        if self._left == _WITHOUT_LENGTH and not self._silent:
            lines += self._delimit(parts, http10=http10)
        if not self.keep_alive or http10:
            parts.append(b"connection: keep-alive\r\n\r\n" if self.keep_alive else b"connection: close\r\n\r\n")
            lines += 1
        else:
            parts.append(b"\r\n")
        head = b"".join(parts)
        _check_lines(head, lines)
        return head

    def _known_head(self, status: int, headers: KnownHeaders) -> bytes:
        """`_head`, for headers that have been looked at before."""
        noted = headers.block.noted
        if type(noted) is not _Noted:
            noted = headers.block.noted = _Noted(headers.block)
        incoming, length = self._incoming, headers.length
        usual = noted.plain and self.keep_alive and not incoming.http10 and status not in _BODYLESS
        if not usual or length < 0 or headers.written is not None or incoming.request.method == "HEAD":
            return self._head(status, headers)
        if not noted.knows(status, headers.more):
            return self._head(status, headers)
        self._chunked = self._silent = False
        self._sse = noted.sse
        self._left = length
        return b"%bcontent-length: %d\r\nx-request-id: %b\r\n\r\n" % (noted.head, length, incoming.name)

    def _note(self, name: bytes, value: bytes) -> None:
        if name == b"content-length":
            self._left = int(value)
        elif name == b"content-type":
            self._sse = value.startswith(b"text/event-stream")

    def _delimit(self, parts: list[bytes], *, http10: bool) -> int:
        """How the end of the body will be known; the number of lines it took to say so."""
        if http10:
            self.keep_alive = False
            return 0
        self._chunked = True
        parts.append(b"transfer-encoding: chunked\r\n")
        return 1

    def abandon(self) -> None:
        """The client is gone: from now on every call does nothing."""
        self._ended = True
        self.keep_alive = False

    def sound(self) -> None:
        """Write what means nothing, to a client of which it is unknown whether it is still there: if it is not, its
        machine answers with a reset. An interim response before the answer, within it a zero before the next chunk's
        size; nothing where neither is possible.
        """
        if self._ended or self._incoming.http10:
            return
        if not self.started or self._held_head:
            self._outlet.send(CONTINUE)
        elif self._chunked and self._padding < _MOST_PADDING:
            self._padding += 1
            self._outlet.send(b"0")

    async def drain(self) -> None:
        if not self._ended:
            await self._outlet.drain()

    def when_drained(self, then: Callable[[], None]) -> None:
        if self._ended:
            then()
        else:
            self._outlet.when_drained(then)

    def landed(self, outcome: Exception | Coroutine[Any, Any, None] | None) -> None:
        """`ports.worker.Landed` of this request and no other."""
        self._outlet.landed(self, outcome)

    def _cut(self) -> None:
        """Close without an end, so that no client takes the part for the whole."""
        self._ended = True
        self.keep_alive = False
        self._outlet.release()
        transport = self._outlet.transport
        if self._held_head:
            transport.write(self._held_head)
        if self._chunked or self._left > 0 or self._silent:
            transport.close()
        else:  # the end of such an answer is the end of the connection: only a reset differs from it
            connection = transport.get_extra_info("socket")
            if connection is not None:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            transport.abort()


def _check_lines(head: bytes, lines: int) -> None:
    if head.count(b"\n") != lines or head.count(b"\r") != lines:
        raise HeaderUnsafe("a header of the answer holds a line break")


def _without_nominated(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers but those that a Connection header takes for one hop; what frames the body is not its to take."""
    told = b",".join(value for name, value in headers if name.lower() == b"connection")
    nominated = {token.strip().lower() for token in told.split(b",")} - _FRAMING | {b"connection"}
    return [header for header in headers if header[0].lower() not in nominated]


def retry_after_s(error: BaseException) -> int:
    told = getattr(error, "retry_after_s", 1)
    return told if isinstance(told, int) else 1
