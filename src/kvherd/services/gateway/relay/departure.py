"""A client that has sent its end: has it left, or did it only finish sending?

Both look the same, until something is written: the machine of one that left answers with a reset. So something is
written that means nothing to a client that waits, at once and then ever more rarely, and the socket is looked at.
"""

import asyncio
import select
from collections.abc import Callable

_RESET_SEEN_S = 0.02
_MOST_SILENT_S = 32.0


class HalfClosed:
    """Sounds a half-closed connection until it is reset. Then `gone` is called, once."""

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        sound: Callable[[], None],
        gone: Callable[[], None],
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._sound = sound
        self._gone = gone
        self._pause_s = 1.0
        self._next_s = loop.time() + self._pause_s
        self._over = False
        sound()
        loop.call_later(_RESET_SEEN_S, self.check)

    def check(self) -> None:
        """Look, and sound again if it is time. Called at every tick."""
        if self._over or self._transport.is_closing():
            return
        if _reset(self._transport):
            self._over = True
            self._gone()
        elif self._loop.time() >= self._next_s:
            self._pause_s = min(2 * self._pause_s, _MOST_SILENT_S)
            self._next_s = self._loop.time() + self._pause_s
            self._sound()


def _reset(transport: asyncio.Transport) -> bool:
    """Whether the kernel knows that the other side is gone; nobody reads there any more who would be told."""
    connection = transport.get_extra_info("socket")
    if connection is None or connection.fileno() < 0:
        return True
    poll = select.poll()
    poll.register(connection.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def let_go(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)
