"""How long each part of a step takes, for whoever profiles it. Where nobody watches, a part costs a call to nothing.

lap = watch.laps()              # in the thread that computes
…
lap("attention", 3, x.shape)    # from the last lap, or the beginning, until now: attention of layer 3
"""

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Protocol

Lap = Callable[[str, int | None, tuple[int, ...]], None]
"""Told of each part when it ends: its name, its layer if it has one, the shape of what it gave."""

DEEPEST_STACK = 32


class Watch(Protocol):
    def laps(self) -> Lap:
        """Begin to time the parts that the calling thread computes."""
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """What one thread did for a while. `stack` is where it stood at the end of it, the innermost call first."""

    name: str
    layer: int | None
    shape: tuple[int, ...]
    begin_ns: int
    end_ns: int
    thread: int
    stack: tuple[str, ...]


class _Unwatched:
    def laps(self) -> Lap:
        return _nothing


def _nothing(_part: str, _layer: int | None, _shape: tuple[int, ...]) -> None:
    pass


UNWATCHED: Watch = _Unwatched()


class StepWatch:
    """Collects the parts of one step, of all threads that compute it."""

    def __init__(self, *, with_stack: bool) -> None:
        self._with_stack = with_stack
        self.parts: list[Part] = []  # several threads append, which is atomic

    def laps(self) -> Lap:
        began_ns = time.monotonic_ns()
        thread = threading.get_ident()

        def lap(part: str, layer: int | None, shape: tuple[int, ...]) -> None:
            nonlocal began_ns
            ended_ns = time.monotonic_ns()
            stack = _stack(sys._getframe(1)) if self._with_stack else ()  # noqa: SLF001 - what it is for
            self.parts.append(Part(part, layer, shape, began_ns, ended_ns, thread, stack))
            began_ns = time.monotonic_ns()

        return lap


def _stack(frame: FrameType | None) -> tuple[str, ...]:
    calls: list[str] = []
    while frame is not None and len(calls) < DEEPEST_STACK:
        code = frame.f_code
        calls.append(f"{code.co_qualname} ({code.co_filename}:{frame.f_lineno})")
        frame = frame.f_back
    return tuple(calls)
