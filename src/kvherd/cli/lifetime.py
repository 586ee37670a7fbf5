"""How long a process lives: until its work ends, a signal asks it to stop, or whoever started it is gone."""

import asyncio
import logging
import signal
import sys
from collections.abc import Callable, Coroutine

log = logging.getLogger(__name__)


class _UntilEof(asyncio.Protocol):
    def __init__(self, at_eof: Callable[[], None]) -> None:
        self._at_eof = at_eof

    def eof_received(self) -> None:
        self._at_eof()


def _at_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _say_that_files_are_watched() -> None:
    log.info("SIGHUP asks for nothing here: files that may change are looked at all the time")


async def until_stopped(work: Coroutine[None, None, None], *, supervised: bool = False) -> None:
    """Run `work` to its end, or cancel it at SIGINT or SIGTERM and return once it has cleaned up.

    Every further signal cancels again, which cuts a clean-up short. `supervised`: the end of standard input is such
    a signal too, so that a process never outlives the one that holds the other end.

    SIGHUP is one for a process that was begun at a terminal, which is gone then. For any other it is the wish that
    files be read again, as they are anyway; and where it is ignored, as under nohup, it stays so.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)
    asked = False

    def stop() -> None:
        nonlocal asked
        asked = True
        task.cancel()
        # Up to Python 3.11.2 a task that counts as being cancelled never gets the TimeoutError of asyncio.timeout, and
        # its clean-up would break off at the first deadline. The cancellation itself is on its way by then.
        loop.call_soon(task.uncancel)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGHUP, stop if _at_terminal() else _say_that_files_are_watched)
    stdin = None
    if supervised:
        stdin, _ = await loop.connect_read_pipe(lambda: _UntilEof(stop), sys.stdin)
    try:
        await asyncio.wait([task])
    finally:
        if stdin is not None:
            stdin.close()
    if not (asked and task.cancelled()):
        task.result()
