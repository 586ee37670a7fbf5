"""Stands between a worker and a client, passes everything on at once, and remembers how it went."""

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from kvherd.ports.worker import Responder
from kvherd.services.gateway.relay.responder import ConnectionResponder
from kvherd.services.gateway.waiting.patience import Wait


class Around:
    """What every `Responder` around another passes on as it is. Who extends it adds `write` and `write_chunk`."""

    __slots__ = ("_inner",)

    def __init__(self, inner: Responder) -> None:
        self._inner = inner

    def drain(self) -> Coroutine[Any, Any, None]:
        return self._inner.drain()

    def when_drained(self, then: Callable[[], None]) -> None:
        self._inner.when_drained(then)

    @property
    def started(self) -> bool:
        return self._inner.started

    def fail(self, reason: str) -> None:
        self._inner.fail(reason)


class Witness(Around):
    """`wait` is told when an answer begins."""

    __slots__ = ("_relayed", "failure", "over", "status", "wait")

    def __init__(self, inner: Responder) -> None:
        super().__init__(inner)
        self._relayed = inner if isinstance(inner, ConnectionResponder) else None
        """The same, of a class that calls can be compiled to: nothing is called as often as these."""
        self.wait: Wait | None = None
        self.status = 0
        self.over = False
        self.failure = ""

    def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self.status = status
        if self._relayed is not None:
            self._relayed.start(status, headers)
        else:
            self._inner.start(status, headers)
        if self.wait is not None:
            self.wait.started()

    def write(self, data: bytes) -> None:
        if self._relayed is not None:
            self._relayed.write(data)
        else:
            self._inner.write(data)

    def write_chunk(self, chunk: bytes) -> None:
        if self._relayed is not None:
            self._relayed.write_chunk(chunk)
        else:
            self._inner.write_chunk(chunk)

    def end(self) -> None:
        self.over = True
        if self._relayed is not None:
            self._relayed.end()
        else:
            self._inner.end()

    def fail(self, reason: str) -> None:
        self.over = True
        self.failure = reason
        self._inner.fail(reason)
