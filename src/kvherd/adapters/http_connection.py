"""One HTTP/1.1 connection to a worker, on a bare protocol: what a relay needs of a client and no more.

An answer's bytes go to a `Sink` from inside the read callback: no queue, no task and no wake-up for each piece. So
that a sink which cannot keep up bounds what is read, after every `_SETTLE_BYTES` it is asked whether more may come.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol, cast

import httptools

from kvherd.adapters.tls import why_untrusted
from kvherd.ports.loop_turn import LoopTurn, TurnwiseConnection
from kvherd.wire.http_chunks import EVENTS_END, STARTS
from kvherd.wire.http_heads import Block, Header, KnownHead, KnownHeaders

_SETTLE_BYTES: Final = 64 * 1024
_HEAD_BYTES: Final = 64 * 1024
_JOIN_BYTES: Final = 16 * 1024
_BODYLESS: Final = frozenset({204, 304})
_OURS: Final = b"x-kvherd-"


class Sink(Protocol):
    """Where an answer goes. `head` is called once, then `body` or `events` for each piece; all are cheap."""

    def head(self, status: int, headers: Sequence[Header]) -> None: ...

    def body(self, data: bytes) -> None: ...

    def events(self, chunk: bytes) -> None:
        """`body` of whole events, in the chunk they came in: `wire.http_chunks.content` is what it holds."""
        ...

    def when_settled(self, then: Callable[[], None]) -> None:
        """Call `then` when more may come, before returning if that is now."""
        ...


Over = Callable[[Exception | None], None]


class UpstreamUnreachable(Exception):
    """No connection could be made."""


class NoDescriptor(UpstreamUnreachable):
    """This process may open no more files, which says nothing about the worker."""


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


@dataclass(frozen=True, slots=True)
class _Usual:
    """An answer's head that may come again."""

    head: KnownHead
    status: int
    block: Block


class Owner(Protocol):
    """Who keeps connections between exchanges."""

    def free(self, connection: "UpstreamConnection") -> None:
        """An exchange has ended."""
        ...

    def forget(self, connection: "UpstreamConnection") -> None:
        """The connection is gone."""
        ...


class UpstreamConnection(TurnwiseConnection):
    """One connection, one exchange at a time; `reusable` says whether another may follow."""

    __deletable__ = ("_parser",)
    __slots__ = (
        "_begun",
        "_between",
        "_framed",
        "_head_fed",
        "_headers",
        "_in_body",
        "_interim",
        "_misses",
        "_outcome",
        "_over",
        "_owner",
        "_parser",
        "_paused",
        "_pieces",
        "_sink",
        "_unsettled",
        "_used",
        "_usual",
        "_waits",
        "idle_since",
        "lost",
        "reusable",
    )

    def __init__(self, owner: "Owner", turn: LoopTurn) -> None:
        super().__init__(turn)
        self._owner = owner
        self._parser = httptools.HttpResponseParser(self)
        self._sink: Sink | None = None
        self._over: Over | None = None
        self._outcome: bool | Exception = False
        self._headers: list[tuple[bytes, bytes]] = []
        self._begun = self._between = self._used = self._in_body = self._framed = self._interim = False
        self._waits = self._paused = False
        self._unsettled = self._head_fed = self._misses = 0
        self._pieces: list[bytes] = []
        self._usual: _Usual | None = None
        self.lost = False
        self.reusable = True
        self.idle_since = 0

    def begin(self, head: bytes, body: bytes, sink: Sink, over: Over) -> bool:
        """Send one request and give its answer to the sink. `over` is called once, later, with None or with what went
        wrong: `UpstreamBroken`, or what the sink raised. False: the connection is closed and nothing was sent.
        """
        transport = self.transport
        if self.lost or transport.is_closing() or self._unread:
            self.reusable = False
            return False
        self._sink = sink
        self._over = over
        self._outcome = self._begun = self._between = self._in_body = False
        self._unsettled = self._head_fed = 0
        if len(body) <= _JOIN_BYTES:
            self.send(head + body)
        else:
            transport.writelines((head, body))
        return True

    def cancel(self) -> None:
        """End the connection, which is how an engine learns that nobody waits any more; `over` is not called."""
        self._sink = None
        self._over = None
        self.reusable = False
        self._unread = self._unsent = b""
        self.transport.abort()

    def _end(self) -> None:
        """Tell what became of the exchange. The last step of whatever ends one: another may begin within it."""
        outcome, over = self._outcome, self._over
        error = None if outcome is True or outcome is False else outcome
        self._sink = None
        self._over = None
        self._used = True
        if error is not None:
            self.transport.abort()
        elif self._waits:
            self._settled()
        self._owner.free(self)
        if over is not None:
            over(error)

    # --- called by the event loop ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is none by class

    def take(self, data: bytes) -> None:
        if self._sink is None:  # an answer that nobody asked for must not become the next request's
            self.reusable = False
            self.transport.abort()
            return
        if self._in_body:
            if self._between and self._pass_on(data):
                return
            self._parse(data)
            if self._unsettled > _SETTLE_BYTES:
                self._stop_reading()
        elif self._begun or self._usual is None or not self._recall(data, self._usual):
            self._read_head(data)
        if self._outcome is not False:
            self._end()

    def _read_head(self, data: bytes) -> None:
        """With as much of the body as came with it."""
        whole = not self._begun
        self._begun = True
        self._head_fed += len(data)
        self._parse(data)
        if whole and self._outcome is True:
            self._remember(data)
        if self._in_body:
            if self._unsettled > _SETTLE_BYTES:
                self._stop_reading()
        elif self._head_fed > _HEAD_BYTES and self._outcome is False:
            self._finish(UpstreamBroken(f"the headers of its answer are larger than {_HEAD_BYTES} bytes"))

    def _parse(self, data: bytes) -> None:
        """Give the sink what comes of the body: several chunks that came together leave together."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self._finish(error.__context__ if isinstance(error.__context__, Exception) else error)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._finish(UpstreamBroken(f"its answer is not HTTP/1.1: {error}"))
        if not data.endswith(b"\n"):
            self._between = False  # the next chunk's first line may have begun
        pieces = self._pieces
        if not pieces:
            return
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self._unsettled += len(body)
        try:
            if self._sink is not None:
                self._sink.body(body)
        except Exception as error:  # noqa: BLE001 - whatever a sink raises is for who waits, as when llhttp calls it
            self.reusable = False
            self._outcome = error

    def _pass_on(self, data: bytes) -> bool:
        """Whether the piece is a chunk of whole events; then the sink has it, and llhttp never sees it."""
        size = len(data)
        if size >= len(STARTS) or not data.startswith(STARTS[size]) or not data.endswith(EVENTS_END):
            return False
        self._unsettled += size
        try:
            if self._sink is not None:
                self._sink.events(data)
        except Exception as error:  # noqa: BLE001 - whatever a sink raises is for who waits, as when llhttp calls it
            self._finish(error)
            self._end()
            return True
        if self._unsettled > _SETTLE_BYTES:
            self._stop_reading()
        return True

    def _stop_reading(self) -> None:
        """Until the sink can take more, which may be now."""
        if self._waits or self._outcome is not False or self._sink is None:
            return
        self._waits = True
        self._sink.when_settled(partial(self._settle, self._sink))
        if self._waits:
            self._paused = True
            self.transport.pause_reading()

    def _settle(self, sink: Sink) -> None:
        if sink is self._sink:
            self._settled()

    def _settled(self) -> None:
        self._waits = False
        self._unsettled = 0
        if self._paused:
            self._paused = False
            if not self.lost and not self.transport.is_closing():
                self.transport.resume_reading()

    def _recall(self, data: bytes, usual: "_Usual") -> bool:
        """Whether the piece is a whole answer with the head of an earlier one; then it is passed on."""
        begin, sink = usual.head.body(data), self._sink
        if begin < 0 or sink is None:
            return False
        length = len(data) - begin
        self._begun = True
        self._misses = 0
        if self.transport.get_write_buffer_size():
            self.reusable = False
        try:
            sink.head(usual.status, KnownHeaders(usual.block, (), None, length))
            if length:
                sink.body(data[begin:])
            self._outcome = True
        except Exception as error:  # noqa: BLE001 - whatever a sink raises is for who waits, as when llhttp calls it
            self._finish(error)
        return True

    def _remember(self, data: bytes) -> None:
        """Keep the head of an answer that was a piece by itself and leaves the connection as it was."""
        self._misses += 1
        if self._misses & (self._misses - 1):  # heads that are never the same are looked at ever more rarely
            return
        self._usual = None
        status = self._parser.get_status_code()
        # With another status the piece would begin with an interim answer.
        if not self.reusable or status in _BODYLESS or not data.startswith(b"HTTP/1.1 %d" % status):
            return
        head = KnownHead.of(data)
        if head is not None:
            block = Block(header for header in self._headers if header[0] != b"content-length")
            self._usual = _Usual(head, status, block)

    def pause_writing(self) -> None:
        """A request is written at once: it is in memory anyway."""

    def resume_writing(self) -> None:
        pass

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        self.handle()  # an answer may have come in the same turn, before its end
        self.lost = True
        if self._sink is not None:
            if self._in_body and not self._framed and exc is None:
                self._finish(True)
            else:
                when = "in the middle of its answer" if self._begun else "before it answered"
                why = f" ({why_untrusted(exc) if isinstance(exc, OSError) else exc})" if exc is not None else ""
                stale, unsent = self._used and not self._begun, bool(self._unsent)
                self._finish(UpstreamBroken(f"it closed the connection {when}{why}", stale=stale, unsent=unsent))
            self._end()
        self._owner.forget(self)
        del self._parser  # it refers back to this object

    # --- called by llhttp -----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._outcome is not False:
            raise UpstreamBroken("it sent more than was asked for")
        self._headers = []
        self._framed = self._interim = self._between = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_body:  # a trailer
            return
        name = name.lower()
        if name == b"content-length":
            self._framed = True
        elif name == b"transfer-encoding":
            if value.lower() != b"chunked" or self._framed:
                raise UpstreamBroken(f"its answer has an unknown transfer-encoding {value.decode('latin-1')!r}")
            self._framed = self._between = True
        elif name.startswith(_OURS):  # said of itself by whoever answers: not about the way that this answer took
            return
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if not 100 <= status < 600:
            raise UpstreamBroken(f"its answer has the status {status}, which is none")
        if status < 200:
            if status == 101:
                raise UpstreamBroken("it switched protocols unasked")
            self._interim = True
            return
        self._in_body = True
        self._framed = self._framed or status in _BODYLESS
        if self._sink is not None:
            self._sink.head(status, self._headers)

    def on_chunk_header(self) -> None:
        self._between = False

    def on_chunk_complete(self) -> None:
        self._between = True

    def on_body(self, data: bytes) -> None:
        self._pieces.append(data)

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
