"""`kvherd gateway`: the gateway, with adapters for workers over HTTP and gRPC."""

import asyncio
import logging
import os
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from kvherd.adapters.access_file import AccessFile
from kvherd.adapters.grpc_channel import grpc_target
from kvherd.adapters.grpc_kv_feed import GrpcKvFeed
from kvherd.adapters.grpc_tokenizer import fetch_tokenizer
from kvherd.adapters.grpc_worker import GrpcWorker
from kvherd.adapters.http_worker import HttpWorker
from kvherd.adapters.tls import ClientTls, FileServerTls, trusting_this_machine
from kvherd.adapters.tokenizer import tokenizer_from_directory
from kvherd.adapters.zmq_endpoints import rank_endpoints, require_apart
from kvherd.adapters.zmq_kv_feed import ZmqFrameFeed
from kvherd.cli.engine_key import EngineKeyOption, engine_key
from kvherd.cli.gateway_client import AdminKeyOption
from kvherd.cli.gateway_keys import DATA_KEY, AdminKeyFileOption, DataKeyOption, admin_key_given, secret_given
from kvherd.cli.gateway_load import (
    FirstByteOption,
    LateBindingOption,
    MaxHoldOption,
    MaxRequestsOption,
    MaxWaitingOption,
    MaxWaitOption,
    prepare_process,
)
from kvherd.cli.gateway_tls import (
    CertOption,
    ClientCaOption,
    KeyOption,
    WorkerCaOption,
    WorkerCertOption,
    WorkerKeyOption,
    WorkerNameOption,
    own_tls,
    worker_tls,
)
from kvherd.cli.lifetime import until_stopped
from kvherd.cli.logs import LogLevel, start_logging
from kvherd.cli.ports import require_free
from kvherd.cli.worker_words import worker_spec
from kvherd.core.fleet.spec import GRPC
from kvherd.core.ids import WorkerId
from kvherd.core.routing.late import LateBounds
from kvherd.core.routing.policy import POLICY_NAMES
from kvherd.ports.completions import Tokenizer
from kvherd.ports.kv_feed import EventSource, KvFeed
from kvherd.ports.worker import Worker
from kvherd.services.gateway.chat import PathConfig
from kvherd.services.gateway.console import is_loopback
from kvherd.services.gateway.fleet_edges import FleetConfig
from kvherd.services.gateway.gateway import Gateway, GatewayConfig
from kvherd.services.gateway.settings import AdmissionBounds, Bounds, HealMode
from kvherd.services.kv_relay.direct import DirectKvFeed

TOKENIZER_DEADLINE_S = 30.0

log = logging.getLogger(__name__)


def command(
    *,
    worker: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL[,NAME=VALUE]...",
            help="A worker: grpc://HOST:PORT or http://HOST:PORT, once for each; `events` is where its KV events are "
            "if it cannot tell that itself: grpc://HOST:PORT of a bridge, or tcp:// or ipc://, an engine's own sockets "
            "(then `replay` is where it replays them, and with `bind=1` the gateway listens and the engine connects); "
            "`tokenizer` is its model's directory, if it hands out none; `sidecar` the URL of a gRPC worker's HTTP "
            "sidecar if that is not one port above it; with `weight=2` it counts as twice as fast; `label.NAME` is a "
            "label; with `resolve=1` every address of the host name is a worker; `engine_key_file` or `engine_key_env` "
            "is where its engine's own key is. More can join at run time.",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Workers, model aliases, required models and API keys, as TOML: read again when it changes; if it is "
            "wrong then, the last good one holds.",
        ),
    ] = None,
    policy: Annotated[str, typer.Option(help=f"How requests are routed: {', '.join(POLICY_NAMES)}.")] = "kv",
    host: Annotated[str, typer.Option(help="Address to listen on, for HTTP and gRPC.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port for HTTP: OpenAI's API, orders, metrics.")] = 8080,
    grpc_port: Annotated[int, typer.Option(help="Port for gRPC: kvherd.gateway.v1.")] = 8081,
    admin_key: AdminKeyOption = None,
    admin_key_file: AdminKeyFileOption = None,
    api_key: DataKeyOption = None,
    tls_cert: CertOption = None,
    tls_key: KeyOption = None,
    tls_client_ca: ClientCaOption = None,
    worker_ca: WorkerCaOption = None,
    worker_cert: WorkerCertOption = None,
    worker_key: WorkerKeyOption = None,
    worker_tls_name: WorkerNameOption = None,
    resolve_s: Annotated[
        float, typer.Option(min=1.0, help="How often the host names of workers with resolve=1 are resolved again.")
    ] = 10.0,
    engine_api_key: EngineKeyOption = None,
    usage_sample: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Share of streams that are asked for their usage though their client did not, to check predictions; "
            "the client does not see it. 0 asks none.",
        ),
    ] = 0.05,
    heal: Annotated[
        HealMode,
        typer.Option(
            help="What brings credit back to workers that may hold blocks nobody told of: `report` has vLLM tell the "
            "cached chain of prompts again, `flush` clears such workers of any kind when they are idle, `off` waits."
        ),
    ] = HealMode.REPORT,
    max_retry_s: Annotated[
        float, typer.Option(min=0.25, help="Longest pause between two tries of a worker that cannot be reached.")
    ] = 5.0,
    first_byte_timeout: FirstByteOption = Bounds().first_byte_s,
    max_requests: MaxRequestsOption = AdmissionBounds().running,
    max_waiting: MaxWaitingOption = AdmissionBounds().waiting,
    max_wait_s: MaxWaitOption = AdmissionBounds().longest_s,
    late_binding_s: LateBindingOption = LateBounds().backlog_s,
    max_hold_s: MaxHoldOption = LateBounds().longest_s,
    log_level: Annotated[LogLevel, typer.Option(help="Least level of the log, which goes to standard error.")] = (
        LogLevel.INFO
    ),
    access_log: Annotated[
        str | None,
        typer.Option(
            "--access-log",
            metavar="FILE|-",
            help="Write one line of JSON for every request there (- is standard output), in place of the log.",
        ),
    ] = None,
    supervised: Annotated[
        bool, typer.Option("--supervised", help="Stop when standard input ends, as its starter is gone then.")
    ] = False,
) -> None:
    """Run the gateway: one OpenAI-compatible entry to a fleet of workers.

    Detects what each worker is, follows its KV events, and routes each request to the worker where it will answer
    soonest. A worker that cannot be reached yet is tried again until it can.

    Operators' routes (/workers, /flush_cache) answer this machine only, unless there is an admin key: then they
    answer whoever brings it.
    """
    start_logging(log_level)
    gateway_config = GatewayConfig(
        host=host,
        port=port,
        grpc_port=grpc_port,
        workers=tuple(map(worker_spec, worker or ())),
        policy=policy,
        admin_key=admin_key_given(admin_key, admin_key_file),
        data_key=secret_given("--api-key", api_key, DATA_KEY),
        config_file=config,
        environment=os.environ,
        names_period_s=resolve_s,
        fleet=FleetConfig(max_retry_s=max_retry_s),
        path=PathConfig(usage_sample=usage_sample, heal=heal, bounds=Bounds(first_byte_s=first_byte_timeout)),
        admission=AdmissionBounds(max_requests, max_waiting, max_wait_s),
        late=LateBounds(late_binding_s, max_hold_s),
    )
    if host != "localhost" and not is_loopback(host) and not (gateway_config.data_key or config or tls_client_ca):
        log.warning("whoever reaches %s may send requests: give clients keys (--config, KVHERD_API_KEY)", host)
    tls = own_tls(tls_cert, tls_key, tls_client_ca)
    to_workers = worker_tls(worker_cert, worker_key, worker_ca, worker_tls_name)
    require_free(host, [port], option="--port")
    require_free(host, [grpc_port], option="--grpc-port")
    prepare_process()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        serving = run_gateway(
            gateway_config,
            engine_api_key=engine_key(engine_api_key),
            tls=tls,
            to_workers=to_workers,
            access=AccessFile(access_log) if access_log else None,
        )
        runner.run(until_stopped(serving, supervised=supervised))


def worker_at(
    url: str, own_key: str | None, *, engine_api_key: str | None = None, tls: ClientTls | None = None
) -> Worker:
    if url.startswith(GRPC):
        return GrpcWorker(WorkerId(url), tls=tls)
    return HttpWorker(WorkerId(url), url, api_key=own_key or engine_api_key, tls=tls)


def feed_of(source: EventSource, *, tls: ClientTls | None = None) -> KvFeed:
    """Raises `OptionInvalid` for endpoints that cannot be."""
    if not source.direct:
        address, secured = grpc_target(source.events)
        return GrpcKvFeed(address, tls=(tls or trusting_this_machine()) if secured else None)
    live = rank_endpoints(source.events, source.ranks, option="events", listens=source.bind)
    past = rank_endpoints(source.replay, source.ranks, option="replay") if source.replay else {}
    require_apart(live, past)
    return DirectKvFeed(
        lambda: {rank: ZmqFrameFeed(at, past.get(rank), bind_events=source.bind) for rank, at in live.items()}
    )


async def tokenizer_from(source: str, *, tls: ClientTls | None = None) -> Tokenizer:
    """From a worker, or from a directory. Raises a `KvherdError`."""
    if source.startswith(GRPC):
        return await fetch_tokenizer(source, TOKENIZER_DEADLINE_S, tls)
    return await asyncio.to_thread(tokenizer_from_directory, Path(source))


async def run_gateway(
    config: GatewayConfig,
    *,
    engine_api_key: str | None = None,
    tls: FileServerTls | None = None,
    to_workers: ClientTls | None = None,
    access: AccessFile | None = None,
) -> None:
    """Serve until cancelled."""
    gateway = Gateway(
        config,
        worker_factory=partial(worker_at, engine_api_key=engine_api_key, tls=to_workers),
        feed_factory=partial(feed_of, tls=to_workers),
        tokenizer_factory=partial(tokenizer_from, tls=to_workers),
        tls=tls,
        worker_tls=to_workers,
        write_access=access.write if access else None,
    )
    async with access or nullcontext(), gateway:
        scheme = "https" if tls else "http"
        log.info("serving at %s://%s:%d, orders over gRPC on %d", scheme, config.host, config.port, config.grpc_port)
        await asyncio.Event().wait()
