"""One rank's KV events over ZMQ, as vLLM, SGLang and kvherd's engine publish them.

    PUB  [topic, number, payload]                                  number: 8 bytes, big-endian
    DEALER → ROUTER  [b"", start]     ROUTER → DEALER  [b"", topic?, number, payload]… [b"", b"", ff × 8, b""]

A SUB socket reconnects in silence, so its monitor is read before any frame is given away: the handshake of a connection
is reported there before its first frame can be received. A peer whose machine is gone is found out by TCP, so that a
connection that died unseen is made again; not by ZeroMQ's heartbeats: libzmq 4.3.5 ends the process on one that comes
while a socket's queue is full.
"""

import asyncio
from collections import deque
from errno import EADDRINUSE
from socket import AF_UNIX, SOCK_STREAM, socket
from types import TracebackType
from typing import Final, Self

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from kvherd.core.errors import StartFailed
from kvherd.core.kv.frames import Connected, Disconnected, Frame, Received, Replayed

END: Final = b"\xff" * 8
QUEUED_FRAMES: Final = 10_000
"""Frames that wait to be read; a publisher drops what is beyond, and the gap is replayed."""
PIECE_FRAMES: Final = 1_000
AT_ONCE: Final = 256
HANDSHAKE_MS: Final = 3_000
"""A connection that is accepted and then silent is given up, and made anew."""
_KEEPALIVE: Final = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 2,
    zmq.TCP_KEEPALIVE_INTVL: 1,
    zmq.TCP_KEEPALIVE_CNT: 3,
}
"""In seconds, and tries."""
_HANDSHAKE_FAILED: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


def _require_unheld(endpoint: str) -> None:
    """Binding ipc:// would take the path away from whoever listens there. Raises `zmq.ZMQError`."""
    if not endpoint.startswith("ipc://"):
        return
    with socket(AF_UNIX, SOCK_STREAM) as probe:
        try:
            probe.connect(endpoint.removeprefix("ipc://"))
        except OSError:
            return
    raise zmq.ZMQError(EADDRINUSE)


class ZmqFrameFeed:
    """Implements `FrameFeed`. `bind_events`: this side listens and the publisher connects. Entering may raise
    `StartFailed`.

    The gap that a message of another form leaves is handled as any other.
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
        self._bad_frames = 0
        self._topic = topic
        self._bind_events = bind_events
        self._ready: deque[Received] = deque()
        self._publishers = 0
        self._failed = False

    @property
    def can_replay(self) -> bool:
        return self.replay_endpoint is not None

    @property
    def bad_frames(self) -> int:
        return self._bad_frames

    async def __aenter__(self) -> Self:
        self._context = zmq.asyncio.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.set(zmq.RCVHWM, QUEUED_FRAMES)
        self._sub.set(zmq.LINGER, 0)
        self._sub.set(zmq.RECONNECT_IVL, 50)
        self._sub.set(zmq.RECONNECT_IVL_MAX, 1_000)
        self._sub.subscribe(self._topic)
        self._sub.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        for option, value in _KEEPALIVE.items():
            self._sub.set(option, value)
        self._publishers, self._failed = 0, False
        self._monitor = self._sub.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _HANDSHAKE_FAILED
        )
        # Read without the event loop: a poll says that there is something, and then everything is taken at once.
        self._sub_now: zmq.Socket[bytes] = zmq.Socket.shadow(self._sub.underlying)
        self._monitor_now: zmq.Socket[bytes] = zmq.Socket.shadow(self._monitor.underlying)
        self._poller = zmq.asyncio.Poller()
        self._poller.register(self._sub, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        try:
            if self._bind_events:
                _require_unheld(self.events_endpoint)
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

    async def next(self, *, within_s: float) -> Received | Connected | Disconnected | None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + within_s
        while True:
            if not self._ready:
                await self._poller.poll(max(0.0, until_s - loop.time()) * 1000)
                self._take(AT_ONCE)
            change = self._change()
            if change is not None or self._publishers != 1:
                self._ready.clear()
                while self._take(AT_ONCE):
                    self._ready.clear()
            if change is not None:
                return change
            if self._ready:
                return self._ready.popleft()
            if loop.time() >= until_s:
                return None

    async def replay(self, start: int, *, silence_s: float) -> Replayed:
        assert self.replay_endpoint is not None
        # A socket of its own for each question, so that no late answer to an earlier one can be taken for this one's.
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.set(zmq.LINGER, 0)
            dealer.connect(self.replay_endpoint)
            await dealer.send_multipart([b"", start.to_bytes(8, "big")])
            # Read as `next` does: a turn of a busy loop for each message would be slower than an engine that works.
            now: zmq.Socket[bytes] = zmq.Socket.shadow(dealer.underlying)
            frames: list[Frame] = []
            while len(frames) < PIECE_FRAMES:
                try:
                    answer = now.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    if not await dealer.poll(silence_s * 1000):
                        break
                    continue
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
        if len(parts) != 2 or len(parts[0]) != 8 or parts[0] == END:
            self._bad_frames += 1
            return None
        return Frame(int.from_bytes(parts[0], "big"), parts[1])

    def _change(self) -> Connected | Disconnected | None:
        """What became of the connection since the last look, if anything did."""
        changed = False
        while self._monitor_now.poll(0):
            changed = (
                self._count(parse_monitor_message(self._monitor_now.recv_multipart(zmq.NOBLOCK))["event"]) or changed
            )
        if not changed:
            return None
        match self._publishers:
            case 0:
                return Disconnected("its connection is broken")
            case 1:
                return Connected()
            case several:
                return Disconnected(f"{several} publishers at once are connected to {self.events_endpoint}")

    def _count(self, event: int) -> bool:
        """Whether this changed who is connected. A handshake that fails ends as a connection that was none."""
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._publishers += 1
        elif event != zmq.EVENT_DISCONNECTED:
            self._failed = True
            return False
        elif self._failed:
            self._failed = False
            return False
        else:
            self._publishers = max(0, self._publishers - 1)
        return True
