"""What an operator sees and orders. HTTP and gRPC are two ways to it."""

import asyncio
import contextlib
import math
from collections.abc import Callable, Mapping

from kvherd.core.errors import FieldInvalid, NotAllowed, OptionInvalid, WorkerError, WorkerUnknown
from kvherd.core.fleet.fanout import FanoutReport
from kvherd.core.fleet.host_names import HostNames, is_loopback
from kvherd.core.fleet.keyring import Keyring, key_digest, same_secret
from kvherd.core.fleet.roster import Member
from kvherd.core.fleet.spec import WorkerChange, WorkerSpec, events_address
from kvherd.core.ids import WorkerId
from kvherd.ports.tls import WorkerTls
from kvherd.services.gateway.fleet.config_file import ConfigFile
from kvherd.services.gateway.fleet.fleet import Fleet
from kvherd.services.gateway.fleet.orders import Addressee, FlushHeed, flush_fleet, profile_fleet
from kvherd.services.gateway.metrics import GatewayMetrics
from kvherd.wire.audit_json import Audited, audit_report
from kvherd.wire.engine_metrics import merge_metrics
from kvherd.wire.fleet_json import Json, KvView, under_way, worker_entry

LONGEST_FLUSH_S = 3600.0
_CHANGED_IN_PLACE = ("labels", "weight", "draining", "engine_key")
METRICS_S = 5.0
_NOT_THESE = "and no proxies or web pages; set one (--admin-key)"


class Console:
    """Views of the fleet and orders to it, each with a bound on its time."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        kv: Callable[[WorkerId], KvView],
        heed: FlushHeed,
        metrics: GatewayMetrics,
        admin_key: str | None = None,
        keyring: Keyring | None = None,
        tls: WorkerTls | None = None,
        names: HostNames | None = None,
    ) -> None:
        """`names` are what the gateway may be called where nothing but being there admits; None: anything."""
        self.fleet = fleet
        self.metrics = metrics
        self.kv = kv
        self._heed = heed
        self._tls = tls
        self._names = names
        self.config: ConfigFile | None = None
        self._keyring = keyring or Keyring()
        self._admin_key = key_digest(admin_key) if admin_key else None

    def admit(self, *, host: str, authorization: str, asked_as: str = "") -> None:
        """Raise `NotAllowed` unless the caller has the admin key, or none is set and the caller is on this machine;
        then also `HostUnknown` if it is asked by a name that is not its own.
        """
        if self._admin_key is None:
            if not is_loopback(host):
                raise NotAllowed(f"without an admin key only callers on this machine are served, {_NOT_THESE}")
            if self._names is not None:
                self._names.check(asked_as)
            return
        if not self._is_admin_key(authorization):
            raise NotAllowed("give the admin key as `Authorization: Bearer KEY`")

    def admit_client(self, *, host: str, authorization: str, asked_as: str = "") -> None:
        """Raise `KeyUnknown` unless the caller has a data key or is an operator, or no key is wanted; then as
        `admit_anybody`.
        """
        if self._keyring.open:
            self.admit_anybody(host=host, authorization=authorization, asked_as=asked_as)
        elif not self._is_admin_key(authorization):
            if self._admin_key is None and is_loopback(host) and not authorization:
                return self.admit(host=host, authorization=authorization, asked_as=asked_as)
            self._keyring.account(authorization.encode())
        return None

    def admit_anybody(self, *, host: str, authorization: str, asked_as: str = "") -> None:
        """Raise `HostUnknown` if it is asked by a name that is not its own, and nobody has reason to."""
        if self._names is not None and self._names.closed and not self._is_admin_key(authorization):
            self._names.check(asked_as)

    def _is_admin_key(self, authorization: str) -> bool:
        presented = authorization.removeprefix("Bearer ").encode()
        return self._admin_key is not None and same_secret(presented, self._admin_key)

    async def flush(self, timeout_s: float, *, hold: bool = False) -> FanoutReport:
        """Order every worker to clear its cache, and return within `timeout_s` + 5 s. Raises `FieldInvalid`."""
        if not math.isfinite(timeout_s) or not 0 <= timeout_s <= LONGEST_FLUSH_S:
            raise FieldInvalid("timeout", f"must be a number of seconds from 0 to {LONGEST_FLUSH_S:g}")
        report = await flush_fleet(self.fleet.addressees(), timeout_s=timeout_s, hold=hold, heed=self._heed)
        self.metrics.flushed(report)
        return report

    async def start_profile(self, worker: str | None, fields: Mapping[str, object]) -> FanoutReport:
        """Begin a profile at that worker, or at `all`. Raises `FieldInvalid` or `WorkerUnknown`."""
        return await profile_fleet(self._profiled(worker), lambda one: one.start_profile(fields))

    async def stop_profile(self, worker: str | None) -> FanoutReport:
        return await profile_fleet(self._profiled(worker), lambda one: one.stop_profile())

    def _profiled(self, worker: str | None) -> list[Addressee]:
        """Fleets that prefill and decode apart are profiled worker by worker, so that all is only who is named so."""
        fleet = self.fleet.addressees()
        if worker == "all" or (worker is None and len(fleet) <= 1):
            return fleet
        if worker is None:
            raise FieldInvalid("worker", "is missing; name one with ?worker=URL, or the whole fleet with ?worker=all")
        found = self._find(worker)
        return [to for to in fleet if to.worker.id == found.worker]

    async def engine_metrics(self) -> bytes:
        """What all engines tell, each sample labelled with its worker; who tells nothing in time is left out."""
        told: dict[WorkerId, bytes] = {}

        async def ask(to: Addressee) -> None:
            with contextlib.suppress(WorkerError, TimeoutError):
                async with asyncio.timeout(METRICS_S):
                    told[to.worker.id] = await to.worker.metrics()

        async with asyncio.TaskGroup() as group:
            for to in self.fleet.addressees():
                group.create_task(ask(to))
        return await asyncio.to_thread(merge_metrics, told)

    def workers(self) -> list[Json]:
        now_s = asyncio.get_running_loop().time()
        return [self.entry(member, now_s) for member in self.fleet.roster]

    def worker(self, name: str) -> Json:
        """One worker by URL or id, with the requests that are under way there. Raises `WorkerUnknown`."""
        member, now_s = self._find(name), asyncio.get_running_loop().time()
        return {**self.entry(member, now_s), "under_way": under_way(member, now_s)}

    def entry(self, member: Member, now_s: float) -> Json:
        expires_at_s = self._tls.peer_expires_at_s(member.worker) if self._tls is not None else None
        return {**worker_entry(member, self.kv(member.worker), now_s), "certificate_expires_s": expires_at_s}

    def audit(self) -> Json:
        return audit_report(Audited(member, self.kv(member.worker)) for member in self.fleet.roster)

    def unready(self) -> list[str]:
        """What keeps the gateway from serving every model, in words; empty if it does."""
        roster, now_s = self.fleet.roster, asyncio.get_running_loop().time()
        if not len(roster):
            return ["no worker is registered"]
        if not roster.expected():
            return [f"{one.worker} {one.unavailable(now_s)}" for one in roster]
        return [f"no worker takes requests for {model} now" for model in roster.unserved(now_s)]

    def add(self, spec: WorkerSpec) -> tuple[Json, bool]:
        """The worker's entry, and whether it is new. Raises `OptionInvalid`, also for a worker that is leaving, and for
        one that is a member and of which something else is said now: nobody must take that for done.
        """
        known = self.fleet.roster.get(spec.worker)
        member = self.fleet.add(spec)
        if known is not None and known.leaves_at_s is not None:
            raise OptionInvalid("url", f"{known.worker} is leaving; add it again when it has left")
        other = None if known is None else _said_otherwise(spec, known)
        if other is not None:
            changed = "PATCH changes that" if other in _CHANGED_IN_PLACE else "DELETE it first"
            raise OptionInvalid(other, f"{member.worker} is a member already, and this is not what it has; {changed}")
        return self.entry(member, asyncio.get_running_loop().time()), known is None

    def change(self, name: str, change: WorkerChange) -> Json:
        """The worker's entry as it is now. Raises `WorkerUnknown` or `OptionInvalid`."""
        member = self.fleet.change(self._find(name).worker, change)
        return self.entry(member, asyncio.get_running_loop().time())

    async def remove(self, name: str, *, drain_s: float | None) -> Json:
        """Drain a worker and let it go. Raises `WorkerUnknown` or `FieldInvalid`."""
        if drain_s is not None and not 0 <= drain_s <= LONGEST_FLUSH_S:
            raise FieldInvalid("timeout", f"must be a number of seconds from 0 to {LONGEST_FLUSH_S:g}")
        member = self._find(name)
        drained = await self.fleet.remove(member.worker, drain_s=drain_s)
        return {"id": member.slug, "url": member.worker, "drained": drained}

    def _find(self, name: str) -> Member:
        member = self.fleet.roster.find(name)
        if member is None:
            raise WorkerUnknown(name)
        return member


def _said_otherwise(spec: WorkerSpec, known: Member) -> str | None:
    """What is said of a member that it has not got, by its name; what is left out is not said. A key cannot be seen to
    be the same, so that it is always something else.
    """
    differs = {
        "events": spec.events is not None and events_address(spec) != known.events_url,
        "replay": spec.replay is not None and spec.replay != known.replay_url,
        "bind": spec.bind and not known.binds_events,
        "tokenizer": spec.tokenizer is not None and spec.tokenizer != known.tokenizer_from,
        "labels": not spec.labels.items() <= known.labels.items(),
        "weight": spec.weight not in (1.0, known.weight),
        "draining": spec.draining and not known.draining,
        "engine_key": bool(spec.engine_key),
    }
    return next((name for name, differ in differs.items() if differ), None)
