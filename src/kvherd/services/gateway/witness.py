"""Stands between a worker and a client, passes everything on at once, and remembers how it went."""

from collections.abc import Callable, Sequence

from kvherd.ports.worker import Responder


def unheard() -> None:
    return


class Around:
    """What every `Responder` around another passes on as it is. Who extends it adds `write` and `write_chunk`."""

    __slots__ = ("_inner", "drain", "when_drained")

    def __init__(self, inner: Responder) -> None:
        self._inner = inner
        self.drain = inner.drain
        self.when_drained = inner.when_drained

    @property
    def started(self) -> bool:
        return self._inner.started

    def fail(self, reason: str) -> None:
        self._inner.fail(reason)


class Witness(Around):
    """`on_start` is called when an answer begins."""

    __slots__ = ("failure", "on_start", "over", "status", "write", "write_chunk")

    def __init__(self, inner: Responder) -> None:
        super().__init__(inner)
        self.write = inner.write  # the bytes themselves are none of its business: a call less for each of them
        self.write_chunk = inner.write_chunk
        self.on_start: Callable[[], None] = unheard
        self.status = 0
        self.over = False
        self.failure = ""

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
