"""Requests out of bytes, strictly and within bounds; no sockets here.

llhttp (through httptools, no leniency) reads the grammar: bare line feeds, obsolete folding, two lengths, a length
beside an encoding, spaces before colons are errors there. What it leaves open is closed here: no coding but chunked,
no protocol but HTTP (it reads RTSP, too), no version but 1.0 and 1.1, exactly one Host in 1.1, bounds on head, body and
what surrounds chunks. After any error nothing more is read: who lost his place must not guess where the next begins.
"""

from collections import deque
from typing import Final

import httptools

from kvherd.core.errors import BodyTooLarge, FrameInvalid, HeadTooLarge, KvherdError, Unsupported
from kvherd.core.ids import RequestId
from kvherd.services.gateway.relay.edge import DataRequest, Judge, RelayLimits, is_data
from kvherd.services.gateway.relay.first_line import HOST, METHODS, end_of_target, path_of, rare_method
from kvherd.services.gateway.relay.identity import REQUEST_ID, forwarded, identified_anew, identify
from kvherd.services.gateway.relay.incoming import Incoming, Refusal, Stage, Usual
from kvherd.wire.http_heads import Block, KnownHead, KnownHeaders

_IDLE: Final = Stage.IDLE
_HEAD: Final = Stage.HEAD
_BODY: Final = Stage.BODY


class _Refused(Exception):
    def __init__(self, error: KvherdError) -> None:
        self.error = error


_OF_THE_CONNECTION: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"upgrade", b"transfer-encoding", b"expect"}
)
_DISGUISED: Final = frozenset({b"content_length", b"transfer_encoding"})
"""Some servers read an underscore as a hyphen; what could frame a body there is not sent on."""
_KEPT = (b"host", b"content-length", b"authorization", b"x-request-id", b"traceparent")
_NOTABLE: Final = _OF_THE_CONNECTION | _DISGUISED | {*_KEPT}
_USUAL_TOKENS: Final = frozenset({b"keep-alive", b"close", b"upgrade"})
_BYTES_AROUND_A_CHUNK: Final = 8
_SMALL_BYTES: Final = 16 * 1024
"""A body of this size is read whoever sends it: who is refused then may go on with the same connection."""


class RequestParser:
    """Feed it bytes; take requests from `ready`, in order.

    `ended` says that nothing more will be read: after a refusal, or after the last request of the connection.
    `wants_continue` is true while a client waits for `100 Continue` before it sends the body.
    """

    __deletable__ = ("_parser",)
    __slots__ = (
        "_body",
        "_body_bytes",
        "_body_fed",
        "_body_follows_upgrade",
        "_chunked",
        "_connection",
        "_content_length",
        "_expect",
        "_fed",
        "_forwarded",
        "_has_key",
        "_has_request_id",
        "_has_traceparent",
        "_head_fed",
        "_headers",
        "_hosts",
        "_http10",
        "_judge",
        "_limits",
        "_line_end",
        "_misses",
        "_parser",
        "_peer",
        "_piece_is_shared",
        "_raw",
        "_told",
        "_upgrade",
        "_url",
        "_usual",
        "ended",
        "ready",
        "stage",
        "wants_continue",
    )

    def __init__(self, limits: RelayLimits, peer: str, *, secured: bool = False, judge: Judge | None = None) -> None:
        self._limits = limits
        self._judge = judge
        self._peer = peer
        self._forwarded = forwarded(peer, secured=secured)
        self._parser = httptools.HttpRequestParser(self)
        self.ready: deque[Incoming | Refusal] = deque()
        self.ended = False
        self.stage = _IDLE
        self.wants_continue = False
        self._fed = self._head_fed = self._line_end = self._misses = self._told = 0
        self._piece_is_shared = False
        self._usual: Usual | None = None
        self._raw = self._url = b""
        self._body: list[bytes] = []
        self.on_message_begin()
        self.stage = _IDLE

    @property
    def reading_bytes(self) -> int:
        """Of the body that is not complete yet."""
        return self._body_bytes if self.stage is _BODY else 0

    @property
    def ready_bytes(self) -> int:
        """Of the bodies that nobody has taken yet."""
        return sum(len(item.request.body) for item in self.ready if isinstance(item, Incoming))

    def feed(self, data: bytes) -> None:
        if self.ended:
            return
        begins = self.stage is _IDLE
        if begins and self._usual is not None and self._recall(data, self._usual):
            return
        self._fed = len(data)
        if self.stage is not _BODY:
            self._head_fed += self._fed
        elif self._chunked:
            self._body_fed += self._fed
        self._raw += data  # from a head's begin, or before it
        self._parse(data)
        self._raw = self._raw[self._line_end :] if self.stage is _HEAD else b""
        self._line_end = 0
        if self._piece_is_shared:
            if begins and self.stage is _IDLE:
                self._remember(data)
            self._piece_is_shared = False
            self._head_fed = 0 if self.stage is _IDLE else self._head_size()
        if self.stage is not _IDLE:
            self._check_growth()

    def _parse(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._go_on_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserCallbackError as error:
            if not isinstance(error.__context__, _Refused):
                raise
            self.refuse(error.__context__.error)
        except httptools.HttpParserError as error:
            self.refuse(FrameInvalid("HTTP/1.1", str(error)))

    def _recall(self, data: bytes, usual: Usual) -> bool:
        """Whether the piece is one whole request with the head of an earlier one; then it is `ready`."""
        begin = usual.head.body(data)
        length = len(data) - begin
        if begin < 0 or length > self._limits.body_bytes:
            return False
        name, written = identified_anew(traced=usual.has_traceparent)
        headers = KnownHeaders(usual.block, (), written, length)
        identified = RequestId(name.decode())
        request = DataRequest(usual.method, usual.path, usual.query, headers, data[begin:], self._peer, identified)
        self.ready.append(Incoming(request, keep_alive=True, http10=False, is_data=usual.is_data, name=name))
        self._misses = 0
        return True

    def _remember(self, data: bytes) -> None:
        """Keep the head of a request that was a piece by itself, if nothing about it is rare."""
        self._misses += 1
        if self._misses & (self._misses - 1):  # heads that are never the same are looked at ever more rarely
            return
        self._usual = None
        rare = self._chunked or self._upgrade or self._expect or self._connection or self._has_request_id
        if rare or self.ended or self._http10 or len(self.ready) != 1 or data.startswith(b"\r"):
            return
        head, last = KnownHead.of(data), self.ready[0]
        if head is not None and isinstance(last, Incoming):
            request, headers = last.request, self._headers[: self._told]
            block = Block(header for header in (*headers, *self._forwarded) if header[0] != b"content-length")
            method, path, query = request.method, request.path, request.query
            self._usual = Usual(head, method, path, query, block, last.is_data, self._has_traceparent)

    def refuse(self, error: KvherdError) -> None:
        """Put a refusal behind what is ready, and read nothing more. Does nothing if that is so already."""
        if not self.ended:
            self.ended = True
            self.stage = _IDLE
            self.wants_continue = False
            self._body.clear()
            self.ready.append(Refusal(error))

    def finish(self) -> None:
        """The client sends no more; a request of which a part is missing is none."""
        self.ended = True
        self.stage = _IDLE
        self.wants_continue = False

    def close(self) -> None:
        """Read nothing more, ever. Once only; also lets go of the callbacks, which refer back to this object."""
        self.ended = True
        del self._parser

    # --- called by llhttp ---------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self.stage = _HEAD
        self._headers: list[tuple[bytes, bytes]] = []
        self._hosts = 0
        self._connection = self._expect = self._content_length = b""
        self._chunked = self._upgrade = self._body_follows_upgrade = False
        self._has_request_id = self._has_traceparent = self._has_key = False

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if self.stage is _BODY:  # a trailer: what comes after the body may not change what was decided before it
            return
        if name not in _NOTABLE or self._note(name, value):
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        version = self._parser.get_http_version()
        self._http10 = version == "1.0"
        if self._http10:
            if self._chunked:
                raise _Refused(FrameInvalid("HTTP/1.0", "it has no Transfer-Encoding"))
            if self._hosts > 1:
                raise _Refused(FrameInvalid("HTTP/1.0", f"it has {self._hosts} Host headers and may have one"))
        elif version != "1.1":
            raise _Refused(Unsupported(f"HTTP/{version}"))
        elif self._hosts != 1:
            raise _Refused(FrameInvalid("HTTP/1.1", f"it has {self._hosts} Host headers and must have one"))
        self._line_end = end_of_target(self._raw, self._line_end, self._parser.get_method(), self._url)
        if self._line_end < 0:
            raise _Refused(
                FrameInvalid("HTTP/1.1", "its first line is not 'METHOD target HTTP/1.1', with single spaces")
            )
        if b"#" in self._url:
            raise _Refused(FrameInvalid("HTTP/1.1", "its target has a fragment (#), which is for the client alone"))
        self._check_sizes()
        if self._upgrade or self._expect or self._connection:
            self._check_rare()
        self._body_bytes = self._body_fed = 0
        self.stage = _BODY
        if self._judge is not None and (
            self._chunked or self.wants_continue or int(self._content_length or 0) > _SMALL_BYTES
        ):
            self._judge_head(self._judge)

    def on_body(self, body: bytes) -> None:
        self._body.append(body)
        self._body_bytes += len(body)
        if self._chunked and self._body_bytes > self._limits.body_bytes:
            raise _Refused(BodyTooLarge(self._limits.body_bytes))

    def on_message_complete(self) -> None:
        if self._body_follows_upgrade:
            return
        keep_alive = self._parser.should_keep_alive()
        request = self._request()
        data = is_data(request.method, request.path)
        self.ready.append(Incoming(request, keep_alive=keep_alive, http10=self._http10, is_data=data))
        self._url = b""
        self._head_fed = self._fed  # at most: another head may follow in the same piece
        self._piece_is_shared = True
        self.stage = _IDLE
        self.wants_continue = False
        if not keep_alive:
            self.ended = True

    # --- rarer parts ----------------------------------------------------------------------------------------

    def _note(self, name: bytes, value: bytes) -> bool:
        """Remember what matters here; whether the header goes on to the handler."""
        if name == b"host":
            self._hosts += 1
            if not HOST.fullmatch(value):
                raise _Refused(FrameInvalid("HTTP/1.1", "its Host header names no host"))
        elif name == b"content-length":
            self._content_length = value
        elif name == b"x-request-id":
            if self._has_request_id or not REQUEST_ID.fullmatch(value):
                return False
            self._has_request_id = True
        elif name == b"authorization":
            if self._has_key:  # whoever stands in front may have looked at the other one
                raise _Refused(FrameInvalid("HTTP/1.1", "it has two Authorization headers and may have one"))
            self._has_key = True
        elif name == b"traceparent":
            self._has_traceparent = True
        else:
            self._note_of_the_connection(name, value.lower())
            return False
        return True

    def _note_of_the_connection(self, name: bytes, value: bytes) -> None:
        if name == b"connection":
            if value not in _USUAL_TOKENS:
                self._connection += b"," + value
        elif name == b"transfer-encoding":
            if value != b"chunked":
                self._connection += b",close"
                self._expect = b"transfer-encoding: " + value
            self._chunked = True
        elif name == b"upgrade":
            self._upgrade = True
        elif name == b"expect" and not self._expect:
            self._expect = value

    def _check_sizes(self) -> None:
        limits = self._limits
        if len(self._headers) > limits.headers:
            raise _Refused(HeadTooLarge(limits.headers, "headers"))
        if self._head_fed > limits.head_bytes < self._head_size():  # what was fed may hold more than this head
            raise _Refused(HeadTooLarge(limits.head_bytes))
        if self._content_length and int(self._content_length) > limits.body_bytes:
            raise _Refused(BodyTooLarge(limits.body_bytes))

    def _head_size(self) -> int:
        return len(self._url) + sum(len(name) + len(value) + 4 for name, value in self._headers)

    def _check_growth(self) -> None:
        """Refuse what grows without end: a head, or whatever stands around a body's chunks."""
        if self.stage is _HEAD:
            if self._head_fed > self._limits.head_bytes:
                self.refuse(HeadTooLarge(self._limits.head_bytes))
        elif self._chunked:
            around = self._limits.head_bytes + _BYTES_AROUND_A_CHUNK * self._body_bytes
            if self._body_fed > self._body_bytes + around:
                self.refuse(BodyTooLarge(self._limits.body_bytes))

    def _check_rare(self) -> None:
        has_body = self._chunked or self._content_length not in {b"", b"0"}
        if self._expect == b"100-continue":
            self.wants_continue = has_body and not self._http10
        elif self._expect:
            raise _Refused(Unsupported(f"a request with {self._expect.decode('latin-1')!r}"))
        if self._connection:
            nominated = {token.strip() for token in self._connection.split(b",")} - {b"host", b"content-length"}
            self._headers = [header for header in self._headers if header[0] not in nominated]
            self._has_request_id = self._has_request_id and b"x-request-id" not in nominated
            self._has_traceparent = self._has_traceparent and b"traceparent" not in nominated
        self._body_follows_upgrade = self._upgrade and has_body and self._parser.should_upgrade()

    def _go_on_without_upgrade(self, rest: bytes) -> None:
        """Answer as if no upgrade had been asked for (RFC 9110, 7.8); Java's client asks with every first request.

        llhttp takes what follows the headers for another protocol. If it is this request's body, a parser that was
        told its length, and nothing else, reads it; such a request is the connection's last.
        """
        if not self._body_follows_upgrade:
            self.feed(rest)
            return
        self._body_follows_upgrade = False
        framing = b"transfer-encoding: chunked" if self._chunked else b"content-length: " + self._content_length
        method = self._parser.get_method()
        self._parser = httptools.HttpRequestParser(_BodyOnly(self))
        self._parser.feed_data(method + b" / HTTP/1.1\r\nconnection: close\r\n" + framing + b"\r\n\r\n")
        self.feed(rest)

    def _request(self) -> DataRequest:
        headers = self._headers
        method = self._parser.get_method()
        self._told = len(headers)
        identified = identify(headers, named=self._has_request_id, traced=self._has_traceparent)
        headers += self._forwarded
        parts = self._body
        body = b"" if not parts else parts[0] if len(parts) == 1 else b"".join(parts)
        self._body = []
        name, path, query = self._target(method)
        return DataRequest(name, path, query, headers, body, self._peer, identified)

    def _target(self, method: bytes) -> tuple[str, str, str]:
        """Method, path and query."""
        path, _, query = self._url.decode("latin-1").partition("?")
        if not path.startswith("/"):
            path = path_of(path)
        try:
            return METHODS.get(method) or rare_method(method), path, query
        except Unsupported as error:
            raise _Refused(error) from None

    def _judge_head(self, judge: Judge) -> None:
        name, path, query = self._target(self._parser.get_method())
        told = [value for key, value in self._headers if key == b"x-request-id"]
        request = RequestId(told[0].decode("latin-1") if told else "unread")
        try:
            judge(DataRequest(name, path, query, self._headers, b"", self._peer, request))
        except KvherdError as error:
            raise _Refused(error) from None


class _BodyOnly:
    """Hands on a body and its end, and none of the head that stands before it."""

    def __init__(self, parser: RequestParser) -> None:
        self.on_body = parser.on_body
        self.on_message_complete = parser.on_message_complete
