"""The order loop of a rank: whatever happens, tell the scheduler; whatever it says, carry out.

It waits in one place, until a frame, a replay question, a finished step, a signal, the end of standard input, or
the next deadline. The model runs in its own thread, so orders are answered while a step runs.
"""

import logging
import os
import time
from typing import assert_never

import zmq

from kvherd.core.engine.reports import OrderAnswer, RankLoad
from kvherd.core.errors import FrameInvalid, RequestDuplicate
from kvherd.core.ids import Rank
from kvherd.core.kv.events import KvEvent
from kvherd.core.scheduler.scheduler import Progress, Scheduler
from kvherd.core.scheduler.steps import FetchPlan, News
from kvherd.runtime.kv_publisher import KvPublisher
from kvherd.runtime.profiler import Profiler
from kvherd.runtime.rank_link import RankLink
from kvherd.runtime.step_thread import Fetched, Threads
from kvherd.wire import scheduler_ipc as ipc

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
PARENT_GONE = "the parent process is gone"


class RankLoop:
    """Drives one scheduler until it is told to stop. `wake_fd` is readable when a step ended or a signal came."""

    def __init__(
        self,
        rank: Rank,
        scheduler: Scheduler,
        link: RankLink,
        publisher: KvPublisher,
        profiler: Profiler,
        *,
        wake_fd: int,
        stdin_fd: int,
    ) -> None:
        self._rank = rank
        self._scheduler = scheduler
        self._profiler = profiler
        self._link = link
        self._publisher = publisher
        self._wake_fd = wake_fd
        self._stdin_fd = stdin_fd
        self._stopping: str | None = None
        self._progress: list[Progress] = []
        self._answers: list[OrderAnswer] = []
        self._told: RankLoad | None = None
        self._heartbeat_due_s = 0.0
        self._bad_frames = 0
        self._poller = zmq.Poller()
        self._poller.register(link.orders, zmq.POLLIN)
        self._poller.register(publisher.replay_socket, zmq.POLLIN)
        self._poller.register(wake_fd, zmq.POLLIN)
        self._poller.register(stdin_fd, zmq.POLLIN)

    def stop(self, reason: str) -> None:
        """End `run` soon; safe in a signal handler."""
        self._stopping = self._stopping or reason

    def run(self, threads: Threads) -> str:
        """Serve until told to stop; answers why. Raises what the model raises."""
        while self._stopping is None:
            events = dict(self._poller.poll(self._patience_ms()))
            if self._wake_fd in events:
                os.read(self._wake_fd, 4096)
            if self._stdin_fd in events and not os.read(self._stdin_fd, 4096):
                self.stop(PARENT_GONE)
            self._turn(threads)
        self._profiler.close()
        self._tell(self._scheduler.abort_all(self._stopping, time.monotonic()))
        self._say(time.monotonic())
        return self._stopping

    def _turn(self, threads: Threads) -> None:
        for frame in self._link.receive():
            self._take(frame)
        self._publisher.serve_replays()
        now_s = time.monotonic()
        self._finish(threads, now_s)
        self._answers += self._profiler.tend()
        deadline_s = self._scheduler.next_deadline_s
        if deadline_s is not None and deadline_s <= now_s:
            self._tell(self._scheduler.expire(now_s))
        self._link.push()
        self._ask_store(threads, now_s)  # before the step: whoever need not wait for the store is in it
        if not self._scheduler.stepping and not self._link.behind:
            self._start_step(threads)
        self._start_copies(threads)
        self._say(now_s)

    def _finish(self, threads: Threads, now_s: float) -> None:
        """Take what the threads have done."""
        if threads.steps.finished:
            self._tell(self._scheduler.complete_step(threads.steps.result(), now_s))
            self._profiler.step_ended()
        if threads.writes.finished:
            threads.writes.result()
            self._tell(self._scheduler.complete_write(now_s))
        if threads.asks is not None and threads.asks.finished:
            answer = threads.asks.result()
            if isinstance(answer, Fetched):
                self._tell(self._scheduler.complete_fetch(answer.verified, now_s))
            else:
                self._tell(self._scheduler.complete_look(answer.blocks, now_s))
        if threads.puts is not None and threads.puts.finished:
            self._tell(self._scheduler.complete_put(threads.puts.result(), now_s))

    def _ask_store(self, threads: Threads, now_s: float) -> None:
        if threads.asks is None:
            return
        plan = self._scheduler.plan_ask(now_s)
        if plan is not None:
            if isinstance(plan, FetchPlan):
                self._publish(plan.events)
            threads.asks.start(plan)

    def _start_step(self, threads: Threads) -> None:
        plan = self._scheduler.plan_step()
        if plan is not None:
            self._publish(plan.events)
            self._profiler.step_starts(plan)
            threads.steps.start(plan)

    def _start_copies(self, threads: Threads) -> None:
        writes = self._scheduler.plan_write()
        if writes is not None:
            self._publish(writes.events)
            threads.writes.start(writes)
        if threads.puts is not None:
            puts = self._scheduler.plan_put()
            if puts is not None:
                threads.puts.start(puts)

    def _take(self, frame: bytes) -> None:
        """Carry out one message. A bad one costs a line in the log and nothing else."""
        try:
            message = ipc.decode_to_rank(frame)
        except FrameInvalid as error:
            self._bad_frames += 1
            log.warning("dropped bad frame number %d: %s", self._bad_frames, error)
            return
        try:
            self._obey(message)
        except RequestDuplicate as error:
            log.warning("dropped a request: %s", error)

    def _obey(self, message: ipc.ToRank) -> None:
        now_s = time.monotonic()
        match message:
            case ipc.Submit(request):
                self._tell(self._scheduler.submit(request, now_s))
            case ipc.Abort(request, reason):
                self._tell(self._scheduler.abort(request, reason, now_s))
            case ipc.FlushOrder(order, timeout_s, hold, asked_s):
                news = self._scheduler.flush(order, timeout_s=timeout_s, hold=hold, now_s=now_s, asked_s=asked_s)
                self._tell(news)
            case ipc.StartProfile(order, profile):
                self._answer(self._profiler.start(order, profile))
            case ipc.StopProfile(order, profile_id):
                self._answer(self._profiler.stop(order, profile_id))
            case ipc.Withdraw(order):
                self._profiler.withdraw(order)
                self._tell(self._scheduler.withdraw(order, now_s))
            case ipc.StateOrder(order):
                self._tell(self._scheduler.state(order, now_s))
            case ipc.Stop(reason):
                self.stop(reason or "the engine is stopping")
            case _:
                assert_never(message)

    def _tell(self, news: News) -> None:
        self._publish(news.events)
        self._progress += news.progress
        self._answers += news.answers

    def _answer(self, answer: OrderAnswer | None) -> None:
        if answer is not None:
            self._answers.append(answer)

    def _publish(self, events: tuple[KvEvent, ...]) -> None:
        if events:
            self._publisher.publish(time.time(), events)

    def _say(self, now_s: float) -> None:
        """Send what there is to say; the load at least once a second, and whenever it changed."""
        load = self._scheduler.load(now_s)
        if self._progress or now_s >= self._heartbeat_due_s or self._differs(load):
            progress = tuple(_progress(each) for each in self._progress)
            self._link.send(ipc.Stepped(self._rank, progress, load))
            self._told = load
            self._heartbeat_due_s = now_s + HEARTBEAT_S
        for answer in self._answers:  # after the progress: whoever hears of a flush has heard of what it waited for
            self._link.send(ipc.OrderAnswered(answer))
        self._progress.clear()
        self._answers.clear()

    def _differs(self, load: RankLoad) -> bool:
        told = self._told
        return told is None or _what_matters_at_once(load) != _what_matters_at_once(told)

    def _patience_ms(self) -> int:
        """How long nothing can be due. Also keeps the poller's interest in the news socket right."""
        if self._link.behind:
            self._poller.register(self._link.news, zmq.POLLOUT)
        elif self._link.news in self._poller:
            self._poller.unregister(self._link.news)
        if self._publisher.replaying:
            return 0
        due_s = min(self._heartbeat_due_s, self._scheduler.next_deadline_s or self._heartbeat_due_s)
        return max(0, int((due_s - time.monotonic()) * 1000) + 1)


def _what_matters_at_once(load: RankLoad) -> tuple[int, ...]:
    return load.running, load.waiting, load.used_tokens, load.flushes_waiting


def _progress(each: Progress) -> ipc.Progress:
    request, delta = each
    return ipc.Progress(
        request,
        delta.token_ids,
        delta.prompt_tokens,
        delta.completion_tokens,
        delta.cached_tokens,
        delta.logprobs,
        delta.finish,
        delta.host_tokens,
        delta.storage_tokens,
    )
