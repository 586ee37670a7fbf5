"""A rank's two sockets to its servicer: orders in, news out."""

from collections import deque
from collections.abc import Iterator

import zmq

from kvherd.wire.rank_config import RankConfig
from kvherd.wire.scheduler_ipc import FromRank, encode

BACKLOG_MESSAGES = 10_000
LAST_WORDS_MS = 1000
FRAMES_AT_ONCE = 256


class RankLink:
    """Neither call blocks. What the servicer does not take waits here, in order; `behind` says so.

    A rank plans no step while it is behind, so what can wait is bounded by what one step and its orders say.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], config: RankConfig) -> None:
        self._unsent: deque[bytes] = deque()
        self.orders = context.socket(zmq.PULL)
        self.news = context.socket(zmq.PUSH)
        self.news.sndhwm = BACKLOG_MESSAGES
        self.orders.rcvhwm = BACKLOG_MESSAGES
        self.news.connect(config.news_endpoint)
        self.orders.bind(config.orders_endpoint)

    @property
    def behind(self) -> bool:
        return bool(self._unsent)

    def send(self, message: FromRank) -> None:
        self._unsent.append(encode(message))
        self.push()

    def push(self) -> None:
        """Send what waits, as far as the servicer takes it."""
        try:
            while self._unsent:
                self.news.send(self._unsent[0], zmq.NOBLOCK)
                self._unsent.popleft()
        except zmq.Again:
            return

    def receive(self) -> Iterator[bytes]:
        """The frames that have come, a bounded number of them: the rest is there at the next call."""
        for _ in range(FRAMES_AT_ONCE):
            try:
                yield self.orders.recv(zmq.NOBLOCK)
            except zmq.Again:
                return

    def close(self) -> None:
        """Leave the servicer a moment to take the last words."""
        self.push()
        self.orders.close(linger=0)
        self.news.close(linger=LAST_WORDS_MS)
