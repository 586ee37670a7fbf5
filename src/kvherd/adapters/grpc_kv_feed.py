"""A worker's KV events over gRPC: from kvherd's engine and bridge, and from the field's own servicers.

The call is the same in SGLang's and vLLM's engine protocol; which one a server speaks is found by asking. It goes over
our own HTTP/2 (`grpc_wire`): grpc.aio would cost as much a message as all the rest of a batch's way.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

from google.protobuf.message import DecodeError
from smg_grpc_proto.generated import common_pb2 as pb

from kvherd.adapters.grpc_stream import WireStream
from kvherd.adapters.grpc_wires import GrpcWires
from kvherd.adapters.tls import ClientTls
from kvherd.core.ids import Epoch, Rank
from kvherd.core.kv.stream import BatchUntranslatable, EventsUnsupported, StreamBroken, StreamUntranslatable
from kvherd.ports.kv_feed import FeedItem, Subscribed
from kvherd.wire.kv_pb import EPOCH_KEY, KvPbDecoder, encode_subscribe, epoch_in
from kvherd.wire.kv_status import stream_error

METHODS: Final = (
    "/sglang.grpc.scheduler.SglangScheduler/SubscribeKvEvents",
    "/vllm.grpc.engine.VllmEngine/SubscribeKvEvents",
)
_MOST_WAITING_BYTES: Final = 2**20
"""Of messages that came and were not read yet; what one call of the event loop brings may be more."""
_REFUSAL_S: Final = 0.05

_parse = pb.KvEventBatch.FromString


class GrpcKvFeed:
    """Implements `KvFeed`. `target` is HOST:PORT, with `tls` over TLS; every subscription has a connection of its own.

    A server that tells no epoch in its headers is a foreign one: `Subscribed(None)`, and the sequence is all there is.
    """

    def __init__(
        self,
        target: str,
        *,
        metadata: Sequence[tuple[str, str]] = (),
        tls: ClientTls | None = None,
        accept_s: float = 30.0,
    ) -> None:
        """A server that takes the call and says nothing for `accept_s` has broken it. Who waits less ends it before."""
        self.target = target
        self._accept_s = accept_s
        self._metadata = tuple(metadata)
        self._tls = tls
        self._methods: tuple[str, ...] = METHODS

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is held between subscriptions."""

    async def subscribe(self, cursors: dict[Rank, int], epoch: Epoch | None) -> AsyncGenerator[FeedItem, None]:
        start, metadata = encode_subscribe(cursors, epoch)
        request = pb.SubscribeKvEventsRequest(start_sequence_number=start).SerializeToString()
        host, _, port = self.target.rpartition(":")
        wires = GrpcWires(host.strip("[]"), int(port), tls=self._tls)
        try:
            inbox = await self._call(wires, request, [*self._metadata, *metadata])
            yield Subscribed(inbox.epoch)
            decoder = KvPbDecoder()
            while (message := await inbox.next()) is not None:
                item = decoder.decode(_parse(message))
                if item is not None:
                    yield item
            raise inbox.end
        except BatchUntranslatable as error:
            raise StreamUntranslatable(error.reason) from error
        except DecodeError as error:
            raise StreamBroken(f"a message that is none: {error}") from None
        finally:
            wires.close()

    async def _call(self, wires: GrpcWires, request: bytes, metadata: Iterable[tuple[str, str]]) -> "_Inbox":
        """The accepted call, under the first name that the server knows. Raises what a refusal means."""
        for method in self._methods:
            inbox = _Inbox()
            try:
                inbox.follow(await wires.call(method, request, inbox, metadata))
            except OSError as error:
                raise stream_error("UNAVAILABLE", str(error)) from error
            try:
                async with asyncio.timeout(self._accept_s):
                    await inbox.accepted()
            except TimeoutError:
                raise StreamBroken(f"it took the call and said nothing for {self._accept_s:g} s") from None
            except EventsUnsupported:
                continue
            self._methods = (method,)
            return inbox
        self._methods = METHODS
        raise EventsUnsupported


class _Inbox:
    """Implements `grpc_stream.Receiver`: what came of one call and is not read yet. `follow` its stream at once."""

    def __init__(self) -> None:
        self.epoch: Epoch | None = None
        self._stream: WireStream | None = None
        self._status: tuple[str, str] | None = None
        self._begun = False
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._woken = asyncio.Event()

    def follow(self, stream: WireStream) -> None:
        self._stream = stream
        stream.on_headers = self._begin

    def message(self, data: bytes) -> None:
        self._waiting.append(data)
        self._waiting_bytes += len(data)
        if self._waiting_bytes > _MOST_WAITING_BYTES and self._stream is not None:
            self._stream.hold()
        self._woken.set()

    def ended(self, status: str, words: str) -> None:
        self._status = status, words
        self._woken.set()

    def _begin(self) -> None:
        self._begun, self.epoch = True, self._told_epoch()
        self._woken.set()

    async def accepted(self) -> None:
        """Wait for the headers, as long as the caller lets it. Raises what a refusal means."""
        while not self._begun and self._status is None:
            await self._wake()
        if self.epoch is None and self._status is None:
            # A foreign server may send headers of nothing, and its refusal a moment later.
            with suppress(TimeoutError):
                async with asyncio.timeout(_REFUSAL_S):
                    await self._wake()
        if self._status is not None and not self._waiting:
            raise self.end

    async def next(self) -> bytes | None:
        """The next message; None once the stream ended, and `end` says how."""
        while not self._waiting:
            if self._status is not None:
                return None
            await self._wake()
        data = self._waiting.popleft()
        self._waiting_bytes -= len(data)
        if self._stream is not None and self._stream.held and not self._waiting:
            self._stream.release()
        return data

    @property
    def end(self) -> Exception:
        status, words = self._status or ("UNKNOWN", "")
        if status == "OK":
            return StreamBroken("the server ended the stream")
        return stream_error(status, words or "no reason given", self._told_epoch())

    async def _wake(self) -> None:
        self._woken.clear()
        await self._woken.wait()

    def _told_epoch(self) -> Epoch | None:
        told = None if self._stream is None else self._stream.metadata.get(EPOCH_KEY.encode())
        return epoch_in([] if told is None else [(EPOCH_KEY, told)])
