"""Stands between a worker and a client, passes everything on at once, and remembers what was seen."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvherd.ports.worker import Responder

_TAIL_BYTES = 4096
_COUNT = {
    name: re.compile(rb'"' + name + rb'"\s*:\s*(\d+)')
    for name in (b"prompt_tokens", b"completion_tokens", b"cached_tokens")
}


@dataclass(frozen=True, slots=True)
class SeenUsage:
    """What an answer said it cost; None for what it did not say."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


class Witness:
    """A `Responder` around another. `headers` are added to the answer's own when it starts."""

    def __init__(self, inner: Responder, *, clock: Callable[[], float]) -> None:
        self._inner = inner
        self._clock = clock
        self.on_start: Callable[[], None] = _nothing
        self.on_first_byte: Callable[[], None] = _nothing
        self._tail = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.status = 0
        self.first_byte_at_s: float | None = None
        self.over = False
        self.failure = ""

    @property
    def started(self) -> bool:
        return self._inner.started

    def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self.status = status
        ours = {name for name, _ in self.headers}
        theirs = [(name, value) for name, value in headers if name.lower() not in ours]
        self._inner.start(status, theirs + self.headers)
        self.on_start()

    def write(self, data: bytes) -> None:
        if self.first_byte_at_s is None and data:
            self.first_byte_at_s = self._clock()
            self.on_first_byte()
        # Usage stands at the end of an answer, and may be cut anywhere on its way.
        self._tail = data[-_TAIL_BYTES:] if len(data) >= _TAIL_BYTES else (self._tail + data)[-_TAIL_BYTES:]
        self._inner.write(data)

    def end(self) -> None:
        self.over = True
        self._inner.end()

    def fail(self, reason: str) -> None:
        self.over = True
        self.failure = reason
        self._inner.fail(reason)

    async def drain(self) -> None:
        await self._inner.drain()

    def usage(self) -> SeenUsage:
        """The counts of the last usage in the answer. A quotation mark inside a text is escaped, so none is fooled."""
        at = self._tail.rfind(b'"usage"')
        at = self._tail.rfind(b'"meta_info"') if at < 0 else at
        if at < 0:
            return SeenUsage()
        found = {name.decode(): pattern.search(self._tail, at) for name, pattern in _COUNT.items()}
        return SeenUsage(**{name: int(match[1]) for name, match in found.items() if match})


def _nothing() -> None:
    """Nobody wants to know."""
