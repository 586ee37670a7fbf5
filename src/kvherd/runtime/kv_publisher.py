"""KV events on ZMQ as vLLM 0.32 publishes them, with replay of the latest batches.

    PUB      [topic, sequence u64 big-endian from 0, payload]
    ROUTER   asked [b"", first sequence]   answers [b"", topic, sequence, payload]…, then [b"", b"", ff×8, b""]

A replay that starts before the oldest batch kept begins at that one; one that starts in the future is only the end
marker; a question of another shape gets no answer. Unlike vLLM's, a replay never drops what is kept: the ROUTER's
queue to a slow reader has no high-water mark, and what is sent is what was kept when it was asked, without a gap.
"""

from collections import deque
from collections.abc import Sequence
from itertools import islice

import zmq

from kvherd.core.errors import PortInUse, StartFailed
from kvherd.core.ids import Rank
from kvherd.core.kv.events import KvEvent
from kvherd.wire.vllm_kv import encode_batch

END_OF_REPLAY = b"\xff" * 8
PUB_BACKLOG_BATCHES = 100_000
REPLAY_PIECE_BATCHES = 500

_Batch = tuple[int, bytes]


class KvPublisher:
    """Owns both sockets. Publishing never blocks; a subscriber that lags loses batches and asks for a replay."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        rank: Rank,
        *,
        events_endpoint: str,
        replay_endpoint: str,
        topic: str,
        kept_batches: int,
        port_option: str,
    ) -> None:
        """Raises `PortInUse`, or `StartFailed` for any other reason not to listen there."""
        self._rank = rank
        self._topic = topic.encode()
        self._kept: deque[_Batch] = deque(maxlen=kept_batches)
        self._next = 0
        self._replays: deque[tuple[bytes, deque[_Batch]]] = deque()
        self._pub = context.socket(zmq.PUB)
        self._router = context.socket(zmq.ROUTER)
        try:
            self._pub.sndhwm = PUB_BACKLOG_BATCHES
            self._router.sndhwm = 0
            self.events_endpoint = _bind(self._pub, events_endpoint, port_option)
            self.replay_endpoint = _bind(self._router, replay_endpoint, port_option)
        except BaseException:
            self.close()
            raise

    @property
    def replay_socket(self) -> zmq.Socket[bytes]:
        """To be polled: call `serve_replays` when it is readable."""
        return self._router

    @property
    def replaying(self) -> bool:
        """Batches of a replay are still to be sent: call `serve_replays` again soon."""
        return bool(self._replays)

    def publish(self, timestamp_s: float, events: Sequence[KvEvent]) -> None:
        """Send these as the next batch."""
        payload = encode_batch(timestamp_s, events, self._rank)
        self._kept.append((self._next, payload))
        self._pub.send_multipart([self._topic, self._next.to_bytes(8, "big"), payload])
        self._next += 1

    def serve_replays(self) -> None:
        """Take the questions that are there and send one piece of the oldest one's answer."""
        while self._router.poll(0):
            question = self._router.recv_multipart()
            if len(question) == 3 and len(question[2]) == 8:
                first = int.from_bytes(question[2], "big")
                oldest = self._next - len(self._kept)
                skipped = min(max(0, first - oldest), len(self._kept))
                self._replays.append((question[0], deque(islice(self._kept, skipped, None))))
        if self._replays:
            asker, batches = self._replays[0]
            for _ in range(min(REPLAY_PIECE_BATCHES, len(batches))):
                sequence, payload = batches.popleft()
                self._router.send_multipart([asker, b"", self._topic, sequence.to_bytes(8, "big"), payload])
            if not batches:
                self._router.send_multipart([asker, b"", b"", END_OF_REPLAY, b""])
                self._replays.popleft()

    def close(self) -> None:
        """Give subscribers a moment to take what was published, then close both sockets."""
        self._pub.close(linger=200)
        self._router.close(linger=0)


def _bind(socket: zmq.Socket[bytes], endpoint: str, port_option: str) -> str:
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        if error.errno == zmq.EADDRINUSE and endpoint.startswith("tcp://"):
            raise PortInUse(int(endpoint.rpartition(":")[2]), port_option) from error
        raise StartFailed(f"the KV event socket {endpoint}", error.strerror or str(error)) from error
    return socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
