"""Keeps the fleet to what was written down: the command line, a file, and what host names resolve to.

Workers that someone added at run time are left alone. One that was written down and that an operator removed stays
away until what is written about it changes.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Final, Self
from urllib.parse import urlsplit

from kvherd.core.errors import OptionInvalid
from kvherd.core.fleet.addresses import HostAddresses
from kvherd.core.fleet.roster import Member
from kvherd.core.fleet.spec import WorkerChange, WorkerSpec
from kvherd.core.ids import WorkerId
from kvherd.services.gateway.fleet.fleet import Fleet

log = logging.getLogger(__name__)

Resolve = Callable[[str], Awaitable[list[str]]]
"""Every address of a host name, in any order. Raises `OSError`."""

LOOK_S: Final = 0.5
RESOLVE_DEADLINE_S: Final = 5.0
_MOST_SAID: Final = 1000


class Staffing:
    """An async context manager. Inside it, what `want` was told comes true as soon as it can, and stays true."""

    def __init__(self, fleet: Fleet, *, resolve: Resolve, names_period_s: float = 10.0) -> None:
        self._fleet = fleet
        self._resolve = resolve
        self._names_period_s = names_period_s
        self._wanted: dict[str, tuple[WorkerSpec, ...]] = {}
        self._hosts: dict[str, HostAddresses] = {}
        self._unresolved: set[str] = set()
        self._placed: dict[WorkerId, WorkerSpec] = {}
        self._returning: set[WorkerId] = set()
        self._said: set[str] = set()
        self._group = asyncio.TaskGroup()
        self._news = asyncio.Event()
        self._some_return = asyncio.Event()

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        self._tasks = [self._group.create_task(work) for work in (self._look(), self._ask_names())]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await self._group.__aexit__(None, None, None)

    def want(self, source: str, specs: Iterable[WorkerSpec]) -> None:
        """These workers and no others are wanted by this source. Raises `OptionInvalid`, and then changes nothing."""
        wanted = tuple(specs)
        for spec in wanted:
            self._fleet.check(spec.at("127.0.0.1") if spec.resolve else spec)
        self._wanted[source] = wanted
        self._settle()
        self._news.set()

    # --- towards what is wanted -----------------------------------------------------------------------------

    async def _look(self) -> None:
        while True:
            await self._some_return.wait()
            await asyncio.sleep(LOOK_S)
            self._settle_safely()
            if not self._returning:
                self._some_return.clear()

    def _have_return(self, worker: WorkerId) -> None:
        """As soon as it has left."""
        self._returning.add(worker)
        self._some_return.set()

    def _settle_safely(self) -> None:
        try:
            self._settle()
        except Exception:  # a defect in one worker's entry must not cost the gateway
            log.exception("bringing the fleet to what is written down failed unforeseen")

    def _settle(self) -> None:
        wanted = self._workers_wanted()
        for worker, spec in wanted.items():
            try:
                self._bring(worker, spec)
            except OptionInvalid as error:
                if self._placed.get(worker) != spec:
                    log.warning("worker %s cannot join: %s", worker, error)
                self._placed[worker] = spec
        for worker in [one for one in self._placed if one not in wanted]:
            del self._placed[worker]
            self._returning.discard(worker)
            if self._fleet.roster.get(worker) is not None:
                log.info("worker %s is wanted no longer: it drains", worker)
                self._fleet.begin_remove(worker)

    def _workers_wanted(self) -> Mapping[WorkerId, WorkerSpec]:
        """Named twice, what was said first holds."""
        wanted: dict[WorkerId, WorkerSpec] = {}
        for spec in (spec for specs in self._wanted.values() for spec in specs):
            for one in self._places(spec):
                try:
                    wanted.setdefault(one.worker, one)
                except OptionInvalid as error:  # a resolver may say anything, link-local addresses too
                    self._say_once(f"{_host(spec)} resolves to what no worker may be: {error}")
        return wanted

    def _say_once(self, sentence: str) -> None:
        if sentence not in self._said and len(self._said) < _MOST_SAID:
            self._said.add(sentence)
            log.warning("%s", sentence)

    def _places(self, spec: WorkerSpec) -> list[WorkerSpec]:
        if not spec.resolve:
            return [spec]
        host = _host(spec)
        current = self._hosts[host].current if host in self._hosts else ()
        placed = (spec.at(address) for address in current)
        return [_named(one, host) for one in placed]

    def _bring(self, worker: WorkerId, spec: WorkerSpec) -> None:
        """Have it in the fleet as it is wanted. Raises `OptionInvalid`."""
        before, member = self._placed.get(worker), self._fleet.roster.get(worker)
        if before == spec and worker not in self._returning:
            return
        if member is None:
            self._fleet.add(spec)
            self._returning.discard(worker)
        elif member.leaves_at_s is not None:
            self._have_return(worker)
        elif before is None or spec.connects_as(before):
            self._fleet.change(worker, _to(member, spec))
        else:
            log.info("worker %s is to be reached otherwise: it drains and joins again", worker)
            self._fleet.begin_remove(worker)
            self._have_return(worker)
        self._placed[worker] = spec

    # --- host names -------------------------------------------------------------------------------------------

    async def _ask_names(self) -> None:
        while True:
            self._news.clear()
            hosts = {_host(spec) for specs in self._wanted.values() for spec in specs if spec.resolve}
            self._hosts = {host: kept for host, kept in self._hosts.items() if host in hosts}
            async with asyncio.TaskGroup() as group:
                for host in hosts:
                    group.create_task(self._ask(host))
            self._settle_safely()
            try:
                async with asyncio.timeout(self._names_period_s if hosts else None):
                    await self._news.wait()
            except TimeoutError:
                continue

    async def _ask(self, host: str) -> None:
        known = self._hosts.setdefault(host, HostAddresses())
        try:
            async with asyncio.timeout(RESOLVE_DEADLINE_S):
                told = await self._resolve(host)
        except (OSError, UnicodeError, TimeoutError) as error:
            if host not in self._unresolved:  # said once: it is asked for again and again
                reason = str(error) or f"no answer within {RESOLVE_DEADLINE_S:g} s"
                log.warning("%s does not resolve: %s; its %d workers stay", host, reason, len(known.current))
            self._unresolved.add(host)
            return
        self._unresolved.discard(host)
        before = known.current
        after = known.answered(sorted(told))
        if set(before) != set(after):
            log.info("%s resolves to %s", host, ", ".join(after) or "nothing")


async def resolve_host(host: str) -> list[str]:
    """By the resolver of this machine."""
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=1)  # one entry for each address, not three
    return list(dict.fromkeys(str(address[4][0]) for address in found))


def _host(spec: WorkerSpec) -> str:
    return urlsplit(spec.worker).hostname or ""


def _named(spec: WorkerSpec, host: str) -> WorkerSpec:
    """Labelled with the name that it was found by."""
    return replace(spec, labels={"host": host, **spec.labels}, resolve=False)


def _to(member: Member, spec: WorkerSpec) -> WorkerChange:
    gone = dict.fromkeys(member.labels.keys() - spec.labels.keys())
    return WorkerChange({**gone, **spec.labels}, spec.weight, spec.draining, spec.engine_key or "")
