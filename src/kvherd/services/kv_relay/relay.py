"""From an engine's own KV events to a numbered stream that any number of subscribers can resume.

One task a rank reads its publisher and carries out what `core/kv/feed` says. All ranks share one epoch: when one
publisher's life ends, every subscriber starts over, and is told again what the other ranks hold.
"""

import asyncio
import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self, assert_never

from kvherd.core.errors import FrameInvalid
from kvherd.core.ids import Epoch, Rank
from kvherd.core.kv.barrier import Current, FlushBarrier, Outdated, Unsure
from kvherd.core.kv.events import CacheCleared, KvEventBatch
from kvherd.core.kv.feed import RankFeed
from kvherd.core.kv.frames import AskReplay, BeginLife, EndLife, FeedEvent, Forward, Frame, Idle, Instruction, Replaced
from kvherd.core.kv.history import HISTORY_TOKENS, RankHistory, roll_base
from kvherd.core.kv.lag import Lag
from kvherd.core.kv.live_state import LiveState
from kvherd.core.kv.stream import (
    BatchUntranslatable,
    EpochEnded,
    StreamBroken,
    StreamLost,
    StreamUntranslatable,
)
from kvherd.ports.kv_frames import FrameFeed
from kvherd.services.kv_relay.life import Life, Subscription
from kvherd.services.kv_relay.rank_view import RankView
from kvherd.wire.vllm_kv import KvDecoder, PublishedBatch

log = logging.getLogger(__name__)

_CALM_S = 0.05
"""What was taken back is told again once nothing came for so long that speaks against it."""

_DOUBT_TURNS = 8
"""A loop that stood still finds its timers due before the answers that came meanwhile: that costs one turn of these."""


@dataclass(frozen=True, slots=True)
class RelayOptions:
    """`probe_s`: after this long without a frame the publisher is asked whether that was all. `replay_silence_s`: how
    long a replay may say nothing. `doubt_s`: how long what was told may be in doubt before it is taken back.
    `history_tokens`: how far a subscriber may fall behind, in `core/kv/pieces` weight.
    """

    probe_s: float = 2.0
    replay_silence_s: float = 1.0
    doubt_s: float = 2.0
    history_tokens: int = HISTORY_TOKENS


class _RankLine:
    """One rank: its publisher, what is known of its sequence, and the decoder of its present life."""

    def __init__(self, rank: Rank, frames: FrameFeed) -> None:
        self.rank = rank
        self.frames = frames
        self.feed = RankFeed(can_replay=frames.can_replay)
        self.decoder = KvDecoder()
        self.named: Rank | None = None
        self.replaced = False
        self.doubt_ends: asyncio.TimerHandle | None = None
        self.taken_back = False
        self.unproved = False
        self.asked_s = 0.0
        self.lag = Lag()

    def doubt_no_more(self) -> None:
        if self.doubt_ends is not None:
            self.doubt_ends.cancel()
            self.doubt_ends = None

    def view(self, history: RankHistory, now_s: float) -> RankView:
        return RankView(
            self.rank,
            batches=history.last - history.base,
            engine_sequence=-1 if self.feed.last is None else self.feed.last,
            blocks=len(history.state),
            unknown_before=history.unknown_before,
            doubt=self.feed.doubt,
            lag_s=self.lag.last_s,
            worst_lag_s=self.lag.worst_s(now_s),
            gaps=self.feed.gaps,
            bad_frames=self.frames.bad_frames,
        )

    def decode(self, frame: Frame, held: LiveState) -> PublishedBatch:
        """Raises `FrameInvalid` or `BatchUntranslatable`. A life may call its rank what it likes, but always so."""
        batch = self.decoder.decode(frame.payload, held)
        if batch.rank is not None and self.named not in (None, batch.rank):
            raise BatchUntranslatable(f"a batch of rank {batch.rank} among those of rank {self.named}")
        self.named = batch.rank
        return batch


class KvRelay:
    """Implements `KvStream` for the publishers of one engine. An async context manager; subscribe inside it only.

    `counts` has `frames`, `bad_batches`, `untranslatable`, `lives`, `replays` and `flushes`, since the start.
    """

    def __init__(
        self,
        feeds: Mapping[Rank, FrameFeed],
        *,
        options: RelayOptions | None = None,
        dice: Callable[[int], int] = secrets.randbelow,
    ) -> None:
        self._options = options or RelayOptions()
        self._dice = dice
        self._lines = {rank: _RankLine(rank, feed) for rank, feed in sorted(feeds.items())}
        self.counts: Counter[str] = Counter()
        self._barrier = FlushBarrier()
        self._life = self._new_life({})

    @property
    def epoch(self) -> Epoch:
        return self._life.epoch

    @property
    def ranks(self) -> tuple[RankView, ...]:
        """How each rank stands at this moment."""
        now_s = asyncio.get_running_loop().time()
        return tuple(line.view(self._life.histories[line.rank], now_s) for line in self._lines.values())

    def blocks(self, rank: Rank) -> int:
        """How many different blocks the rank is known to hold."""
        return len(self._life.histories[rank].state)

    def subscribe(
        self,
        *,
        start_sequence_number: int = 0,
        cursors: Mapping[Rank, int] | None = None,
        epoch: Epoch | None = None,
    ) -> Subscription:
        for line in self._lines.values():
            if line.taken_back:
                raise StreamBroken(f"rank {line.rank}: {line.feed.doubt or 'it was in doubt a moment ago'}")
        return self._life.begin(start_sequence_number, cursors or {}, epoch, proved=self._proved)

    def _proved(self) -> bool:
        """Whether something is known, and nothing says that it is of an engine that is gone.

        Whoever was told it may keep it for `doubt_s`; whoever comes meanwhile waits.
        """
        return not any(line.unproved or line.feed.unproved for line in self._lines.values())

    def rank_started(self, rank: Rank) -> None:
        """Say that the rank's process is a new one: what it published before is void. Call it after a restart."""
        self._lines[rank].replaced = True

    def flushed(self, ordered_s: float) -> None:
        """Say that the engine obeyed a flush, ordered at `ordered_s` by the event loop's clock.

        Subscribers are told at once that nothing is held, whenever the engine will publish that; what it published
        before and is still on its way is kept from them.
        """
        self.counts["flushes"] += 1
        answered_s = time.time()
        for rank in self._barrier.flushed(self._lines, ordered_s=ordered_s, answered_s=answered_s):
            self._life.histories[rank].append(answered_s, (CacheCleared(),))
        self._life.tell()

    def doubted(self) -> None:
        """Say that a flush was sent, and that nobody will know whether the engine obeyed: what it held is unknown."""
        for line in self._lines.values():
            reason = f"rank {line.rank}: a flush was not answered, and may have been obeyed"
            self._void(line, EpochEnded(reason), max(line.feed.last or 0, 1))

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            for line in self._lines.values():
                await stack.enter_async_context(line.frames)
            group = await stack.enter_async_context(asyncio.TaskGroup())
            self._tasks = [group.create_task(self._follow(line)) for line in self._lines.values()]
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for line in self._lines.values():
            line.doubt_no_more()
        self._life.finish(StreamBroken("the relay is stopping"))
        for task in self._tasks:
            task.cancel()
        await self._stack.aclose()

    async def _follow(self, line: _RankLine) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._weigh(line)
            calm = line.taken_back and not line.feed.doubt
            event: FeedEvent | None = await line.frames.next(within_s=_CALM_S if calm else self._options.probe_s)
            asked = False
            if line.replaced:
                line.replaced = False
                asked = await self._handle(line, Replaced())
            if event is not None or not calm:
                asked = await self._handle(line, event or Idle()) or asked
            if line.feed.doubt and loop.time() - line.asked_s >= self._options.probe_s:
                await self._handle(line, Idle())  # frames that keep coming must not keep the question back
            elif calm and not asked and not line.feed.doubt:
                line.taken_back = False

    async def _handle(self, line: _RankLine, event: FeedEvent) -> bool:
        """Whether the publisher was asked for a replay."""
        todo, asked = deque(line.feed.handle(event)), False
        while todo:
            instruction = todo.popleft()
            if isinstance(instruction, AskReplay):
                self.counts["replays"] += 1
                self._weigh(line)
                answer = await line.frames.replay(instruction.start, silence_s=self._options.replay_silence_s)
                asked, line.asked_s = True, asyncio.get_running_loop().time()
                todo.extend(line.feed.handle(answer))
            else:
                self._carry_out(line, instruction)
                self._life.tell()
                await asyncio.sleep(0)  # a burst that is here already must not run past readers that keep up
        return asked

    def _weigh(self, line: _RankLine) -> None:
        """What is in doubt for a while is taken back; what is proved is told to those who waited for that."""
        was_unproved, line.unproved = line.unproved, bool(line.feed.unproved)
        if was_unproved and not line.unproved:
            self._life.tell()
        if line.feed.doubt and line.doubt_ends is None and not line.taken_back:
            self._doubt(line, _DOUBT_TURNS)
        elif not line.feed.doubt:
            line.doubt_no_more()

    def _doubt(self, line: _RankLine, turns: int) -> None:
        if turns:
            turn_s = self._options.doubt_s / _DOUBT_TURNS
            line.doubt_ends = asyncio.get_running_loop().call_later(turn_s, self._doubt, line, turns - 1)
        else:
            self._take_back(line)

    def _take_back(self, line: _RankLine) -> None:
        """End every stream, and accept none until the doubt is over. What is known is kept: it may prove true."""
        line.doubt_ends, line.taken_back = None, True
        log.warning("what rank %d holds is not told any more: %s", line.rank, line.feed.doubt)
        self._end_life(EpochEnded(f"rank {line.rank}: {line.feed.doubt}"), {})

    def _carry_out(self, line: _RankLine, instruction: Instruction) -> None:
        match instruction:
            case Forward(frame):
                self._forward(line, frame)
            case EndLife(reason):
                self._void(line, EpochEnded(f"rank {line.rank}: {reason}"))
            case BeginLife(unknown_before):
                self._begin(line, unknown_before)
            case AskReplay():
                raise AssertionError("a replay is asked for by whoever can wait for it")
            case _:
                assert_never(instruction)

    def _begin(self, line: _RankLine, unknown_before: int) -> None:
        """Who was told already that all of this rank is known starts over: it is not."""
        if unknown_before and self._life.told:
            reason = f"rank {line.rank}: its first {unknown_before} batches are out of reach"
            self._void(line, EpochEnded(reason), unknown_before)
        self._life.histories[line.rank].unknown_before = unknown_before

    def _forward(self, line: _RankLine, frame: Frame) -> None:
        self.counts["frames"] += 1
        try:
            batch = line.decode(frame, self._life.histories[line.rank].state)
        except FrameInvalid as error:
            self.counts["bad_batches"] += 1
            self._void(line, EpochEnded(f"rank {line.rank}, batch {frame.sequence}: {error}"), frame.sequence + 1)
        except BatchUntranslatable as error:
            self.counts["untranslatable"] += 1
            reason = f"rank {line.rank}, batch {frame.sequence}: {error.reason}"
            self._void(line, StreamUntranslatable(reason), frame.sequence + 1)
        else:
            self._tell(line, KvEventBatch(frame.sequence, batch.timestamp_s, line.rank, batch.events))

    def _tell(self, line: _RankLine, batch: KvEventBatch) -> None:
        line.lag.seen(time.time() - batch.timestamp_s, asyncio.get_running_loop().time())
        events = batch.events
        match self._barrier.judge(batch, now_s=asyncio.get_running_loop().time()):
            case Current(current):
                events = current
            case Outdated():
                return
            case Unsure():
                reason = f"rank {line.rank}: events around a flush were dropped"
                self._void(line, EpochEnded(reason), max(batch.sequence, 1))
            case verdict:
                assert_never(verdict)
        if events:
            self._life.histories[line.rank].append(batch.timestamp_s, events)

    def _void(self, line: _RankLine, end: StreamLost, unknown_before: int = 0) -> None:
        """End the epoch; the next begins with the other ranks as they are and this one empty."""
        log.warning("%s", end)
        line.doubt_no_more()  # what is told from now on has a time of its own in which it may be in doubt
        line.decoder, line.named = KvDecoder(), None
        self._barrier.forget(line.rank)
        self._end_life(end, {line.rank: None})
        self._life.histories[line.rank].unknown_before = unknown_before

    def _end_life(self, end: StreamLost, changed: Mapping[Rank, None]) -> None:
        before, self._life = self._life, self._new_life({**self._life.histories, **changed})
        before.finish(end)

    def _new_life(self, before: Mapping[Rank, RankHistory | None]) -> Life:
        self.counts["lives"] += 1
        histories = {}
        for rank in self._lines:
            old = before.get(rank)
            histories[rank] = RankHistory(
                rank,
                roll_base(self._dice),
                limit_tokens=self._options.history_tokens,
                unknown_before=0 if old is None else old.unknown_before,
                state=LiveState() if old is None else old.state,
                stamped_s=0.0 if old is None else old.stamped_s,
            )
        return Life(Epoch(f"{self._dice(2**128):032x}"), histories)
