"""`kvherd gateway`: what the words of its command line mean. `gateway_process` serves."""

from pathlib import Path
from typing import Annotated

import typer

from kvherd.cli import panels
from kvherd.cli.engine_key import EngineKeyOption, engine_key
from kvherd.cli.gateway_client import AdminKeyOption
from kvherd.cli.gateway_keys import (
    DATA_KEY,
    AdminKeyFileOption,
    DataKeyOption,
    admin_key_given,
    require_apart,
    secret_given,
)
from kvherd.cli.gateway_load import (
    FirstByteOption,
    LateBindingOption,
    MaxHoldOption,
    MaxRequestsOption,
    MaxWaitingOption,
    MaxWaitOption,
    ProbeDeadlineOption,
    ProbePeriodOption,
)
from kvherd.cli.gateway_options import GatewayOptions, encode, text_of
from kvherd.cli.gateway_tls import (
    CertOption,
    ClientCaOption,
    KeyOption,
    WorkerCaOption,
    WorkerCertOption,
    WorkerKeyOption,
    WorkerNameOption,
)
from kvherd.cli.handover import become_gateway
from kvherd.cli.host_names import HostNameOption
from kvherd.cli.logs import LogLevel, start_logging
from kvherd.core.routing.late import LateBounds
from kvherd.core.routing.policy import POLICY_NAMES
from kvherd.services.gateway.settings import AdmissionBounds, Bounds, HealMode, ProbeBounds


def command(
    *,
    worker: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL[,…]",
            rich_help_panel=panels.WORKERS,
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
            rich_help_panel=panels.WORKERS,
            help="Workers, model aliases, required models and API keys, as TOML: read again when it changes; if it is "
            "wrong then, the last good one holds.",
        ),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            metavar="NAME", rich_help_panel=panels.ROUTING, help=f"How requests are routed: {', '.join(POLICY_NAMES)}."
        ),
    ] = "kv",
    host: Annotated[
        str,
        typer.Option(metavar="ADDRESS", rich_help_panel=panels.DOORS, help="Address to listen on, for HTTP and gRPC."),
    ] = "127.0.0.1",
    host_name: HostNameOption = None,
    port: Annotated[
        int,
        typer.Option(
            metavar="PORT", rich_help_panel=panels.DOORS, help="Port for HTTP: OpenAI's API, orders, metrics."
        ),
    ] = 8080,
    grpc_port: Annotated[
        int, typer.Option(metavar="PORT", rich_help_panel=panels.DOORS, help="Port for gRPC: kvherd.gateway.v1.")
    ] = 8081,
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
        float,
        typer.Option(
            metavar=panels.SECONDS,
            rich_help_panel=panels.BOUNDS,
            min=1.0,
            max=86_400.0,
            help="How often the host names of workers with resolve=1 are resolved again.",
        ),
    ] = 10.0,
    engine_api_key: EngineKeyOption = None,
    usage_sample: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            rich_help_panel=panels.ROUTING,
            min=0.0,
            max=1.0,
            help="Share of streams that are asked for their usage though their client did not, to check predictions; "
            "the client does not see it. 0 asks none.",
        ),
    ] = 0.05,
    heal: Annotated[
        HealMode,
        typer.Option(
            rich_help_panel=panels.ROUTING,
            help="What brings credit back to workers that may hold blocks nobody told of: `report` has vLLM tell the "
            "cached chain of prompts again, `flush` clears such workers of any kind when they are idle, `off` waits.",
        ),
    ] = HealMode.REPORT,
    max_retry_s: Annotated[
        float,
        typer.Option(
            metavar=panels.SECONDS,
            rich_help_panel=panels.BOUNDS,
            min=0.25,
            max=86_400.0,
            help="Longest pause between two tries of a worker that cannot be reached.",
        ),
    ] = 5.0,
    probe_period_s: ProbePeriodOption = ProbeBounds().period_s,
    probe_deadline_s: ProbeDeadlineOption = None,
    first_byte_timeout: FirstByteOption = Bounds().first_byte_s,
    max_requests: MaxRequestsOption = AdmissionBounds().running,
    max_waiting: MaxWaitingOption = AdmissionBounds().waiting,
    max_wait_s: MaxWaitOption = AdmissionBounds().longest_s,
    late_binding_s: LateBindingOption = LateBounds().backlog_s,
    max_hold_s: MaxHoldOption = LateBounds().longest_s,
    log_level: Annotated[
        LogLevel,
        typer.Option(rich_help_panel=panels.LOGS, help="Least level of the log, which goes to standard error."),
    ] = (LogLevel.INFO),
    access_log: Annotated[
        str | None,
        typer.Option(
            "--access-log",
            metavar="FILE|-",
            rich_help_panel=panels.LOGS,
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
    operators_key = admin_key_given(admin_key, admin_key_file)
    data_key = secret_given("--api-key", api_key, DATA_KEY)
    require_apart(operators_key, data_key)
    options = GatewayOptions(
        workers=tuple(worker or ()),
        config=text_of(config),
        policy=policy,
        host=host,
        host_names=tuple(host_name or ()),
        port=port,
        grpc_port=grpc_port,
        admin_key=operators_key,
        data_key=data_key,
        engine_key=engine_key(engine_api_key),
        tls_cert=text_of(tls_cert),
        tls_key=text_of(tls_key),
        tls_client_ca=text_of(tls_client_ca),
        worker_ca=text_of(worker_ca),
        worker_cert=text_of(worker_cert),
        worker_key=text_of(worker_key),
        worker_tls_name=worker_tls_name,
        resolve_s=resolve_s,
        usage_sample=usage_sample,
        heal=heal,
        max_retry_s=max_retry_s,
        probe_period_s=probe_period_s,
        probe_deadline_s=probe_deadline_s,
        first_byte_s=first_byte_timeout,
        admission=AdmissionBounds(max_requests, max_waiting, max_wait_s),
        late=LateBounds(late_binding_s, max_hold_s),
        log_level=log_level,
        access_log=access_log,
        supervised=supervised,
    )
    become_gateway(encode(options))
