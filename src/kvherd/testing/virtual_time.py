"""An event loop whose clock jumps to the next timer when nothing is ready to run.

    def test_nine_hours_pass_in_no_time() -> None:
        virtual_time(main())

Only for code without real sockets: a loop that waits for nothing at all raises `Deadlock` instead of hanging.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(Exception):
    """Every task waits and no timer is set: nothing would ever happen again."""


class _JumpingSelector(selectors.DefaultSelector):
    """Polls without waiting; what the loop would have waited is added to the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        if timeout is None:
            raise Deadlock("all tasks wait and no timer is set")
        self.now_s += timeout
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _JumpingSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now_s


def virtual_time(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end on a fresh virtual clock that starts at 0."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
