"""Stands between a worker and a client, passes everything on at once, and remembers how it went."""

from collections.abc import Callable, Sequence

from kvherd.ports.worker import Responder


def unheard() -> None:
    return


class Witness:
    """A `Responder` around another. `on_start` is called when an answer begins."""

    __slots__ = ("_inner", "drain", "failure", "on_start", "over", "status", "when_drained", "write")

    def __init__(self, inner: Responder) -> None:
        self._inner = inner
        # The bytes themselves are none of its business: a call less for each of them.
        self.write = inner.write
        self.drain = inner.drain
        self.when_drained = inner.when_drained
        self.on_start: Callable[[], None] = unheard
        self.status = 0
        self.over = False
        self.failure = ""

    @property
    def started(self) -> bool:
        return self._inner.started

    def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self.status = status
        self._inner.start(status, headers)
        self.on_start()

    def end(self) -> None:
        self.over = True
        self._inner.end()

    def fail(self, reason: str) -> None:
        self.over = True
        self.failure = reason
        self._inner.fail(reason)
