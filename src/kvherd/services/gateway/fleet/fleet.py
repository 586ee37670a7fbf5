"""The fleet: who is in it, what each is, and how it is. One task tends each worker for as long as it is a member."""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from kvherd.core.errors import OptionInvalid, WorkerError, WorkerTimedOut, WorkerUnreachable
from kvherd.core.fleet.health import Down, Up
from kvherd.core.fleet.roster import Member, Roster
from kvherd.core.fleet.spec import (
    DIRECT,
    GRPC,
    SIDECAR,
    WorkerChange,
    WorkerSpec,
    checked_engine_key,
    checked_labels,
    checked_weight,
    events_address,
)
from kvherd.core.fleet.under_way import Share
from kvherd.core.ids import RequestId, WorkerId
from kvherd.ports.completions import Tokenizer
from kvherd.ports.kv_feed import EventSource
from kvherd.ports.worker import Worker, WorkerFacts
from kvherd.services.gateway.fleet.fleet_edges import (
    FeedFactory,
    FleetConfig,
    Following,
    Prepare,
    TokenizerFactory,
    WorkerFactory,
)
from kvherd.services.gateway.fleet.orders import Addressee
from kvherd.services.gateway.fleet.probing import log_change, probe_deadline_s, probed
from kvherd.services.gateway.fleet.tokenizers import Tokenizers
from kvherd.services.gateway.reading.parity import compare

log: Final = logging.getLogger(__name__)


class Fleet:
    """Adds, tends and removes workers; an async context manager that owns all of their connections."""

    def __init__(
        self,
        *,
        worker_factory: WorkerFactory,
        feed_factory: FeedFactory,
        tokenizer_factory: TokenizerFactory,
        following: Following,
        prepare: Prepare | None = None,
        config: FleetConfig | None = None,
        on_restart: Callable[[WorkerId], None] = lambda _: None,
        dice: Callable[[], float] = random.random,
        remark: Callable[[WorkerId], str] = lambda _: "",
    ) -> None:
        """`remark` says of a worker that failed what is wrong on this side, if anything is."""
        self.roster = Roster()
        self._config = config or FleetConfig()
        self._worker_factory = worker_factory
        self._feed_factory = feed_factory
        self._following = following
        self._prepare = prepare
        self._on_restart = on_restart
        self._dice = dice
        self._remark = remark
        self._workers: dict[WorkerId, Worker] = {}
        self._keys: dict[WorkerId, str | None] = {}
        self._tending: dict[WorkerId, asyncio.Task[None]] = {}
        self._wakes: dict[WorkerId, asyncio.Event] = {}
        self._leaving: dict[WorkerId, asyncio.Task[bool]] = {}
        self._last_ended: dict[WorkerId, asyncio.Event] = {}
        self._retiring: dict[asyncio.Task[None], Worker] = {}
        self._tokenizers = Tokenizers(tokenizer_factory, deadline_s=self._config.tokenizer_deadline_s)
        self._group = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        self._clock = asyncio.get_running_loop().time
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        retired = tuple(self._retiring.values())  # a task that is cancelled before its first step closes nothing
        for task in (*self._tending.values(), *self._leaving.values(), *self._retiring):
            task.cancel()
        try:
            # Given the error, the group would wrap it, and a port in use would come out as an exception group.
            await self._group.__aexit__(None, None, None)
        finally:
            async with contextlib.AsyncExitStack() as closing:
                for worker in (*self._workers.values(), *retired):
                    closing.push_async_callback(worker.close)  # called though another's is cancelled

    async def prepare(self, *urls: str | None) -> None:
        """Have at hand what workers and events at these URLs need, so that `add` does not keep the event loop."""
        if self._prepare is not None:
            await asyncio.to_thread(self._prepare, [url for url in urls if url])

    def add(self, spec: WorkerSpec) -> Member:
        """Register a worker; one that is registered already is answered as it is. Raises `OptionInvalid`."""
        worker = spec.worker
        events = self._events_of(spec)
        labels, weight = checked_labels(spec.labels), checked_weight(spec.weight)
        key = checked_engine_key(worker, spec.engine_key)
        known = self.roster.get(worker)
        if known is not None:
            return known
        if len(self.roster) >= self._config.max_workers:
            raise OptionInvalid("url", f"{self._config.max_workers} workers are registered already, the limit here")
        connection = self._worker_factory(worker, key)
        connection.place_sidecar(labels.get(SIDECAR))
        member = Member(
            worker,
            events_url=events,
            replay_url=spec.replay,
            binds_events=spec.bind,
            tokenizer_from=spec.tokenizer,
            labels=labels,
            weight=weight,
            draining=spec.draining,
        )
        self.roster.join(member)
        self._workers[worker], self._keys[worker] = connection, key
        self._wakes[worker] = asyncio.Event()
        self._tending[worker] = self._group.create_task(self._tend(member), name=f"tend {worker}")
        return member

    def change(self, worker: WorkerId, change: WorkerChange) -> Member:
        """Change what an operator may of a member; all of it or nothing. Raises `OptionInvalid` or `KeyError`."""
        member = self.roster.get(worker)
        if member is None:
            raise KeyError(worker)
        wanted = {**member.labels, **(change.labels or {})}
        labels = checked_labels({name: value for name, value in wanted.items() if value is not None})
        weight = member.weight if change.weight is None else checked_weight(change.weight)
        if change.draining is False and member.leaves_at_s is not None:
            raise OptionInvalid("draining", f"{worker} is leaving; add it again when it has left")
        key = self._keys[worker] if change.engine_key is None else checked_engine_key(worker, change.engine_key)
        self._workers[worker].place_sidecar(labels.get(SIDECAR))
        member.labels, member.weight = labels, weight
        if change.draining is not None:
            member.draining = change.draining
        if key != self._keys[worker]:
            self._keys[worker] = key
            self.renew(lambda one: one == worker)
        return member

    def check(self, spec: WorkerSpec) -> None:
        """Raise the `OptionInvalid` that `add` would, whoever is a member."""
        checked_labels(spec.labels)
        checked_weight(spec.weight)
        checked_engine_key(spec.worker, spec.engine_key)
        self._events_of(spec)

    def renew(self, which: Callable[[WorkerId], bool]) -> None:
        """Connect anew to these workers, with the certificates and keys of now; what is under way ends as it is."""
        for worker in [one.worker for one in self.roster if which(one.worker) and one.leaves_at_s is None]:
            member, former = self.roster.get(worker), self._workers[worker]
            if member is None:
                continue
            self._workers[worker] = self._worker_factory(worker, self._keys[worker])
            self._workers[worker].place_sidecar(member.labels.get(SIDECAR))
            self._tending[worker].cancel()
            self._tending[worker] = self._group.create_task(self._tend(member), name=f"tend {worker}")
            retiring = self._group.create_task(self._retire(former, member, set(member.in_flight)))
            self._retiring[retiring] = former
            retiring.add_done_callback(self._retiring.pop)

    async def _retire(self, former: Worker, member: Member, under_way: set[RequestId]) -> None:
        """Close a connection once nothing of what was under way there is, or after a while."""
        patience_s = self.now_s() + self._config.retire_s
        try:
            while under_way & member.in_flight.keys() and self.now_s() < patience_s:  # noqa: ASYNC110 - rare, and rough
                await asyncio.sleep(self._config.probe.period_s)
        finally:
            await former.close()

    def _events_of(self, spec: WorkerSpec) -> str | None:
        """Where the worker's KV events are. Raises `OptionInvalid`."""
        events = events_address(spec)
        if events is not None and events.startswith(DIRECT):
            self._feed_factory(EventSource(events, spec.replay, bind=spec.bind))
        return events

    async def remove(self, worker: WorkerId, *, drain_s: float | None = None) -> bool:
        """As `begin_remove`; whether every request that was under way ended in time. Goes on when the caller leaves."""
        return await asyncio.shield(self.begin_remove(worker, drain_s=drain_s))

    def begin_remove(self, worker: WorkerId, *, drain_s: float | None = None) -> asyncio.Task[bool]:
        """Take no new request there, wait for those under way, and let it go.

        A second call joins the first, and can bring its end nearer.
        """
        bound_s = self._config.drain_s if drain_s is None else drain_s
        member, ends_at_s = self.roster.get(worker), self.now_s() + bound_s
        if worker not in self._leaving:
            self._last_ended[worker] = asyncio.Event()
            self._leaving[worker] = self._group.create_task(self._leave(worker), name=f"drain {worker}")
            if member is not None:
                member.draining, member.leaves_at_s = True, ends_at_s
        elif member is not None and drain_s is not None and member.leaves_at_s is not None:
            member.leaves_at_s = min(member.leaves_at_s, ends_at_s)
            self._last_ended[worker].set()
        return self._leaving[worker]

    def worker(self, worker: WorkerId) -> Worker:
        """The connection to a member. Raises `KeyError` if it is none."""
        return self._workers[worker]

    def tokenizer(self, model: str) -> Tokenizer | None:
        """The tokenizer of a model, if any worker that serves it has told it."""
        return self._tokenizers.of(model)

    def addressees(self) -> list[Addressee]:
        return [Addressee(self._workers[one.worker], one.kind) for one in self.roster]

    def request_succeeded(self, member: Member, request: RequestId, now_s: float) -> None:
        """A request there was answered: a passive sign of health."""
        member.answered_at_s = now_s
        member.breaker.succeeded(request, now_s)
        # Only a probe ends `Down`: an answer that began before the failure proves nothing.
        if not member.health.down:
            member.health.succeeded()

    def request_failed(self, member: Member, request: RequestId, error: WorkerError) -> None:
        """A request there failed: a passive sign. The worker is probed at once to be sure."""
        member.failures_total += 1
        member.breaker.failed(request, self.now_s(), self._dice())
        if not member.health.down:  # else it may say no more than why that is, of which the next one would speak again
            self._failed(member, error)
        if member.worker in self._wakes:
            self._wakes[member.worker].set()

    def request_ended(self, member: Member, request: RequestId, now_s: float) -> None:
        """It is no longer under way there, whatever became of it."""
        member.end(request, now_s=now_s)
        if member.worker in self._last_ended and not member.in_flight:
            self._last_ended[member.worker].set()

    async def _tend(self, member: Member) -> None:
        while True:
            try:
                await self._tend_on(member)
            except Exception:  # a defect in one adapter must cost the gateway that worker and no more
                log.exception("tending %s failed unforeseen", member.worker)
                member.health.failed("an unforeseen error; the gateway's log has it", certain=True)
                await asyncio.sleep(self._config.max_retry_s)

    async def _tend_on(self, member: Member) -> None:
        worker, wake = self._workers[member.worker], self._wakes[member.worker]
        pause_s = self._config.retry_s
        while not await self._detect(member, worker):
            await asyncio.sleep(pause_s * (0.5 + self._dice() / 2))
            pause_s = min(self._config.max_retry_s, pause_s * 2)
        while True:
            await self._tokenizers.learn(member)
            await self._check(member, worker)
            await self._compare_tokens(member, worker)
            wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.probe.period_s):
                    await wake.wait()
                    # Passive signs come in bursts; one probe answers them all.
                    await asyncio.sleep(self._config.retry_s)

    async def _detect(self, member: Member, worker: Worker) -> bool:
        try:
            async with asyncio.timeout(self._config.detect_deadline_s):
                facts = await worker.detect()
        except TimeoutError:
            member.problem = f"gave no answer within {self._config.detect_deadline_s:g} s"
            return False
        except WorkerError as error:
            member.problem = self._why(error)
            return False
        await self.prepare(facts.events_url)
        self._enrol(member, facts)
        return True

    def _enrol(self, member: Member, facts: WorkerFacts) -> None:
        """Take over what the worker said of itself; its events are followed from the first time on."""
        before = (member.models, member.ranks) if member.detected else None
        member.detected, member.kind, member.version = True, facts.kind.value, facts.version
        member.models, member.block_size, member.ranks = facts.models, facts.block_size, facts.ranks
        member.adapters, member.health_s = facts.adapters, facts.health_s
        member.max_context_tokens, member.capacity_tokens = facts.max_context_tokens, facts.capacity_tokens
        member.max_running, member.addressable = facts.max_running, facts.addressable
        if member.events_url is None:
            own = member.worker if member.worker.startswith(GRPC) else None
            member.events_url = facts.events_url or own
        if member.tokenizer_from is None:
            told = (url for url in (member.events_url, facts.events_url, member.worker) if url)
            member.tokenizer_from = next((url for url in told if url.startswith(GRPC)), None)
        if before is None:
            log.info("worker %s is %s and serves %s", member.worker, member.kind, ", ".join(member.models))
        if facts.models and (facts.models, facts.ranks) != before:
            self._follow(member)

    def _follow(self, member: Member) -> None:
        """Follow its KV events from nothing on, if it has any."""
        if member.events_url is None:
            return
        source = EventSource(member.events_url, member.replay_url, member.ranks, bind=member.binds_events)
        self._following.remove(member.worker)
        try:
            feed = self._feed_factory(source)
        except OptionInvalid as error:  # what it says of its ranks does not fit the endpoints
            log.warning("the KV events of %s cannot be followed: %s", member.worker, error)
            return
        self._following.add(member.worker, feed, model=member.models[0])

    async def _compare_tokens(self, member: Member, worker: Worker) -> None:
        """As soon as it can be, and again for as long as it does not say: does it make the same tokens of a prompt?"""
        tokenizer = self._tokenizers.of(member.models[0]) if member.models else None
        if tokenizer is None or member.given_tokens or not isinstance(member.health.verdict, Up):
            return
        if self.now_s() >= member.compare_at_s:
            await compare(member, worker, tokenizer)

    async def _check(self, member: Member, worker: Worker) -> None:
        """Probe it and ask for its load. One that returns from being down may be another process: detect it anew."""
        times = member.health.down_after
        deadline_s = probe_deadline_s(self._config.probe.deadline_s, member.health_s, times)

        def silent(so_far_s: float) -> None:
            # Some engines answer a probe between two steps only: under load, requests tell of life sooner.
            if member.health.down or member.answered_at_s < self.now_s() - deadline_s:
                self._failed(member, WorkerTimedOut(member.worker, so_far_s))

        try:
            await probed(worker, deadline_s=deadline_s, times=times, silent=silent)
        except TimeoutError:
            return
        except WorkerError as error:
            self._failed(member, error, certain=isinstance(error, WorkerUnreachable))
        else:
            before = member.health.verdict
            if isinstance(before, Down):
                if not await self._detect(member, worker):
                    return
                member.restarted()
                self._following.returned(member.worker)
                self._on_restart(member.worker)
            member.health.succeeded()
            log_change(member, before)
            await self._ask_load(member, worker)

    def _failed(self, member: Member, error: WorkerError, *, certain: bool = False) -> None:
        before = member.health.verdict
        member.health.failed(self._why(error), certain=certain)
        log_change(member, before)

    async def _ask_load(self, member: Member, worker: Worker) -> None:
        outstanding, sent = len(member.in_flight), member.requests_total
        try:
            async with asyncio.timeout(self._config.load_deadline_s):
                load = await worker.load()
        except (TimeoutError, WorkerError):
            return  # many servers tell no load; what the gateway sent there is counted anyway
        member.running, member.waiting, member.used_tokens = load.running, load.waiting, load.used_tokens
        member.shares = {rank: Share(one.running, one.waiting, one.used_tokens) for rank, one in load.ranks.items()}
        # Of ours, those that were under way when it was asked or were sent since may be among them.
        member.foreign = max(0, load.running + load.waiting - outstanding - (member.requests_total - sent))
        member.capacity_tokens = load.capacity_tokens or member.capacity_tokens

    async def _leave(self, worker: WorkerId) -> bool:
        member, ended = self.roster.get(worker), self._last_ended[worker]
        if member is None:
            del self._leaving[worker], self._last_ended[worker]
            return True
        while member.in_flight and member.leaves_at_s is not None and member.leaves_at_s > self.now_s():
            ended.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(member.leaves_at_s):
                    await ended.wait()
        drained = not member.in_flight
        self._tending[worker].cancel()
        self._following.remove(worker)
        self.roster.leave(worker)
        self._on_restart(worker)
        connection = self._workers.pop(worker)
        del self._tending[worker], self._wakes[worker], self._last_ended[worker], self._keys[worker]
        self._leaving.pop(worker, None)
        await connection.close()
        log.info("worker %s left%s", worker, "" if drained else "; its requests were cut off")
        return drained

    def _why(self, error: WorkerError) -> str:
        """The error's sentence without the worker's name, which stands beside it wherever it is shown."""
        return str(error).removeprefix(f"{error.worker} ") + self._remark(error.worker)

    def now_s(self) -> float:
        return self._clock()
