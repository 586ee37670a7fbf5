"""The gateway's process: what was asked for becomes a gateway, and it serves until it is stopped."""

import asyncio
import logging
import os
from contextlib import nullcontext
from functools import partial

import uvloop

from kvherd import compiled
from kvherd.adapters.access_file import AccessFile
from kvherd.cli import gateway_parts
from kvherd.cli.gateway_options import GatewayOptions, decode, path_of
from kvherd.cli.lifetime import until_stopped
from kvherd.cli.logs import start_logging
from kvherd.cli.ports import require_free
from kvherd.cli.process_limits import prepare_process
from kvherd.cli.tls_files import own_tls, worker_tls
from kvherd.cli.worker_words import worker_spec
from kvherd.core.errors import OptionInvalid
from kvherd.core.fleet.host_names import checked_host_name, is_loopback
from kvherd.ports.loop_turn import LoopTurn
from kvherd.services.gateway.fleet.fleet_edges import FleetConfig
from kvherd.services.gateway.gateway import Gateway, GatewayConfig
from kvherd.services.gateway.settings import Bounds, ProbeBounds
from kvherd.services.gateway.turns.chat import PathConfig

log = logging.getLogger(__name__)


def serve(encoded: bytes) -> None:
    """As the gateway of these options until a signal asks it to stop. Raises an `OperatorError` if it cannot start."""
    options = decode(encoded)
    logged = start_logging(options.log_level)
    config = config_of(options)
    keyed = config.data_key or config.config_file or options.tls_client_ca
    if config.host != "localhost" and not is_loopback(config.host) and not keyed:
        log.warning("whoever reaches %s may send requests: give clients keys (--config, KVHERD_API_KEY)", config.host)
    tls = own_tls(path_of(options.tls_cert), path_of(options.tls_key), path_of(options.tls_client_ca))
    certificate, key, authorities = map(path_of, (options.worker_cert, options.worker_key, options.worker_ca))
    to_workers = worker_tls(certificate, key, authorities, options.worker_tls_name)
    if config.port == config.grpc_port:
        raise OptionInvalid("--grpc-port", f"{config.port} is that of --port, too; give each its own")
    require_free(config.host, [config.port], option="--port")
    require_free(config.host, [config.grpc_port], option="--grpc-port")
    access = AccessFile(options.access_log) if options.access_log else None
    turn = LoopTurn()
    gateway = Gateway(
        config,
        worker_factory=partial(gateway_parts.worker_at, engine_api_key=options.engine_key, tls=to_workers, turn=turn),
        feed_factory=partial(gateway_parts.feed_of, tls=to_workers),
        tokenizer_factory=partial(gateway_parts.tokenizer_from, tls=to_workers),
        prepare=gateway_parts.prepare,
        tls=tls,
        worker_tls=to_workers,
        write_access=access.write if access else None,
        lost_lines={"access": lambda: access.lost if access else 0, "log": lambda: logged.lost},
        turn=turn,
    )
    prepare_process()
    scheme = "https" if tls else "http"
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(until_stopped(_run(gateway, access, scheme), supervised=options.supervised))


async def _run(gateway: Gateway, access: AccessFile | None, scheme: str) -> None:
    """Serve until cancelled."""
    async with access or nullcontext(), gateway:
        log.info("native code: %d rooms", compiled.count())
        if (why := compiled.unused()) is not None:
            log.warning("compiled rooms are left aside, and all is slower: %s", why)
        log.info("serving at %s://%s:%d, orders over gRPC on %d", scheme, gateway.host, gateway.port, gateway.grpc_port)
        await asyncio.Event().wait()


def config_of(options: GatewayOptions) -> GatewayConfig:
    """Raises `OptionInvalid`."""
    return GatewayConfig(
        host=options.host,
        host_names=tuple(map(checked_host_name, options.host_names)),
        port=options.port,
        grpc_port=options.grpc_port,
        workers=tuple(map(worker_spec, options.workers)),
        policy=options.policy,
        admin_key=options.admin_key,
        data_key=options.data_key,
        config_file=path_of(options.config),
        environment=os.environ,
        names_period_s=options.resolve_s,
        fleet=FleetConfig(
            probe=ProbeBounds(options.probe_period_s, options.probe_deadline_s), max_retry_s=options.max_retry_s
        ),
        path=PathConfig(
            usage_sample=options.usage_sample, heal=options.heal, bounds=Bounds(first_byte_s=options.first_byte_s)
        ),
        admission=options.admission,
        late=options.late,
    )
