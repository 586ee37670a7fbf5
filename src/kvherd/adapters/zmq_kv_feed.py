"""One rank's KV events over ZMQ, as vLLM, SGLang and kvherd's engine publish them.

    PUB  [topic, number, payload]                                  number: 8 bytes, big-endian
    DEALER → ROUTER  [b"", start]     ROUTER → DEALER  [b"", topic?, number, payload]… [b"", b"", ff × 8, b""]

A SUB socket reconnects in silence, so its monitor is read before any frame is given away: the handshake of a connection
is reported there before its first frame can be received.
"""

from collections import deque
from types import TracebackType
from typing import Final, Self

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from kvherd.core.errors import StartFailed
from kvherd.core.kv.feed import Connected, Frame, Received, Replayed

END: Final = b"\xff" * 8
QUEUED_FRAMES: Final = 10_000
"""Frames that wait to be read; a publisher drops what is beyond, and the gap is replayed."""
PIECE_FRAMES: Final = 1_000
AT_ONCE: Final = 256


class ZmqFrameFeed:
    """Implements `FrameFeed`. `bind_events`: this side listens and the publisher connects. Entering may raise
    `StartFailed`.

    `bad_frames` counts messages that were not of the form above; the gap that they leave is handled as any other.
    """

    def __init__(
        self,
        events_endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: bytes = b"",
        bind_events: bool = False,
    ) -> None:
        self.events_endpoint = events_endpoint
        self.replay_endpoint = replay_endpoint
        self.bad_frames = 0
        self._topic = topic
        self._bind_events = bind_events
        self._ready: deque[Received] = deque()

    @property
    def can_replay(self) -> bool:
        return self.replay_endpoint is not None

    async def __aenter__(self) -> Self:
        self._context = zmq.asyncio.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.set(zmq.RCVHWM, QUEUED_FRAMES)
        self._sub.set(zmq.LINGER, 0)
        self._sub.set(zmq.RECONNECT_IVL, 50)
        self._sub.set(zmq.RECONNECT_IVL_MAX, 1_000)
        self._sub.subscribe(self._topic)
        self._monitor = self._sub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        # Read without the event loop: a poll says that there is something, and then everything is taken at once.
        self._sub_now: zmq.Socket[bytes] = zmq.Socket.shadow(self._sub.underlying)
        self._monitor_now: zmq.Socket[bytes] = zmq.Socket.shadow(self._monitor.underlying)
        self._poller = zmq.asyncio.Poller()
        self._poller.register(self._sub, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        try:
            if self._bind_events:
                self._sub.bind(self.events_endpoint)
            else:
                self._sub.connect(self.events_endpoint)
        except zmq.ZMQError as error:
            self._close()
            reader = f"the reader of KV events at {self.events_endpoint}"
            raise StartFailed(reader, error.strerror) from error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        self._sub.disable_monitor()
        self._context.destroy(linger=0)

    async def next(self, *, within_s: float) -> Received | Connected | None:
        if not self._ready:
            await self._poller.poll(within_s * 1000)
            self._take(AT_ONCE)
        if self._reconnected():
            self._ready.clear()
            while self._take(AT_ONCE):
                self._ready.clear()
            return Connected()
        return self._ready.popleft() if self._ready else None

    async def replay(self, start: int, *, silence_s: float) -> Replayed:
        assert self.replay_endpoint is not None
        # A socket of its own for each question, so that no late answer to an earlier one can be taken for this one's.
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.set(zmq.LINGER, 0)
            dealer.connect(self.replay_endpoint)
            await dealer.send_multipart([b"", start.to_bytes(8, "big")])
            frames: list[Frame] = []
            while len(frames) < PIECE_FRAMES:
                if not await dealer.poll(silence_s * 1000):
                    break
                answer = await dealer.recv_multipart()
                if len(answer) >= 3 and answer[-2] == END:
                    return Replayed(tuple(frames), ended=True)
                frame = self._frame(answer[-2:])
                if frame is None or (frames and frame.sequence != frames[-1].sequence + 1):
                    break
                frames.append(frame)
            return Replayed(tuple(frames), ended=False)

    def _take(self, at_most: int) -> int:
        """Move received frames to `_ready`; how many messages were taken."""
        for count in range(at_most):
            try:
                parts = self._sub_now.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return count
            frame = self._frame(parts[1:])
            if frame is not None:
                self._ready.append(Received(frame))
        return at_most

    def _frame(self, parts: list[bytes]) -> Frame | None:
        if len(parts) != 2 or len(parts[0]) != 8:
            self.bad_frames += 1
            return None
        return Frame(int.from_bytes(parts[0], "big"), parts[1])

    def _reconnected(self) -> bool:
        """Whether a connection was made since the last look."""
        made = False
        while self._monitor_now.poll(0):
            event = parse_monitor_message(self._monitor_now.recv_multipart(zmq.NOBLOCK))
            made = made or event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
        return made
