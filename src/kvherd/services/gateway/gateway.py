"""The gateway as one thing: relay, fleet, followers, orders and their edges, started and stopped together."""

import asyncio
import secrets
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from kvherd.core.errors import OptionInvalid
from kvherd.core.fleet.host_names import HostNames
from kvherd.core.fleet.keyring import DataKey, Keyring, beside, key_digest
from kvherd.core.fleet.spec import WorkerSpec
from kvherd.core.ids import WorkerId
from kvherd.core.kv.hashing import PrefixHasher
from kvherd.core.kv.index import PrefixIndex
from kvherd.core.routing.late import LateBounds
from kvherd.core.routing.policy import Weights, make_policy
from kvherd.ports.loop_turn import LoopTurn
from kvherd.ports.tls import ServerTls, WorkerTls
from kvherd.services.gateway.doors.admin import build_app, judge_of
from kvherd.services.gateway.doors.console import Console
from kvherd.services.gateway.doors.grpc import GatewayGrpc
from kvherd.services.gateway.fleet.config_file import ConfigFile
from kvherd.services.gateway.fleet.fleet import Fleet
from kvherd.services.gateway.fleet.fleet_edges import FeedFactory, FleetConfig, Prepare, TokenizerFactory, WorkerFactory
from kvherd.services.gateway.fleet.key_places import with_engine_keys
from kvherd.services.gateway.fleet.orders import FlushHeed
from kvherd.services.gateway.fleet.staffing import Resolve, Staffing, resolve_host
from kvherd.services.gateway.following.follow import Followers
from kvherd.services.gateway.metrics import GatewayMetrics
from kvherd.services.gateway.relay.edge import Judge, RelayLimits, is_data
from kvherd.services.gateway.relay.server import RelayServer
from kvherd.services.gateway.settings import AdmissionBounds, HealMode
from kvherd.services.gateway.turns.access import AccessLog, Write
from kvherd.services.gateway.turns.audit import Audit
from kvherd.services.gateway.turns.chat import DataPath, PathConfig
from kvherd.services.gateway.turns.credit import Credit
from kvherd.services.gateway.turns.heal import IdleFlushes
from kvherd.services.gateway.turns.keyed import KeyedPath
from kvherd.services.gateway.turns.late_binding import LateBinding
from kvherd.services.gateway.turns.stored import at_keepers
from kvherd.services.gateway.waiting.admission import Admission, AdmittedPath
from kvherd.services.tls.certificates import CertificateWatch, remark_on_expiry
from kvherd.wire.gateway_toml import GatewayFile


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """What an operator decides about one gateway. Port 0 takes a free one."""

    host: str = "127.0.0.1"
    host_names: tuple[str, ...] = ()
    port: int = 8080
    grpc_port: int = 8081
    workers: tuple[WorkerSpec, ...] = ()
    policy: str = "kv"
    weights: Weights = field(default_factory=Weights)
    admin_key: str | None = field(default=None, repr=False)
    data_key: str | None = field(default=None, repr=False)
    config_file: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    names_period_s: float = 10.0
    certificates_period_s: float = 2.0
    fleet: FleetConfig = field(default_factory=FleetConfig)
    path: PathConfig = field(default_factory=PathConfig)
    limits: RelayLimits = field(default_factory=RelayLimits)
    admission: AdmissionBounds = field(default_factory=AdmissionBounds)
    late: LateBounds = field(default_factory=LateBounds)


class Gateway:
    """Serves from entering to leaving.

    Entering raises an `OperatorError` when something cannot start, and then leaves nothing behind. It does not wait
    for workers: those that are not up are tried again and again. Leaving drains: no new request is taken, answers
    under way end within their bounds.
    """

    def __init__(
        self,
        config: GatewayConfig,
        *,
        worker_factory: WorkerFactory,
        feed_factory: FeedFactory,
        tokenizer_factory: TokenizerFactory,
        followers: Callable[[PrefixIndex], Followers] = Followers,
        prepare: Prepare | None = None,
        resolve: Resolve = resolve_host,
        tls: ServerTls | None = None,
        worker_tls: WorkerTls | None = None,
        write_access: Write | None = None,
        lost_lines: Mapping[str, Callable[[], int]] | None = None,
        turn: LoopTurn | None = None,
    ) -> None:
        self._config = config
        self._names = HostNames(config.host, config.host_names)
        self._policy = make_policy(config.policy, config.weights)
        self._worker_factory = worker_factory
        self._feed_factory = feed_factory
        self._tokenizer_factory = tokenizer_factory
        self._followers = followers
        self._prepare = prepare
        self._resolve = resolve
        self._tls = tls
        self._worker_tls = worker_tls
        self._write_access = write_access
        self._lost_lines = lost_lines or {}
        self._turn = turn

    @property
    def host(self) -> str:
        return self._config.host

    @property
    def port(self) -> int:
        return self._relay.port

    @property
    def grpc_port(self) -> int:
        return self._grpc.port

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as starting:
            await self._start(starting)
            self._stack = starting.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    async def _start(self, stack: AsyncExitStack) -> None:
        """Inside out, so that what stops first is what takes requests."""
        config, metrics = self._config, GatewayMetrics()
        index = PrefixIndex(PrefixHasher(secrets.token_bytes(32)))
        followers = await self._followers(index).__aenter__()
        # Not entered on the stack: given an error, a task group would wrap it, and a port in use would be a group.
        stack.push_async_callback(followers.__aexit__, None, None, None)
        credit = Credit(index, followers.standings)
        fleet = await stack.enter_async_context(
            Fleet(
                worker_factory=self._worker_factory,
                feed_factory=self._feed_factory,
                tokenizer_factory=self._tokenizer_factory,
                prepare=self._prepare,
                following=followers,
                config=config.fleet,
                on_restart=credit.cleared,
                remark=remark_on_expiry(self._worker_tls),
            )
        )
        heed = _heed(followers, credit)
        keyring = Keyring()
        console = Console(
            fleet=fleet,
            kv=followers.view,
            heed=heed,
            metrics=metrics,
            admin_key=config.admin_key,
            keyring=keyring,
            tls=self._worker_tls,
            names=self._names,
        )
        metrics.watch(fleet.roster, followers.view, asyncio.get_running_loop().time)
        metrics.watch_keys(keyring)
        admission = Admission(config.admission, weight_of=keyring.weight)
        clock = asyncio.get_running_loop().time
        late = LateBinding(admission, fleet.roster, clock, config.late, held=metrics.held)
        metrics.watch_admission(admission)
        if self._tls is not None:
            metrics.watch_certificate(self._tls)
        if self._worker_tls is not None:
            metrics.watch_worker_certificates(self._worker_tls, fleet.roster)
        audit = Audit(followers, metrics)
        access = AccessLog(metrics, self._write_access)
        path = DataPath(
            fleet=fleet,
            policy=self._policy,
            credit=credit,
            metrics=metrics,
            audit=audit,
            incomplete=followers.incomplete,
            config=config.path,
            access=access,
            late=late,
            together=self._turn,
        )
        app = build_app(console, policy=config.policy)
        certificates = CertificateWatch(
            own=self._tls,
            workers=self._worker_tls,
            workers_renewed=lambda: fleet.renew(_keeps_its_certificate),
            period_s=config.certificates_period_s,
        )
        await stack.enter_async_context(certificates)
        console.config = file = await self._staff(stack, fleet, keyring, late)
        if file is not None:
            metrics.watch_config(lambda: file.problem)
        if config.path.heal is HealMode.FLUSH:
            await stack.enter_async_context(IdleFlushes(fleet, followers.incomplete, heed, metrics))
        grpc = GatewayGrpc(console, host=config.host, port=config.grpc_port, tls=self._tls)
        self._grpc = await stack.enter_async_context(grpc)
        admitted = AdmittedPath(at_keepers(path, fleet, access), admission, access.refused, path.launch)
        keyed = KeyedPath(admitted, keyring, access, admitted.launch)
        relay = RelayServer(
            keyed,
            app,
            launch=keyed.launch,
            judge=_either(keyed.judge, judge_of(app, console)),
            unread=access.unread,
            host=config.host,
            port=config.port,
            limits=config.limits,
            tls=self._tls.context if self._tls else None,
            tls_refused=metrics.tls_refused,
            turn=self._turn,
        )
        self._relay = await stack.enter_async_context(relay)
        metrics.watch_process(lambda: len(asyncio.all_tasks()), lambda: relay.connections, self._lost_lines)

    async def _staff(
        self, stack: AsyncExitStack, fleet: Fleet, keyring: Keyring, late: LateBinding
    ) -> ConfigFile | None:
        """Take in the workers, names and keys that were written down. Raises `OptionInvalid` or `ConfigInvalid`."""
        config = self._config
        own = DataKey("environment", key_digest(config.data_key)) if config.data_key else None
        keyring.replace(beside(own, []))
        staffing = Staffing(fleet, resolve=self._resolve, names_period_s=config.names_period_s)
        await stack.enter_async_context(staffing)
        staffing.want("command line", await asyncio.to_thread(with_engine_keys, config.workers, config.environment))
        if config.config_file is None:
            return None

        def prepare(told: GatewayFile) -> None:
            if self._prepare is not None:
                self._prepare([url for spec in told.workers for url in (spec.url, spec.events) if url])

        def apply(told: GatewayFile, keys: list[DataKey]) -> None:
            valid = beside(own, keys)
            if not keyring.open and not valid:  # an empty file must not open the door
                raise OptionInvalid("keys", "none is left, so that whoever comes would be served; restart to mean that")
            staffing.want("file", told.workers)
            fleet.roster.aliases, fleet.roster.required = told.aliases, told.models
            keyring.replace(valid)
            late.bounds = told.late or config.late
            self._names.replace((*config.host_names, *told.host_names))

        return await stack.enter_async_context(
            ConfigFile(config.config_file, apply, config.environment, prepare=prepare)
        )


def _heed(followers: Followers, credit: Credit) -> FlushHeed:
    def obeyed(worker: WorkerId, ordered_s: float) -> None:
        followers.flushed(worker, ordered_s=ordered_s)
        credit.cleared(worker)

    def in_doubt(worker: WorkerId, ordered_s: float) -> None:
        followers.doubted(worker, ordered_s=ordered_s)
        credit.cleared(worker)

    return FlushHeed(obeyed, in_doubt)


def _keeps_its_certificate(worker: WorkerId) -> bool:
    """A channel of gRPC never looks at files again; an HTTP connection is made anew now and then."""
    return worker.startswith("grpcs://")


def _either(of_data: Judge, of_the_rest: Judge) -> Judge:
    return lambda request: (of_data if is_data(request.method, request.path) else of_the_rest)(request)
