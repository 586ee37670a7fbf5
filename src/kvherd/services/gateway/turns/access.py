"""What became of every request: one line of JSON each, and the metrics. Never a prompt, an answer, or a key."""

import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final, Protocol

from kvherd.core.errors import KvherdError
from kvherd.core.fleet.keyring import KeyUnknown
from kvherd.core.ids import RequestId
from kvherd.services.gateway.metrics import GatewayMetrics
from kvherd.services.gateway.turns.turn import Turn
from kvherd.wire.access_line import AccessLine, as_it_is, encoded
from kvherd.wire.status import status_of

log: Final = logging.getLogger("kvherd.access")


class Asked(Protocol):
    """The little of a request that its line has when it never got as far as being routed."""

    @property
    def request(self) -> RequestId: ...
    @property
    def path(self) -> str: ...
    @property
    def key(self) -> str: ...


Write = Callable[[bytes], None]
"""Takes one line, without its end. Cheap; raises nothing."""


class AccessLog:
    """Lines go to `write`, or without it into the log of this process."""

    def __init__(self, metrics: GatewayMetrics, write: Write | None = None) -> None:
        self._metrics = metrics
        self._tallies = metrics.tallies
        self._write = write

    def refused(self, asked: Asked, error: KvherdError) -> None:
        """It was turned away before any worker was chosen."""
        self._metrics.refused(status_of(error).code)
        self._turned_away({"request": asked.request, "key": asked.key or None, "path": asked.path}, error)

    def unread(self, error: KvherdError, client: str) -> None:
        """A client, by its address, was answered before its request was read whole."""
        self._metrics.unread(status_of(error).code)
        if not isinstance(error, KeyUnknown):  # who judged its head has told of that
            self._turned_away({"client": client}, error)

    def ended(self, turn: Turn, *, now_s: float, error: BaseException | None = None) -> None:
        """A turn is over, whatever its outcome; `error` is what its client was told in place of an answer."""
        first_s, usage = turn.first_token_at_s, turn.usage
        came_s = turn.began_s - turn.incoming.waited_s
        ttft_s = None if first_s is None else first_s - came_s
        itl_s = None
        if first_s is not None and turn.streams and usage is not None and usage.completion_tokens > 1:
            itl_s = (now_s - first_s) / (usage.completion_tokens - 1)
        worker = turn.member.worker if turn.member else ""
        self._tallies.ended(worker, turn.model, turn.outcome, ttft_s, now_s - came_s)
        if usage is not None:
            self._tallies.used(worker, turn.model, usage, itl_s)
        if self._written:
            self._put(self._line(turn, ttft_s, itl_s, now_s - came_s, _status(turn, error)))

    @property
    def _written(self) -> bool:
        return self._write is not None or log.isEnabledFor(logging.INFO)

    def _turned_away(self, who: dict[str, str | None], error: KvherdError) -> None:
        if self._written:
            outcome = {"outcome": type(error).__name__, "status": status_of(error).http}
            self._put(encoded({"at": _now(), **who, **outcome}))

    def _put(self, line: bytes) -> None:
        if self._write is not None:
            self._write(line)
        else:
            log.info(line.decode())

    def _line(self, turn: Turn, ttft_s: float | None, itl_s: float | None, seconds: float, status: int | None) -> bytes:
        usage = turn.usage
        line = AccessLine(
            _now(),
            turn.request,
            turn.incoming.key or None,
            turn.incoming.path,
            turn.model,
            turn.member.worker if turn.member else None,
            turn.rank,
            turn.streams,
            turn.outcome,
            status,
            turn.tries,
            usage.prompt_tokens if usage else None,
            usage.completion_tokens if usage else None,
            turn.predicted,
            usage.cached_tokens if usage else None,
            round(turn.held_s, 6) if turn.held_s else 0.0,
            None if ttft_s is None else round(ttft_s, 6),
            None if itl_s is None else round(itl_s, 6),
            round(seconds, 6),
        )
        if turn.explain:
            line.explain = as_it_is(turn.explanation or b"null")
        return encoded(line)


def _status(turn: Turn, error: BaseException | None) -> int | None:
    """What the client was answered with; None if it left before that."""
    if turn.witness.status or not isinstance(error, Exception):
        return turn.witness.status or None
    return status_of(error).http


_PARTS: Final = [f".{millis:03d}+00:00" for millis in range(1000)]


def _now() -> str:
    """To the millisecond, as programs that collect logs read it."""
    now_s = time.time()
    whole_s = int(now_s)
    return _second(whole_s) + _PARTS[int((now_s - whole_s) * 1000)]


@lru_cache(maxsize=2)
def _second(whole_s: int) -> str:
    """Made once a second, and not for every line."""
    return datetime.fromtimestamp(whole_s, UTC).strftime("%Y-%m-%dT%H:%M:%S")
