"""An engine, its network and its lies, in memory and on any clock: for histories of thousands of faults.

`ModelEngine` has lives, each with a sequence that it keeps for replays and a truth. `ModelFrames` is one reader's way
to it, with the order of things that ZeroMQ has: a connection breaks and is made again a while later, frames of the old
one may still wait to be read, and questions for replays go over connections of their own, which may be made sooner.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from types import TracebackType
from typing import Self

from kvherd.core.ids import Rank
from kvherd.core.kv.events import KvEvent
from kvherd.core.kv.frames import Connected, Disconnected, Frame, Received, Replayed
from kvherd.testing.cache_truth import CacheTruth
from kvherd.wire.vllm_kv import encode_batch

PIECE = 40


@dataclass(slots=True)
class Lies:
    """How replays go wrong. `kept`: how many batches are remembered. `loses`: numbers that are left out. `ends`: the
    end marker is sent. `stops_after`: so many frames are sent and no more. `frame_s`: pause before each. `silent`:
    nobody answers. `restarts_after`: the engine restarts after so many frames of the next answer.
    """

    kept: int = 10_000
    loses: frozenset[int] = frozenset()
    ends: bool = True
    stops_after: int | None = None
    frame_s: float = 0.0
    silent: bool = False
    restarts_after: int | None = None


@dataclass(slots=True)
class ModelEngine:
    """One rank's publisher. `alive` False: its process is gone. `cut`: nobody reaches it; it lives on."""

    rank: Rank = field(default_factory=lambda: Rank(0))
    life: int = 0
    alive: bool = True
    cut: bool = False
    lies: Lies = field(default_factory=Lies)
    truth: CacheTruth = field(default_factory=CacheTruth)
    sent: list[Frame] = field(default_factory=list)
    readers: "list[ModelFrames]" = field(default_factory=list)
    next_number: int = 0
    reconnect_s: float = 0.05
    """How long after a connection broke, or could not be made, it is made anew."""
    notice_s: float = 0.0
    """How long the end of a connection takes to be noticed; until then its last frames may be read."""
    clock: "Callable[[], float]" = field(default_factory=lambda: count(1).__next__)
    """Time stamps are what makes equal events of two lives different batches."""

    @property
    def reachable(self) -> bool:
        return self.alive and not self.cut

    def publish(self, *events: KvEvent, lost: bool = False, payload: bytes | None = None) -> None:
        """Do this and tell it; `lost` keeps it from whoever listens, `payload` is told instead."""
        if not self.alive:
            return
        self.truth.apply(events)
        data = encode_batch(self.clock(), events, self.rank) if payload is None else payload
        frame = Frame(self.next_number, data)
        self.next_number += 1
        self.sent.append(frame)
        if not lost and not self.cut:
            for reader in self.readers:
                reader.deliver(frame)

    def repeat(self, back: int) -> None:
        """Send one of the latest frames again."""
        if self.reachable and back < len(self.sent):
            for reader in self.readers:
                reader.deliver(self.sent[-1 - back])

    def die(self) -> None:
        self.alive = False
        self.truth.copies.clear()
        self.hang_up()

    def start(self) -> None:
        """Begin a new life."""
        self.life, self.alive, self.sent, self.next_number = self.life + 1, True, [], 0
        self.truth.copies.clear()
        self.hang_up()

    def cut_off(self) -> None:
        self.cut = True
        self.hang_up()

    def hang_up(self) -> None:
        for reader in self.readers:
            reader.hang_up()


class ModelFrames:
    """Implements `FrameFeed`. `room`: how many frames wait to be read; those beyond are lost."""

    def __init__(self, engine: ModelEngine, *, can_replay: bool = True, room: int = 200) -> None:
        self.engine = engine
        self.can_replay = can_replay
        self.bad_frames = 0
        self.asked = 0
        self._room = room
        self._queue: deque[Received] = deque()
        self._news = asyncio.Event()
        self._connected_to: int | None = None
        self._changes: deque[Connected | Disconnected] = deque()
        self._connecting: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        self.engine.readers.append(self)
        self._connect_later()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.engine.readers.remove(self)
        if self._connecting is not None:
            self._connecting.cancel()

    def deliver(self, frame: Frame) -> None:
        if self._connected_to == self.engine.life and len(self._queue) < self._room:
            self._queue.append(Received(frame))
            self._news.set()

    def hang_up(self) -> None:
        """The connection is broken: what waits to be read still can be."""
        if self._connected_to is not None:
            self._connected_to = None
            if self._connecting is not None:
                self._connecting.cancel()
            self._connecting = asyncio.get_running_loop().call_later(self.engine.notice_s, self._notice)

    def _notice(self) -> None:
        self._changes.append(Disconnected("its connection broke"))
        self._news.set()
        self._connect_later()

    def _connect_later(self) -> None:
        self._connecting = asyncio.get_running_loop().call_later(self.engine.reconnect_s, self._connect)

    def _connect(self) -> None:
        self._connecting = None
        if not self.engine.reachable:
            self._connect_later()
            return
        self._connected_to = self.engine.life
        self._changes.append(Connected())
        self._news.set()

    async def next(self, *, within_s: float) -> Received | Connected | Disconnected | None:
        if not self._queue and not self._changes:
            self._news.clear()
            try:
                async with asyncio.timeout(within_s):
                    await self._news.wait()
            except TimeoutError:
                return None
        if self._changes:
            changes = list(self._changes)
            self._changes.clear()
            self._queue.clear()
            return changes[-1]
        return self._queue.popleft()

    async def replay(self, start: int, *, silence_s: float) -> Replayed:
        self.asked += 1
        frames: list[Frame] = []
        waited_s = 0.0
        while not self.engine.reachable or self.engine.lies.silent:
            if waited_s >= silence_s:
                return Replayed((), ended=False)
            await asyncio.sleep(silence_s / 4)
            waited_s += silence_s / 4
        lies, life = self.engine.lies, self.engine.life
        held = self.engine.sent[-lies.kept :] if lies.kept else []
        last = held[-1:]  # never lost alone: whoever is told that there is nothing more has to believe it
        whole = [one for one in held if one.sequence not in lies.loses or one in last]
        answer = [one for one in whole if one.sequence >= start]
        for number, frame in enumerate(answer[: lies.stops_after]):
            await asyncio.sleep(min(lies.frame_s, silence_s))
            if number == lies.restarts_after:
                lies.restarts_after = None
                self.engine.start()
            if lies.frame_s > silence_s or self.engine.life != life or len(frames) == PIECE:
                return Replayed(tuple(frames), ended=False)
            if frames and frame.sequence != frames[-1].sequence + 1:
                return Replayed(tuple(frames), ended=False)
            frames.append(frame)
        await asyncio.sleep(0 if lies.ends else silence_s)
        return Replayed(tuple(frames), ended=lies.ends)
