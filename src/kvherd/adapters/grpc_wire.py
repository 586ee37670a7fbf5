"""Calls of one request and a stream of answers over HTTP/2, without grpc: for tokens and KV events, which are many.

grpc.aio costs some 60 µs of CPU a message in Python, whoever reads it: each wakes a task through a thread of its own.
Here each is handed over in the very call of the event loop that brought its bytes.

What is kept of gRPC: its statuses, metadata, flow control both ways, cancellation. A host that vanished is noticed by
the kernel: engines count pings, and hang up on whoever sends a few without a token between them. A receiver that holds
a stream back stops that stream's engine after `WINDOW_BYTES`, and no other stream.
"""

import asyncio
import logging
import socket
from collections.abc import Iterable
from typing import Final, cast

import hpack

from kvherd.adapters.gathered_reads import USUAL, GatheredReads, Gathering
from kvherd.adapters.grpc_stream import WINDOW_BYTES, Receiver, WireStream
from kvherd.adapters.tls import why_untrusted
from kvherd.core.errors import FrameInvalid
from kvherd.wire import http2

log = logging.getLogger(__name__)

MOST_MESSAGE_BYTES: Final = 64 << 20
_CONNECTION_WINDOW_BYTES: Final = 64 << 20
_MOST_HEADER_BYTES: Final = 64 * 1024
_KEEP_ALIVE: Final = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
_UNLIMITED: Final = 2**31


class GrpcWire:
    """One connection. `usable`: a new call may be made on it."""

    def __init__(self, authority: str, *, scheme: str, gathering: Gathering = USUAL) -> None:
        self._authority = authority
        self._gathering = gathering
        self._reads: GatheredReads | None = None
        self._scheme = scheme
        self._streams: dict[int, WireStream] = {}
        self._rest = b""
        self._next = 1
        self._headers = hpack.Decoder(max_header_list_size=_MOST_HEADER_BYTES)
        self._block = bytearray()
        self._block_of = 0
        self._block_ends = False
        self._window = self._first_window = http2.FIRST_WINDOW_BYTES
        self._largest_frame = http2.MOST_FRAME_BYTES
        self._most_streams = _UNLIMITED
        self._unacknowledged = 0
        self._leaving = self._lost = False

    @property
    def usable(self) -> bool:
        return not (self._leaving or self._lost) and len(self._streams) < self._most_streams

    @property
    def over(self) -> bool:
        return self._lost

    # --- calls --------------------------------------------------------------------------------------------------

    def call(self, path: str, data: bytes, receiver: Receiver, metadata: Iterable[tuple[str, str]] = ()) -> WireStream:
        """Send one request; only on a usable connection."""
        number, self._next = self._next, self._next + 2
        self._leaving = self._next > http2.LAST_STREAM
        stream = WireStream(self, number, receiver, http2.message(data), self._first_window)
        self._streams[number] = stream
        block = http2.call_headers(self._authority, path, metadata, scheme=self._scheme)
        self._transport.write(http2.frame(http2.HEADERS, number, block, flags=http2.END_HEADERS))
        self._send(stream)
        return stream

    def acknowledge(self, stream: WireStream) -> None:
        """Let the engine send as much again."""
        if stream.unacknowledged and stream.number in self._streams:
            grown = stream.unacknowledged.to_bytes(4, "big")
            stream.unacknowledged = 0
            self._transport.write(http2.frame(http2.WINDOW_UPDATE, stream.number, grown))

    def forget(self, stream: WireStream) -> None:
        if self._streams.pop(stream.number, None) is not None and not self._lost:
            code = http2.CANCEL.to_bytes(4, "big")
            self._transport.write(http2.frame(http2.RST_STREAM, stream.number, code))
            self._leave_if_empty()

    def leave(self) -> None:
        """Take no new call; close when those under way have ended."""
        self._leaving = True
        self._leave_if_empty()

    def close(self) -> None:
        self._leaving = True
        self._fail_all("UNAVAILABLE", "the connection was closed here")
        if not self._lost:
            self._transport.close()

    # --- the event loop's calls -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._reads = GatheredReads(self._transport, self._gathering)
        grown = _CONNECTION_WINDOW_BYTES - http2.FIRST_WINDOW_BYTES
        told = http2.settings({http2.ENABLE_PUSH: 0, http2.FIRST_WINDOW: WINDOW_BYTES})
        self._transport.write(http2.PREFACE + told + http2.frame(http2.WINDOW_UPDATE, payload=grown.to_bytes(4, "big")))
        connection = transport.get_extra_info("socket")
        if connection is not None:
            keep_alive(connection)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        if self._reads is not None:
            self._reads.stop()
        why = f": {why_untrusted(exc)}" if isinstance(exc, OSError) else ""
        self._fail_all("UNAVAILABLE", f"the connection was lost{why}")

    def data_received(self, data: bytes) -> None:
        if self._rest:
            data = self._rest + data
        at, end = 0, len(data)
        try:
            while end - at >= http2.FRAME_HEAD:
                if not self._block_of:
                    at = self._usual(data, at)
                    if end - at < http2.FRAME_HEAD:
                        break
                stop = at + http2.FRAME_HEAD + (data[at] << 16 | data[at + 1] << 8 | data[at + 2])
                if stop > end:
                    http2.check_size(stop - at)
                    break
                self._frame(data[at : at + http2.FRAME_HEAD], data[at + http2.FRAME_HEAD : stop])
                at = stop
        except (FrameInvalid, hpack.HPACKError) as error:
            self._break_off(str(error))
            return
        self._rest = data[at:] if at else data
        if self._reads is not None:
            self._reads.after(len(self._streams))

    # --- frames -------------------------------------------------------------------------------------------------

    def _usual(self, data: bytes, at: int) -> int:
        """Hand over what comes in frames that are one message, whole; return where the first other frame begins.

        Nothing is copied into a buffer and out of it again.
        """
        streams, taken = self._streams, 0
        last = len(data) - http2.MESSAGE_HEAD
        while at <= last:
            word, flags, number, packed, size = http2.message_head(data, at)
            stream = streams.get(number)
            begin = at + http2.MESSAGE_HEAD
            stop = begin + size
            if flags or packed or word != size + 5 << 8 or stream is None or stream.buffer or stop > len(data):
                break
            at = stop
            stream.unacknowledged += size + 5
            taken += size + 5
            try:
                stream.receiver.message(data[begin:stop])
            except Exception as error:  # noqa: BLE001 - a receiver's defect must not cost the other calls theirs
                self._give_up(stream, error)
            if stream.unacknowledged > WINDOW_BYTES // 2 and not stream.held:
                self.acknowledge(stream)
        self._took(taken)
        return at

    def _frame(self, head: bytes, payload: bytes) -> None:
        kind, flags = head[3], head[4]
        number = int.from_bytes(head[5:], "big") & http2.LAST_STREAM
        if kind == http2.DATA and not self._block_of:
            self._data(number, flags, payload)
        else:
            self._other(kind, flags, number, payload)

    def _took(self, size: int) -> None:
        self._unacknowledged += size
        if self._unacknowledged > _CONNECTION_WINDOW_BYTES // 2:
            grown, self._unacknowledged = self._unacknowledged.to_bytes(4, "big"), 0
            self._transport.write(http2.frame(http2.WINDOW_UPDATE, payload=grown))

    def _data(self, number: int, flags: int, payload: bytes) -> None:
        self._took(len(payload))
        stream = self._streams.get(number)
        if stream is None:
            return  # it was cancelled, and this was on its way
        size = len(payload)
        if flags & http2.PADDED:
            payload = http2.unpadded(payload, flags & http2.PADDED)
        stream.buffer += payload
        try:
            for message in http2.cut_messages(stream.buffer, limit_bytes=MOST_MESSAGE_BYTES):
                stream.receiver.message(message)
        except Exception as error:  # noqa: BLE001 - as above
            self._give_up(stream, error)
            return
        stream.unacknowledged += size
        if stream.unacknowledged > WINDOW_BYTES // 2 and not stream.held:
            self.acknowledge(stream)
        if flags & http2.END_STREAM:
            self._end(number, "UNKNOWN", "its stream ended without a status")

    def _give_up(self, stream: WireStream, error: Exception) -> None:
        words = str(error)
        if not isinstance(error, FrameInvalid):
            log.error("an answer of %s could not be taken", self._authority, exc_info=error)
            words = "its answer could not be taken; the log of this process says why"
        self.forget(stream)
        stream.receiver.ended("INTERNAL", words)

    def _other(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if self._block_of and (kind, number) != (http2.CONTINUATION, self._block_of):
            raise FrameInvalid(http2.PROTOCOL, "headers are interrupted by another frame")
        match kind:
            case http2.HEADERS:
                self._block[:] = http2.unpadded(payload, flags)
                self._block_of, self._block_ends = number, bool(flags & http2.END_STREAM)
                self._headers_of(flags)
            case http2.CONTINUATION if self._block_of:
                self._block += payload
                self._headers_of(flags)
            case http2.RST_STREAM:
                self._end(number, *http2.status_of_reset(http2.number(payload)))
            case http2.SETTINGS:
                self._settle(flags, payload)
            case http2.PING if not flags & http2.ACK:
                self._transport.write(http2.frame(http2.PING, payload=payload, flags=http2.ACK))
            case http2.GOAWAY:
                self._told_to_leave(payload)
            case http2.WINDOW_UPDATE:
                self._may_send(number, http2.number(payload) & http2.LAST_STREAM)
            case http2.CONTINUATION:
                raise FrameInvalid(http2.PROTOCOL, "headers are continued that did not begin")
            case _:
                pass  # what a later version means by it, it must not need us to know

    def _headers_of(self, flags: int) -> None:
        if len(self._block) > _MOST_HEADER_BYTES:
            raise FrameInvalid(http2.PROTOCOL, f"headers of more than {_MOST_HEADER_BYTES} bytes")
        if not flags & http2.END_HEADERS:
            return
        number, self._block_of = self._block_of, 0
        # Of a stream that is forgotten too: the table that follows depends on it.
        headers = dict(self._headers.decode(bytes(self._block), raw=True))
        stream = self._streams.get(number)
        if stream is not None:
            stream.metadata = headers
        if self._block_ends:
            self._end(number, *http2.status_of_headers(headers))
        elif headers.get(b":status", b"200") != b"200" and not headers.get(b":status", b"").startswith(b"1"):
            if stream is not None:
                self.forget(stream)
                stream.receiver.ended(*http2.status_of_headers(headers))
        elif stream is not None and stream.on_headers is not None:
            stream.on_headers()

    def _settle(self, flags: int, payload: bytes) -> None:
        if flags & http2.ACK:
            return
        for name, value in http2.read_settings(payload):
            if name == http2.FIRST_WINDOW:
                for stream in self._streams.values():
                    stream.window += value - self._first_window
                self._first_window = value
            elif name == http2.LARGEST_FRAME:
                self._largest_frame = min(value, 1 << 20)
            elif name == http2.MOST_STREAMS:
                self._most_streams = value
        self._transport.write(http2.frame(http2.SETTINGS, flags=http2.ACK))
        self._send_all()

    def _told_to_leave(self, payload: bytes) -> None:
        """Calls that the engine did not take end now; the others go on."""
        self._leaving = True
        last = int.from_bytes(payload[:4], "big") & http2.LAST_STREAM
        words = payload[8:200].decode("utf-8", "replace")
        for number in [number for number in self._streams if number > last]:
            self._end(number, "UNAVAILABLE", f"it takes no new call on this connection{f': {words}' if words else ''}")
        self._leave_if_empty()

    # --- sending ------------------------------------------------------------------------------------------------

    def _may_send(self, number: int, grown: int) -> None:
        if not number:
            self._window += grown
            return self._send_all()
        stream = self._streams.get(number)
        if stream is not None:
            stream.window += grown
            self._send(stream)
        return None

    def _send_all(self) -> None:
        for stream in list(self._streams.values()):
            self._send(stream)

    def _send(self, stream: WireStream) -> None:
        """As much of its request as both windows let through."""
        while stream.to_send:
            size = min(len(stream.to_send), self._window, stream.window, self._largest_frame)
            if size <= 0:
                return
            part, stream.to_send = stream.to_send[:size], stream.to_send[size:]
            self._window -= size
            stream.window -= size
            flags = 0 if stream.to_send else http2.END_STREAM
            self._transport.write(http2.frame(http2.DATA, stream.number, part, flags=flags))

    # --- ends ---------------------------------------------------------------------------------------------------

    def _end(self, number: int, status: str, words: str) -> None:
        stream = self._streams.pop(number, None)
        if stream is None:
            return
        stream.receiver.ended(status, words)
        self._leave_if_empty()

    def _fail_all(self, status: str, words: str) -> None:
        for number in list(self._streams):
            self._end(number, status, words)

    def _break_off(self, reason: str) -> None:
        log.warning("an HTTP/2 connection to %s ends: %s", self._authority, reason)
        self._lost = True
        self._fail_all("INTERNAL", reason)
        self._transport.abort()

    def _leave_if_empty(self) -> None:
        if self._leaving and not self._streams and not self._lost:
            self._transport.close()


def keep_alive(connection: socket.socket) -> None:
    """Let the kernel ask a peer that is silent for long whether it is there, and end the connection if it is not."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        option = getattr(socket, name, None)  # some systems have other names for them, or none
        if option is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
