"""An engine's scheduler processes behind ZMQ sockets: `ports.scheduler.Scheduler` over `wire/scheduler_ipc`.

    servicer PUSH ──► ipc://DIR/rank{r}.in      (one socket a rank)
    servicer PULL ◄── ipc://DIR/out             (all ranks)

One task reads; everything else is calls from the servicer. What goes wrong for good (a rank that died, a socket that
broke) fails every request and order in flight at once and every later one: there is no silent dead loop.

On the sockets a request has a name of its own, its id and a number: an id may be used again at once, and what a rank
still says of its former bearer must not reach the new one.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Self, assert_never

import zmq
import zmq.asyncio

from kvherd.adapters.zmq_orders import OrderDesk
from kvherd.core.engine.generation import Finish, FinishReason, GenerationRequest, TokenDelta
from kvherd.core.engine.inbox import Inbox
from kvherd.core.engine.placement import RankPlacement
from kvherd.core.engine.profile import ProfileRequest
from kvherd.core.engine.reports import OrderReport, RankFacts, RankLoad
from kvherd.core.errors import (
    EngineError,
    EngineStopping,
    FrameInvalid,
    QueueFull,
    RequestDuplicate,
    SchedulerDied,
    StartFailed,
)
from kvherd.core.ids import Rank, RequestId
from kvherd.wire import scheduler_ipc as ipc

log = logging.getLogger(__name__)

UNSENT_FRAMES = 100_000
FRAMES_AT_ONCE = 100
ORDER_GRACE_S = 1.0
"""How long beyond its own time-out an order waits for the ranks to say that it timed out."""


@dataclass(slots=True)
class _Stream:
    """One live generation. `woken` is set when the inbox or the error has news."""

    rank: Rank
    wire_name: RequestId
    inbox: Inbox
    waiting_tokens: int
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    error: EngineError | None = None


class ZmqScheduler:
    """Use as an async context manager around the rank processes: enter it before they start, leave it after they ended.
    Entering raises `StartFailed` where no socket can be made.

    `on_failed` is called once, with the reason, when the scheduler can never serve again.
    """

    def __init__(self, ipc_dir: Path, *, on_failed: Callable[[EngineError], None] = lambda _: None) -> None:
        self._ipc_dir = ipc_dir
        self._on_failed = on_failed
        self._context = zmq.Context()
        self._news = zmq.asyncio.Context(self._context).socket(zmq.PULL)
        self._to_ranks: dict[Rank, zmq.Socket[bytes]] = {}
        self._facts: dict[Rank, RankFacts] = {}
        self._loads: dict[Rank, RankLoad] = {}
        self._streams: dict[RequestId, _Stream] = {}
        self._by_wire_name: dict[RequestId, _Stream] = {}
        self._wire_numbers = itertools.count(1)
        self._desk = OrderDesk(self._send)
        self._all_ready = asyncio.Event()
        self._deserted = asyncio.Event()
        self._deserted.set()
        self._placement: RankPlacement | None = None
        self._expected = 0
        self._failure: EngineError | None = None
        self._reader = asyncio.TaskGroup()
        self._reading: asyncio.Task[None] | None = None
        self.bad_frames = 0

    async def __aenter__(self) -> Self:
        try:
            self._news.bind(f"ipc://{self._ipc_dir}/out")
        except zmq.ZMQError as error:
            self._close()  # a context with an open socket stands still when it is collected
            raise StartFailed("the scheduler", f"its socket cannot be made: {error.strerror}") from error
        await self._reader.__aenter__()
        self._reading = self._reader.create_task(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._fail(EngineStopping())
        if self._reading is not None:
            self._reading.cancel()
        try:
            await self._reader.__aexit__(None, None, None)
        finally:
            self._close()

    def _close(self) -> None:
        for socket in [*self._to_ranks.values(), self._news]:
            socket.close(linger=0)
        self._context.term()

    # --- what the port promises ------------------------------------------------------------

    @property
    def ranks(self) -> Sequence[RankFacts]:
        return [self._facts[rank] for rank in sorted(self._facts)]

    @property
    def loads(self) -> Sequence[RankLoad]:
        return [self._loads[rank] for rank in sorted(self._loads)]

    @property
    def failure(self) -> EngineError | None:
        """Why nothing can be served any more; None while it can."""
        return self._failure

    @property
    def late_answers(self) -> int:
        return self._desk.late_answers

    @property
    def open_orders(self) -> int:
        return len(self._desk)

    @property
    def live_requests(self) -> int:
        return len(self._streams)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenDelta, None]:
        """As the port has it."""
        stream = self._admit(request)
        try:
            while True:
                await stream.woken.wait()
                stream.woken.clear()
                delta = stream.inbox.take()
                if delta is not None:
                    if delta.finish is not None:
                        self._free(request.request, stream)
                    yield delta  # more may come in while the reader has this one, its end too
                    if delta.finish is not None:
                        return
                if stream.error is not None and not stream.inbox.finished:
                    raise stream.error
        finally:
            self._release(request.request, stream)

    async def abort(self, request: RequestId, *, reason: str = "") -> bool:
        stream = self._streams.get(request)
        if stream is None or stream.inbox.finished:
            return False
        self._abort_in_rank(stream, reason)
        del self._streams[request]  # its stream ended: the id is free
        last = stream.inbox.latest
        finish = Finish(FinishReason.ABORT, message=reason or "aborted")
        stream.inbox.put(replace(last, token_ids=(), logprobs=(), finish=finish))
        stream.woken.set()
        return True

    async def flush(self, *, timeout_s: float, hold: bool = False) -> OrderReport:
        message = ipc.FlushOrder(self._desk.new_id(), timeout_s, hold, time.monotonic())
        report = await self._order(message, timeout_s + ORDER_GRACE_S)
        if self._placement is not None and report.done:
            self._placement.cleared()
        return report

    async def state(self, *, timeout_s: float = 5.0) -> OrderReport:
        return await self._order(ipc.StateOrder(self._desk.new_id()), timeout_s)

    async def start_profile(self, profile: ProfileRequest, *, timeout_s: float) -> OrderReport:
        """As the port has it. A rank that could begin while another could not is told to forget it."""
        order = self._desk.new_id()
        report: OrderReport | None = None
        try:
            report = await self._order(ipc.StartProfile(order, profile), timeout_s)
            return report
        finally:
            if report is None or not report.done:
                self._desk.withdraw(order, sorted(self._facts))

    async def stop_profile(self, *, timeout_s: float) -> OrderReport:
        return await self._order(ipc.StopProfile(self._desk.new_id()), timeout_s)

    # --- start and end ------------------------------------------------------------

    async def ready(self, ranks: int, *, deadline_s: float) -> None:
        """Return once so many ranks said that they are ready. Raises `StartFailed` at the deadline, or why not."""
        self._expected = ranks
        self._note_ready()
        try:
            async with asyncio.timeout(deadline_s):
                await self._all_ready.wait()
        except TimeoutError:
            missing = sorted(set(range(ranks)) - set(self._facts))
            raise StartFailed(f"rank {missing[0]}", f"it was not ready within {deadline_s:g} s") from None
        if self._failure is not None:
            raise self._failure

    def rank_died(self, rank: Rank, reason: str) -> None:
        """Fail everything in flight at once: this rank will not answer any more."""
        self._fail(SchedulerDied(rank, reason))

    def refuse_new(self) -> None:
        """Take no new request; those in flight go on."""
        if self._failure is None:
            self._failure = EngineStopping()

    async def drain(self, *, within_s: float) -> None:
        """Take no new request, let those alive end within that time, and end the rest with `EngineStopping`.

        Orders that still wait then end so too.
        """
        self.refuse_new()
        try:
            async with asyncio.timeout(within_s):
                await self._deserted.wait()
        except TimeoutError:
            log.info("some requests were not done within %g s", within_s)
        self._fail(EngineStopping())

    # --- requests ------------------------------------------------------------

    def _admit(self, request: GenerationRequest) -> _Stream:
        if self._failure is not None:
            raise self._failure
        if request.request in self._streams:
            raise RequestDuplicate(request.request)
        rank = Rank(request.rank) if request.rank is not None else self._place(request)
        prompt_tokens = len(request.prompt_token_ids)
        wire_name = RequestId(f"{request.request}#{next(self._wire_numbers)}")
        stream = _Stream(rank, wire_name, Inbox(prompt_tokens), prompt_tokens)
        self._send(rank, ipc.Submit(replace(request, request=wire_name)))
        self._streams[request.request] = self._by_wire_name[wire_name] = stream
        self._deserted.clear()
        return stream

    def _release(self, request: RequestId, stream: _Stream) -> None:
        """The stream ended, by itself or because its reader left."""
        self._free(request, stream)
        self._by_wire_name.pop(stream.wire_name, None)
        if not self._by_wire_name:
            self._deserted.set()
        if not stream.inbox.finished and stream.error is None:
            self._abort_in_rank(stream, "the reader left")

    def _free(self, request: RequestId, stream: _Stream) -> None:
        """The id may be used again: before its reader has the end, for he may do so at once."""
        if self._streams.get(request) is stream:
            del self._streams[request]

    def _abort_in_rank(self, stream: _Stream, reason: str) -> None:
        with contextlib.suppress(QueueFull):  # a rank that takes no frame at all is dead or will be declared so
            self._send(stream.rank, ipc.Abort(stream.wire_name, reason))

    def _place(self, request: GenerationRequest) -> Rank:
        if len(self._facts) == 1:
            return next(iter(self._facts))
        if self._placement is None:
            facts = self.ranks[0]
            blocks = facts.capacity_tokens // facts.block_size
            self._placement = RankPlacement(block_size=facts.block_size, blocks=blocks)
        load = dict.fromkeys(sorted(self._facts), (0, 0))
        for stream in self._streams.values():
            tokens, requests = load[stream.rank]
            load[stream.rank] = tokens + stream.waiting_tokens, requests + 1
        return self._placement.choose(request, load)

    # --- orders ------------------------------------------------------------

    async def _order(self, message: ipc.Order, wait_s: float) -> OrderReport:
        if self._failure is not None:
            raise self._failure
        return await self._desk.give(message, sorted(self._facts), wait_s)

    # --- sockets ------------------------------------------------------------

    def _send(self, rank: Rank, message: ipc.ToRank) -> None:
        try:
            self._to_ranks[rank].send(ipc.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise QueueFull(UNSENT_FRAMES) from None

    async def _read(self) -> None:
        for turn in itertools.count(1):
            if turn % FRAMES_AT_ONCE == 0:
                await asyncio.sleep(0)  # a receive that finds a frame does not wait: others must have their turn
            try:
                frame = await self._news.recv()
                self._take(ipc.decode_from_rank(frame))
            except zmq.Again:
                continue
            except FrameInvalid as error:
                self.bad_frames += 1
                log.warning("dropped bad frame number %d: %s", self.bad_frames, error)
            except asyncio.CancelledError:
                if self._failure is None:  # not by us: pyzmq cancels a receive whose socket was closed
                    log.critical("the socket of the schedulers was closed")
                    self._fail(SchedulerDied(0, "its socket was closed"))
                raise
            except zmq.ZMQError as error:
                if not isinstance(self._failure, EngineStopping):
                    log.exception("the socket of the schedulers broke")
                self._fail(SchedulerDied(0, f"its socket broke: {error}"))
                return

    def _take(self, message: ipc.FromRank) -> None:
        match message:
            case ipc.Ready(facts):
                self._meet(facts)
            case ipc.Stepped(rank, progress, load):
                self._loads[rank] = load
                for each in progress:
                    self._deliver(each)
            case ipc.OrderAnswered(answer):
                self._desk.take(answer)
            case ipc.Fatal(rank, reason):
                self._fail(SchedulerDied(rank, reason))
            case _:
                assert_never(message)

    def _meet(self, facts: RankFacts) -> None:
        socket = self._context.socket(zmq.PUSH)
        socket.sndhwm = UNSENT_FRAMES
        socket.connect(f"ipc://{self._ipc_dir}/rank{facts.rank}.in")
        self._to_ranks[facts.rank] = socket
        self._facts[facts.rank] = facts
        self._loads.setdefault(facts.rank, _no_load(facts))
        self._note_ready()

    def _note_ready(self) -> None:
        if self._expected and len(self._facts) >= self._expected:
            self._all_ready.set()

    def _deliver(self, each: ipc.Progress) -> None:
        stream = self._by_wire_name.get(each.request)
        if stream is None:
            return  # its reader left, and the abort has crossed this
        stream.inbox.put(
            TokenDelta(
                each.token_ids,
                each.prompt_tokens,
                each.completion_tokens,
                each.cached_tokens,
                each.logprobs,
                each.finish,
                each.host_tokens,
                each.storage_tokens,
            )
        )
        if each.token_ids:
            stream.waiting_tokens = 1
        stream.woken.set()

    def _fail(self, error: EngineError) -> None:
        first = self._failure is None or isinstance(self._failure, EngineStopping)
        self._failure = self._failure if not first else error
        for stream in self._by_wire_name.values():
            stream.error = stream.error or error
            stream.woken.set()
        self._desk.fail(error)
        self._all_ready.set()
        if first and not isinstance(error, EngineStopping):
            self._on_failed(error)


def _no_load(facts: RankFacts) -> RankLoad:
    return RankLoad(0, 0, 0, 0, 0, facts.capacity_tokens, facts.max_running)
