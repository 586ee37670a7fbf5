"""Followers: one for each worker that publishes KV events, keeping the index true to them, or the worker out of it.

A worker has credit while its stream is live, and for `grace_s` after its connection broke. Whatever else ends a stream
takes the credit away at once, until the state was told again. A wrong index is worse than an empty one.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import NoReturn, Self

from kvherd.core.errors import OperatorError
from kvherd.core.ids import PrefixHash, WorkerId
from kvherd.core.kv.barrier import FlushBarrier
from kvherd.core.kv.events import KvEventBatch
from kvherd.core.kv.index import Holder, PrefixIndex
from kvherd.core.kv.lag import Lag
from kvherd.core.kv.reactions import BackOff, FollowState, Pause, reaction_to
from kvherd.core.kv.stream import KvStreamError, StreamBroken
from kvherd.core.kv.watch import Watch
from kvherd.ports.kv_feed import KvFeed, Subscribed
from kvherd.services.gateway.following.follow_stream import Following, Gap
from kvherd.services.gateway.following.standing import Standing
from kvherd.wire.fleet_json import KvView

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FollowOptions:
    """`grace_s`: how long credit outlives a connection. `accept_s`: how long a server may take to accept.

    `first_pause_s` to `most_pause_s`: the back-off, and `trust_pause_s` its most within `grace_s`. `long_pause_s`: the
    pause after what only an operator can mend. `skew_s`: how much an engine host's clock may be ahead of this one's.
    `settle_s`: how long after the beginning of an epoch it may turn out that something happened before it.
    """

    grace_s: float = 5.0
    accept_s: float = 10.0
    first_pause_s: float = 0.1
    most_pause_s: float = 5.0
    trust_pause_s: float = 0.5
    long_pause_s: float = 30.0
    skew_s: float = 2.0
    settle_s: float = 2.0


class Followers:
    """An async context manager that owns a task for each worker it was given.

    `clock` must be the event loop's; `wall` is compared with the time stamps of engines.
    """

    def __init__(
        self,
        index: PrefixIndex,
        *,
        options: FollowOptions | None = None,
        dice: Callable[[], float] = random.random,
        clock: Callable[[], float] | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.index = index
        self._options = options or FollowOptions()
        self._dice = dice
        self._clock = clock or (lambda: asyncio.get_running_loop().time())
        self._wall = wall
        self._followers: dict[WorkerId, _Follower] = {}
        self.standings: dict[WorkerId, Standing] = {}
        """Of every worker that is followed."""
        self._tasks: dict[WorkerId, asyncio.Task[None]] = {}
        self._group = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in list(self._followers):
            self.remove(worker)
        await self._group.__aexit__(kind, error, trace)

    def add(self, worker: WorkerId, feed: KvFeed, *, model: str) -> None:
        """Follow a worker; `model` is the name its prefixes are hashed under. One followed already starts over."""
        self.remove(worker)
        self.index.enrol(worker, model=model)
        following = Following(worker, self.index, FlushBarrier(self._options.skew_s))
        follower = _Follower(following, feed, self._options, dice=self._dice, clock=self._clock, wall=self._wall)
        self._followers[worker] = follower
        self.standings[worker] = follower.standing
        self._tasks[worker] = self._group.create_task(follower.run(), name=f"follow {worker}")

    def returned(self, worker: WorkerId) -> None:
        """Say that this worker answers again after it was down, and may be another process: it has no credit until it
        was subscribed to anew, which is begun at once.
        """
        if worker in self._followers:
            self._followers[worker].start_over()

    def rebuild(self, worker: WorkerId, reason: str) -> None:
        """Forget all that is known of this worker and subscribe from zero, at once: what is known was seen to be wrong.
        One that is not followed is ignored.
        """
        if worker in self._followers:
            self._followers[worker].rebuild(reason)

    def remove(self, worker: WorkerId) -> None:
        """Forget the worker and all that it holds, at once; one that is not followed is ignored."""
        if worker in self._followers:
            self._tasks.pop(worker).cancel()
            del self._followers[worker], self.standings[worker]
            self.index.drop(worker)

    def state(self, worker: WorkerId) -> FollowState:
        """A worker that is not followed is `UNSUPPORTED`."""
        follower = self._followers.get(worker)
        return FollowState.UNSUPPORTED if follower is None else follower.standing.state

    def credit(self, worker: WorkerId) -> bool:
        """Whether what the index says of this worker may be believed."""
        return self.state(worker) is FollowState.LIVE

    def incomplete(self, worker: WorkerId) -> bool:
        """Whether this worker may hold blocks that nobody told of: what is believed is true, and may lack some."""
        follower = self._followers.get(worker)
        return follower is not None and follower.following.incomplete

    def beyond_device(self, worker: WorkerId) -> bool:
        """Whether it holds anything in another tier than the device's."""
        return self.index.beyond_device(worker)

    def view(self, worker: WorkerId) -> KvView:
        """What is known of a worker's cache; state `unfollowed` if it was not given. `reason` says why it is not live,
        or what ended its last stream.
        """
        follower = self._followers.get(worker)
        if follower is None:
            return KvView("unfollowed")
        return KvView(
            follower.standing.state.value,
            self.index.worker_blocks(worker),
            follower.following.epoch,
            follower.reason,
            lag_s=follower.lag.last_s,
            worst_lag_s=follower.lag.worst_s(self._clock()),
            complete=not follower.following.incomplete,
        )

    def lag_s(self, worker: WorkerId) -> float | None:
        """From the engine's stamp of its last batch to the moment it was applied; None before the first."""
        follower = self._followers.get(worker)
        return None if follower is None else follower.lag.last_s

    def match(self, chain: Sequence[PrefixHash]) -> dict[Holder, int]:
        """As `PrefixIndex.match`, of workers with credit only."""
        return {holder: blocks for holder, blocks in self.index.match(chain).items() if self.credit(holder.worker)}

    def watch(self, worker: WorkerId) -> Watch:
        """Begin to watch what happens to this worker's entry, until `unwatch`."""
        watch = Watch(self._wall())
        follower = self._followers.get(worker)
        if follower is not None:
            follower.watches[id(watch)] = watch
            if follower.standing.broken_s is not None:
                watch.happened("connection lost")
        return watch

    def unwatch(self, worker: WorkerId, watch: Watch) -> None:
        follower = self._followers.get(worker)
        if follower is None or follower.watches.pop(id(watch), None) is None:
            watch.happened("cleared")  # it was followed anew since

    def answered(self, worker: WorkerId, watch: Watch) -> None:
        """The request that `watch` began with has its whole answer."""
        follower = self._followers.get(worker)
        if follower is not None and follower.following.barrier.in_doubt:
            follower.answered(watch.sent_s)

    def flushed(self, worker: WorkerId, *, ordered_s: float | None = None) -> None:
        """Say that this worker obeyed a flush: its entry is cleared at once, and older events that still come are kept
        out. `ordered_s`: when the order was sent, by the event loop's clock; None is now.
        """
        follower = self._followers.get(worker)
        if follower is not None:
            now_s = self._clock()
            ordered_s = now_s if ordered_s is None else ordered_s
            follower.following.flushed(ordered_s=ordered_s, answered_s=self._wall())
            follower.happened("cleared")

    def doubted(self, worker: WorkerId, *, ordered_s: float) -> None:
        """Say that a flush was sent to this worker at `ordered_s`, and that nobody will know whether it obeys: it has
        no credit for what it held until its events tell of a clear, or go on for a while without one.
        """
        follower = self._followers.get(worker)
        if follower is not None:
            log.warning("%s was ordered to flush and did not answer: what it holds is in doubt", worker)
            follower.following.doubted(ordered_s=ordered_s, given_up_s=self._wall())
            follower.happened("cleared")


def _raise_if_cancelled() -> None:
    """A task group that fails as it is cancelled tells of its failure alone."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


class _Follower:
    """One worker: subscribes, applies, and subscribes again, for ever."""

    def __init__(
        self,
        following: Following,
        feed: KvFeed,
        options: FollowOptions,
        *,
        dice: Callable[[], float],
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self.following = following
        self.reason = ""
        self.lag = Lag()
        self.standing = Standing(following, clock, grace_s=options.grace_s, settle_s=options.settle_s)
        self.watches: dict[int, Watch] = {}
        self._feed = feed
        self._options = options
        self._dice = dice
        self._clock = clock
        self._wall = wall
        self._back_off = BackOff(options.first_pause_s, options.most_pause_s)
        self._progress = False
        self._rebuilding = False
        self._interrupted = False
        self._busy: asyncio.Task[None] | None = None

    def happened(self, what: str) -> None:
        for watch in self.watches.values():
            watch.happened(what)

    def start_over(self) -> None:
        """What is known may be another process's: no credit until a subscription tells. Cursors are kept for it."""
        self.standing.take(FollowState.SUBSCRIBING)
        self.happened("connection lost")
        self._back_off.succeeded()
        self._interrupt()

    def rebuild(self, reason: str) -> None:
        """What is known is wrong, and what the source remembers may be: the source is left and entered again."""
        self._forget(FollowState.SUBSCRIBING, reason)
        self._back_off.succeeded()
        self._rebuilding = True
        self._interrupt()

    def answered(self, sent_s: float) -> None:
        """While a flush is in doubt: who steps on and tells no clear did not obey, and is told again by its source."""
        following = self.following
        if len(following.ranks) == 1 and following.barrier.answered(sent_s=sent_s, now_s=self._wall()):
            self._forget(FollowState.SUBSCRIBING, "it did not obey a flush that it had not answered")
            self._back_off.succeeded()
            self._interrupt()

    async def run(self) -> None:
        while True:
            try:
                async with self._feed:
                    self._rebuilding = False
                    while not self._rebuilding:
                        await self._interruptible(self._subscribe_again_and_again())
                continue
            except OperatorError as error:
                log.warning("KV events of %s: %s", self.following.worker, error)
                self._forget(FollowState.QUARANTINED, str(error))
            except Exception:  # a defect in one worker's stream must not end the gateway: that worker gets no credit
                log.exception("following %s failed unforeseen", self.following.worker)
                self._forget(FollowState.QUARANTINED, "an unforeseen error; the gateway's log has it")
                _raise_if_cancelled()
            await self._interruptible(asyncio.sleep(self._options.long_pause_s))

    async def _interruptible(self, act: Coroutine[None, None, None]) -> None:
        """Do it until `_interrupt`. Entering and leaving a source is never interrupted: each must be whole."""
        self._interrupted = False
        self._busy = asyncio.current_task()
        try:
            await act
        except asyncio.CancelledError:
            if not self._interrupted or self._busy is None or self._busy.uncancel() > 0:
                raise
        finally:
            self._busy = None

    def _interrupt(self) -> None:
        if self._busy is not None and not self._interrupted:
            self._interrupted = True
            self._busy.cancel()

    async def _subscribe_again_and_again(self) -> NoReturn:
        while True:
            try:
                await self._stream()
            except KvStreamError as error:
                await asyncio.sleep(self._react(error))

    async def _stream(self) -> NoReturn:
        self._progress = False
        following = self.following
        before = following.told
        async with aclosing(self._feed.subscribe(following.cursors, following.epoch)) as items:
            try:
                async with asyncio.timeout(self._options.accept_s):
                    first = await anext(items)
            except TimeoutError:
                raise StreamBroken(f"no answer within {self._options.accept_s:g} s") from None
            if not isinstance(first, Subscribed):
                raise TypeError("a feed yields Subscribed first")
            if first.epoch != following.epoch:
                self.standing.accepted()
            following.accepted(first.epoch)
            self._settle()
            async for item in items:
                if isinstance(item, Subscribed):
                    raise TypeError("a feed yields Subscribed once")
                now_s = self._clock()
                following.take(item, now_s=now_s)
                if isinstance(item, KvEventBatch):
                    self._timed(item, now_s)
                self._progress = self._progress or following.told != before
                self._settle()
        raise StreamBroken("the stream ended")

    def _timed(self, batch: KvEventBatch, now_s: float) -> None:
        self.lag.seen(self._wall() - batch.timestamp_s, now_s)
        if self.watches:
            least_s = self.lag.least_s(now_s) or 0.0
            for watch in self.watches.values():
                watch.saw(batch, least_lag_s=least_s)

    def _settle(self) -> None:
        """Live, unless a snapshot is under way."""
        self.standing.take(FollowState.LIVE if self.following.whole else FollowState.REPLAYING)
        if self._progress and self.following.whole:
            self._back_off.succeeded()
            self.reason = ""

    def _react(self, error: KvStreamError) -> float:
        """Take the state that this end leaves; how long to pause."""
        reaction = reaction_to(error)
        # The same gap again, with nothing in between: the server will not fill it.
        forget = reaction.forget or (isinstance(error, Gap) and not self._progress)
        log.warning("KV events of %s: %s", self.following.worker, error)
        if forget:
            self._forget(reaction.state, str(error))
        else:
            self._keep(error)
        if reaction.pause is Pause.LONG:
            return self._options.long_pause_s * (1 - self._dice() / 2)
        if reaction.pause is Pause.NONE and self._back_off.failures == 0:
            self._back_off.failures = 1  # at once, but only once: what is then told counts as a success
            return 0.0
        pause_s = self._back_off.pause_s(self._dice())
        # While credit stands on trust alone, whoever answers there may be another process already: ask often.
        return min(pause_s, self._options.trust_pause_s) if self.standing.state is FollowState.LIVE else pause_s

    def _keep(self, error: KvStreamError) -> None:
        """What is known may still be true: resume from it. Credit stays for a while if nothing is known to be amiss."""
        self.reason, standing = str(error), self.standing
        self.happened("connection lost")
        if isinstance(error, Gap):
            standing.take(FollowState.REPLAYING)
        elif standing.told is FollowState.LIVE:
            standing.broken_s = self._clock() if standing.broken_s is None else standing.broken_s
        elif standing.told is not FollowState.SUBSCRIBING:
            standing.told = FollowState.QUARANTINED

    def _forget(self, state: FollowState, reason: str) -> None:
        self.following.forget()
        self.happened("cleared")
        self.standing.take(state)
        self.reason = reason
