"""One call on a connection to a worker, as the connection and whoever made the call see it."""

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

WINDOW_BYTES: Final = 256 * 1024
_ENDS_WITHIN_S: Final = 5.0


class Receiver(Protocol):
    """Called by the connection, in order; `ended` once and last. Must be quick, and may raise only `FrameInvalid`."""

    def message(self, data: bytes) -> None: ...

    def ended(self, status: str, words: str) -> None:
        """`status` is the name of a gRPC status."""
        ...


class _Nobody:
    def message(self, data: bytes) -> None:
        return

    def ended(self, status: str, words: str) -> None:
        return


_NOBODY: Final = _Nobody()


class Wire(Protocol):
    """The connection, as its calls see it."""

    def acknowledge(self, stream: "WireStream") -> None:
        """Let the engine send as much again."""
        ...

    def forget(self, stream: "WireStream") -> None:
        """Tell the engine that nobody waits for more."""
        ...


class WireStream:
    """One call under way. `metadata`: what came with its headers or, once it ended, with its status.

    `on_headers`, if it is set, is called when the headers come; a refusal may come without them.
    """

    __slots__ = (
        "_wire",
        "buffer",
        "held",
        "metadata",
        "number",
        "on_headers",
        "receiver",
        "to_send",
        "unacknowledged",
        "window",
    )

    def __init__(self, wire: Wire, number: int, receiver: Receiver, to_send: bytes, window: int) -> None:
        self._wire = wire
        self.number = number
        self.receiver = receiver
        self.to_send = to_send
        self.window = window
        self.buffer = bytearray()
        self.unacknowledged = 0
        self.held = False
        self.metadata: dict[bytes, bytes] = {}
        self.on_headers: Callable[[], None] | None = None

    def hold(self) -> None:
        """Take no more than is on its way already, until `release`."""
        self.held = True

    def release(self) -> None:
        self.held = False
        if self.unacknowledged > WINDOW_BYTES // 2:
            self._wire.acknowledge(self)

    def cancel(self) -> None:
        """Let the engine stop. Nothing is called any more; harmless for a stream that ended."""
        self._wire.forget(self)

    def leave(self) -> None:
        """All that matters was said: let the engine end by itself. Nothing is called any more."""
        self.receiver = _NOBODY
        asyncio.get_running_loop().call_later(_ENDS_WITHIN_S, self.cancel)
