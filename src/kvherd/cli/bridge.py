"""`kvherd bridge`: lossless KV events over gRPC beside a stock engine."""

import asyncio
import logging
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from kvherd.adapters.http_worker import HttpWorker
from kvherd.adapters.tokenizer import tokenizer_from_directory
from kvherd.adapters.zmq_endpoints import rank_endpoints, require_apart
from kvherd.adapters.zmq_kv_feed import ZmqFrameFeed
from kvherd.cli.lifetime import until_stopped
from kvherd.cli.logs import LogLevel, start_logging
from kvherd.cli.ports import require_free
from kvherd.core.errors import OptionInvalid
from kvherd.core.ids import Rank, WorkerId
from kvherd.core.kv.history import HISTORY_TOKENS
from kvherd.services.bridge.bridge import Bridge, BridgeConfig
from kvherd.services.kv_relay.event_streams import EventStreams
from kvherd.services.kv_relay.relay import KvRelay, RelayOptions

log = logging.getLogger(__name__)


def command(
    *,
    engine: Annotated[
        str, typer.Option(metavar="http://HOST:PORT", help="The engine: vLLM or SGLang, by its HTTP address.")
    ] = "http://127.0.0.1:8000",
    events: Annotated[
        str,
        typer.Option(help="Where the engine's KV events are: ipc://PATH, or tcp://HOST:PORT (rank r is at PORT + r)."),
    ] = "tcp://127.0.0.1:5557",
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
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="The model's directory; gateways learn its tokenizer and chat template from here."),
    ] = None,
    log_level: Annotated[LogLevel, typer.Option(help="Least level of the log, which goes to standard error.")] = (
        LogLevel.INFO
    ),
    supervised: Annotated[
        bool, typer.Option("--supervised", help="Stop when standard input ends, as its starter is gone then.")
    ] = False,
) -> None:
    """Make a stock engine's KV events lossless: run this beside vLLM or SGLang, then follow it from the gateway.

    Fills gaps from the engine's replay socket, sees its restarts, and gives every subscriber a numbered stream that it
    can resume. Flush, health and load pass through to the engine. docs/kv-events.md tells how to switch events on.

        kvherd gateway --worker http://127.0.0.1:8000,events=grpc://127.0.0.1:50061
    """
    start_logging(log_level)
    host, port = _listen_address(listen)
    feeds = frame_feeds(events, replay, ranks=ranks, bind_events=bind_events)
    worker = _engine(engine)
    require_free(host, [port], option="--listen")
    artifact = tokenizer_from_directory(tokenizer).artifact_zip() if tokenizer else None
    config = BridgeConfig(host=host, port=port, ranks=ranks, tokenizer_zip=artifact)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(
            until_stopped(
                run_bridge(config, worker, feeds, RelayOptions(history_tokens=history_tokens)), supervised=supervised
            )
        )


def frame_feeds(events: str, replay: str | None, *, ranks: int, bind_events: bool) -> dict[Rank, ZmqFrameFeed]:
    """A reader for every rank. Raises `OptionInvalid`."""
    live = rank_endpoints(events, ranks, option="--events", listens=bind_events)
    past = rank_endpoints(replay, ranks, option="--replay") if replay else {}
    require_apart(live, past)
    return {rank: ZmqFrameFeed(where, past.get(rank), bind_events=bind_events) for rank, where in live.items()}


async def run_bridge(
    config: BridgeConfig, engine: HttpWorker, feeds: dict[Rank, ZmqFrameFeed], options: RelayOptions
) -> None:
    """Serve until cancelled; nothing is left open."""
    async with AsyncExitStack() as stack:
        stack.push_async_callback(engine.close)
        relay = await stack.enter_async_context(KvRelay(feeds, options=options))
        bridge = Bridge(config, engine=engine, events=EventStreams(relay, server="the bridge"))
        await stack.enter_async_context(bridge)
        log.info("serving the KV events of %s at grpc://%s:%d", engine.id, config.host, config.port)
        await bridge.announce_engine()
        await asyncio.Event().wait()


def _engine(url: str) -> HttpWorker:
    if url.startswith("grpc://"):
        raise OptionInvalid("--engine", f"{url!r}: engines over gRPC are not bridged yet; name its HTTP address")
    try:
        return HttpWorker(WorkerId(url), url)
    except OptionInvalid as error:
        raise OptionInvalid("--engine", error.problem) from None


def _listen_address(word: str) -> tuple[str, int]:
    host, _, port = word.rpartition(":")
    if not host or not port.isascii() or not port.isdigit():
        raise OptionInvalid("--listen", f"{word!r} must be HOST:PORT, as in 127.0.0.1:50061")
    return host.strip("[]"), int(port)
