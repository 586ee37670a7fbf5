"""`kvherd bridge`: lossless KV events over gRPC beside an engine, and the rest of its calls passed through."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from kvherd.adapters.grpc_channel import open_channel
from kvherd.adapters.grpc_url import grpc_address
from kvherd.adapters.grpc_worker import GrpcWorker
from kvherd.adapters.http_url import http_address
from kvherd.adapters.http_worker import HttpWorker
from kvherd.adapters.tls import ClientTls, FileServerTls, TlsFiles
from kvherd.adapters.tokenizer import tokenizer_from_directory
from kvherd.adapters.zmq_endpoints import rank_endpoints, require_apart
from kvherd.adapters.zmq_kv_feed import ZmqFrameFeed
from kvherd.cli.engine_key import EngineKeyOption, engine_key
from kvherd.cli.engine_tls import EngineCaOption, EngineCertOption, EngineTlsKeyOption, EngineTlsNameOption, engine_tls
from kvherd.cli.gateway_tls import CertOption, ClientCaOption, KeyOption
from kvherd.cli.lifetime import until_stopped
from kvherd.cli.logs import LogLevel, start_logging
from kvherd.cli.ports import require_free
from kvherd.cli.process_limits import prepare_process
from kvherd.cli.tls_files import own_tls
from kvherd.core.errors import OptionInvalid
from kvherd.core.fleet.spec import GRPC
from kvherd.core.ids import Rank, WorkerId
from kvherd.core.kv.history import HISTORY_TOKENS
from kvherd.ports.worker import WorkerFacts
from kvherd.services.bridge.bridge import Bridge, BridgeConfig, Front
from kvherd.services.bridge.flushes import Flushes
from kvherd.services.bridge.http_front import HttpFront
from kvherd.services.bridge.metrics import BridgeMetrics, metrics_app
from kvherd.services.bridge.proxy import ProxyFront
from kvherd.services.bridge.pulse import Pulse, watched
from kvherd.services.kv_relay.event_streams import STALL_S, EventStreams
from kvherd.services.kv_relay.relay import KvRelay, RelayOptions
from kvherd.services.servicer.http_server import http_server
from kvherd.services.servicer.sockets import listen
from kvherd.services.tls.certificates import CertificateWatch

HTTP_EVENTS = "tcp://127.0.0.1:5557"
"""Where vLLM and SGLang publish when they are told nothing else."""
LOOPBACK = "127.0.0.1"
_SERVER = "the bridge"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BridgePlan:
    """What to run: `feeds` is empty where the engine tells its events itself."""

    config: BridgeConfig
    engine: str
    feeds: dict[Rank, ZmqFrameFeed]
    relay: RelayOptions
    stall_s: float = STALL_S
    metrics_port: int | None = None
    tokenizer_zip: bytes | None = None
    engine_api_key: str | None = field(default=None, repr=False)
    engine_tls: ClientTls | None = None
    tls: FileServerTls | None = None

    @property
    def speaks_grpc(self) -> bool:
        return self.engine.startswith(GRPC)


def command(
    *,
    engine: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="The engine: http://HOST:PORT of vLLM or SGLang, or grpc://HOST:PORT, whose every call is passed on; "
            "with TLS https://, grpcs://.",
        ),
    ] = "http://127.0.0.1:8000",
    events: Annotated[
        str | None,
        typer.Option(
            help="Where the engine's KV events are: ipc://PATH, or tcp://HOST:PORT (rank r is at PORT + r). Without it "
            "an engine on gRPC tells them itself.",
            show_default=f"{HTTP_EVENTS} of an engine on HTTP",
        ),
    ] = None,
    replay: Annotated[
        str | None,
        typer.Option(help="Where it replays them, likewise. Without it every lost batch starts everybody over."),
    ] = None,
    bind_events: Annotated[
        bool,
        typer.Option(
            "--bind-events", help="Listen for the events: vLLM connects when its own endpoint names a tcp:// host."
        ),
    ] = False,
    ranks: Annotated[int, typer.Option(min=1, max=1024, help="Data-parallel ranks of the engine.")] = 1,
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Address to serve gRPC on.")] = "127.0.0.1:50061",
    history_tokens: Annotated[
        int, typer.Option(min=1, help="How far a subscriber may fall behind each rank, in tokens of its events.")
    ] = HISTORY_TOKENS,
    stall_s: Annotated[
        float, typer.Option(min=1.0, help="How long a subscriber may take no message before it is cut off, in seconds.")
    ] = STALL_S,
    metrics_port: Annotated[
        int | None,
        typer.Option(help="Serve /metrics and /health on this port of 127.0.0.1.", show_default="none"),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="The model's directory; gateways learn its tokenizer and chat template from here."),
    ] = None,
    engine_api_key: EngineKeyOption = None,
    engine_ca: EngineCaOption = None,
    engine_tls_name: EngineTlsNameOption = None,
    engine_tls_cert: EngineCertOption = None,
    engine_tls_key: EngineTlsKeyOption = None,
    tls_cert: CertOption = None,
    tls_key: KeyOption = None,
    tls_client_ca: ClientCaOption = None,
    log_level: Annotated[LogLevel, typer.Option(help="Least level of the log, which goes to standard error.")] = (
        LogLevel.INFO
    ),
    supervised: Annotated[
        bool, typer.Option("--supervised", help="Stop when standard input ends, as its starter is gone then.")
    ] = False,
) -> None:
    """Make an engine's KV events lossless: run this beside vLLM or SGLang, then follow it from the gateway.

    Fills gaps from the engine's replay socket, sees its restarts, and gives every subscriber a numbered stream that it
    can resume. Flush, health and load pass through to the engine. docs/kv-events.md tells how to switch events on.

        kvherd gateway --worker http://127.0.0.1:8000,events=grpc://127.0.0.1:50061

    Before an engine on gRPC the bridge is the worker: every other call of its protocol is passed on as it is.

        kvherd gateway --worker grpc://127.0.0.1:50061
    """
    start_logging(log_level)
    host, port = _listen_address(listen)
    _require_engine(engine)
    if engine.startswith(GRPC):
        _refuse_for_grpc(events, replay, tokenizer, bind_events=bind_events)
    else:
        events = events or HTTP_EVENTS
    feeds = frame_feeds(events, replay, ranks=ranks, bind_events=bind_events) if events else {}
    require_free(host, [port], option="--listen", host_option="--listen")
    if metrics_port is not None:
        require_free(LOOPBACK, [metrics_port], option="--metrics-port")
    plan = BridgePlan(
        config=BridgeConfig(host=host, port=port, ranks=ranks if feeds else None),
        engine=engine,
        feeds=feeds,
        relay=RelayOptions(history_tokens=history_tokens),
        stall_s=stall_s,
        metrics_port=metrics_port,
        tokenizer_zip=tokenizer_from_directory(tokenizer).artifact_zip() if tokenizer else None,
        engine_api_key=engine_key(engine_api_key),
        engine_tls=engine_tls(TlsFiles(engine_tls_cert, engine_tls_key, engine_ca, engine_tls_name), engine),
        tls=own_tls(tls_cert, tls_key, tls_client_ca),
    )
    prepare_process()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(until_stopped(run_bridge(plan), supervised=supervised))


def frame_feeds(events: str, replay: str | None, *, ranks: int, bind_events: bool) -> dict[Rank, ZmqFrameFeed]:
    """A reader for every rank. Raises `OptionInvalid`."""
    live = rank_endpoints(events, ranks, option="--events", listens=bind_events)
    past = rank_endpoints(replay, ranks, option="--replay") if replay else {}
    require_apart(live, past)
    return {rank: ZmqFrameFeed(where, past.get(rank), bind_events=bind_events) for rank, where in live.items()}


async def run_bridge(plan: BridgePlan) -> None:
    """Serve until cancelled; nothing is left open."""
    async with AsyncExitStack() as stack:
        relay = None
        if plan.feeds:
            relay = await stack.enter_async_context(KvRelay(plan.feeds, options=plan.relay))
        streams = None if relay is None else EventStreams(relay, server=_SERVER, stall_s=plan.stall_s)
        front, engine = await _front(plan, relay, streams, stack)
        await stack.enter_async_context(CertificateWatch(own=plan.tls, workers=plan.engine_tls, whose="this bridge's"))
        bridge = await stack.enter_async_context(Bridge(plan.config, front, identify=engine.identify, tls=plan.tls))
        if plan.metrics_port is not None:
            pulse = Pulse(engine.probe)
            metrics = BridgeMetrics(relay, streams, pulse, tls=plan.tls, handshakes=bridge.handshakes)
            await _show_metrics(plan.metrics_port, metrics, stack)
        what = "the KV events and calls" if plan.speaks_grpc else "the KV events"
        scheme = "grpcs" if plan.tls else "grpc"
        log.info("serving %s of %s at %s://%s:%d", what, plan.engine, scheme, plan.config.host, plan.config.port)
        await bridge.announce_engine()
        await asyncio.Event().wait()


@dataclass(frozen=True, slots=True)
class _Engine:
    """The ways to ask the engine what it is, and whether it is well."""

    identify: Callable[[], Awaitable[WorkerFacts]]
    probe: Callable[[], Awaitable[None]]


async def _front(
    plan: BridgePlan, relay: KvRelay | None, streams: EventStreams | None, stack: AsyncExitStack
) -> tuple[Front, _Engine]:
    """What is served for the engine; the connections to it end with `stack`."""
    name, key, tls = WorkerId(plan.engine), plan.engine_api_key, plan.engine_tls
    if plan.speaks_grpc:
        flushed = None if relay is None else relay.flushed
        engine, channel = GrpcWorker(name, api_key=key, tls=tls), open_channel(name, tls)
        stack.push_async_callback(engine.close)
        stack.push_async_callback(channel.close)
        front = ProxyFront(name, channel, events=streams, flushed=flushed, server=_SERVER, api_key=key)
        return front, _Engine(engine.identify, engine.probe)
    worker = HttpWorker(name, plan.engine, api_key=key, tls=tls)
    stack.push_async_callback(worker.close)
    assert streams is not None
    assert relay is not None, "an engine on HTTP has no events but those on its sockets"
    flushes = await stack.enter_async_context(Flushes(worker, obeyed=relay.flushed, unknown=relay.doubted))
    return HttpFront(worker, streams, flushes, tokenizer_zip=plan.tokenizer_zip), _Engine(worker.detect, worker.probe)


async def _show_metrics(port: int, metrics: BridgeMetrics, stack: AsyncExitStack) -> None:
    """Until `stack` ends."""
    listener = listen(LOOPBACK, port, option="--metrics-port")
    await stack.enter_async_context(http_server(metrics_app(metrics), listener, drain_s=1.0))
    await stack.enter_async_context(watched(metrics.pulse))
    log.info("metrics and health at http://%s:%d", LOOPBACK, port)


def _require_engine(url: str) -> None:
    if url.startswith(("grpc:", "grpcs:")):
        grpc_address(url, option="--engine")
        return
    try:
        http_address(url)
    except OptionInvalid as error:
        raise OptionInvalid("--engine", error.problem) from None


def _refuse_for_grpc(events: str | None, replay: str | None, tokenizer: Path | None, *, bind_events: bool) -> None:
    """What an engine on gRPC does by itself cannot be asked of the bridge."""
    if tokenizer is not None:
        raise OptionInvalid("--tokenizer", "an engine on gRPC hands out its own; leave this out")
    if events is None and (replay is not None or bind_events):
        option = "--replay" if replay is not None else "--bind-events"
        raise OptionInvalid(option, "name the engine's --events too, or leave this out: it then tells them itself")


def _listen_address(word: str) -> tuple[str, int]:
    host, _, port = word.rpartition(":")
    if not host or not port.isascii() or not port.isdigit():
        raise OptionInvalid("--listen", f"{word!r} must be HOST:PORT, as in 127.0.0.1:50061")
    return host.strip("[]"), int(port)
