"""`kvherd engine`: the embedded engine, composed of its scheduler processes and the servicer in front of them."""

import asyncio
import logging
import os
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import typer
import uvloop

from kvherd.adapters.completions import OpenAiCompletions
from kvherd.adapters.model_files import ModelFile, locate
from kvherd.adapters.native_completions import NativeCompletions
from kvherd.adapters.tokenizer import ModelTokenizer, load_tokenizer
from kvherd.adapters.zmq_kv_feed import ZmqFrameFeed
from kvherd.adapters.zmq_scheduler import ZmqScheduler
from kvherd.cli.host_names import HostNameOption
from kvherd.cli.lifetime import until_stopped
from kvherd.cli.logs import LogLevel, start_logging
from kvherd.cli.ports import require_free
from kvherd.core.errors import EngineError, EngineStopping, OptionInvalid, SchedulerDied, StartFailed
from kvherd.core.fleet.host_names import checked_host_name
from kvherd.services.engine.rank_plan import MOST_RANKS, ipc_directory, rank_configs
from kvherd.services.engine.ranks import RankProcesses
from kvherd.services.kv_relay.event_streams import EventStreams
from kvherd.services.kv_relay.relay import KvRelay
from kvherd.services.servicer.config import ServicerConfig
from kvherd.services.servicer.servicer import SIDECAR_OPTION, OnReady, Servicer
from kvherd.wire.rank_config import RankConfig

SIDECAR_OFFSET = 1
HTTP_OFFSET = 2
READY_DEADLINE_S = 300.0
"""The first start of a model converts its weights."""
ON_READY_WITHIN_S = 60.0
DRAIN_S = 5.0
"""What requests get to end in when the engine is asked to stop; the rest end with an error."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    model: str
    host: str
    host_names: tuple[str, ...]
    port: int
    sidecar_port: int
    served_model_name: str | None
    ranks: int
    block_size: int
    kv_tokens: int
    host_kv_tokens: int
    storage_dir: Path | None
    storage_mb: int
    max_running: int
    max_context_tokens: int | None
    chunk_tokens: int
    threads: int
    seed: int

    def configs(self, model: ModelFile, ipc_dir: Path) -> list[RankConfig]:
        configs = rank_configs(
            model.source,
            ranks=self.ranks,
            port=self.port,
            ipc_dir=ipc_dir,
            threads=self.threads,
            pool_blocks=self.kv_tokens // self.block_size,
            chunk_tokens=self.chunk_tokens,
            max_running=self.max_running,
            max_context_tokens=self.max_context_tokens,
            seed=self.seed,
        )
        host_blocks = self.host_kv_tokens // self.block_size
        return [
            msgspec.structs.replace(
                config,
                block_size=self.block_size,
                host_blocks=host_blocks,
                storage_dir=str(self.storage_dir.absolute()) if self.storage_dir is not None else "",
                storage_bytes=self.storage_mb * 1_000_000,
            )
            for config in configs
        ]

    def name(self, model: ModelFile) -> str:
        return self.served_model_name or model.name

    def doors(self, model: ModelFile) -> tuple[str, str, int, str, int]:
        return self.name(model), self.host, self.port, self.host, self.port + HTTP_OFFSET

    def servicer(
        self,
        model: ModelFile,
        tokenizer: ModelTokenizer,
        scheduler: ZmqScheduler,
        events: KvRelay,
        on_ready: OnReady | None,
    ) -> Servicer:
        config = ServicerConfig(
            model_name=self.name(model),
            model_path=model.source,
            tokenizer_zip=tokenizer.artifact_zip(),
            host=self.host,
            host_names=self.host_names,
            port=self.port,
            http_port=self.port + HTTP_OFFSET,
            sidecar_port=self.sidecar_port,
            on_ready_within_s=ON_READY_WITHIN_S,
        )
        context_tokens = min(rank.max_context_tokens for rank in scheduler.ranks)
        vocab_size = scheduler.ranks[0].vocab_size
        completions = OpenAiCompletions(tokenizer, config.model_name, context_tokens, vocab_size=vocab_size)
        return Servicer(
            config,
            scheduler=scheduler,
            tokenizer=tokenizer,
            completions=completions,
            native=NativeCompletions(completions),
            events=EventStreams(events),
            on_ready=on_ready,
        )


def command(
    *,
    model: Annotated[
        str, typer.Option(help="smollm2, tiny (random, for tests) or the path of a Llama-family GGUF file.")
    ] = "smollm2",
    port: Annotated[
        int,
        typer.Option(help="gRPC port P; sidecar is P+1, HTTP P+2, KV events P+10 + rank, their replay P+30 + rank."),
    ] = 51000,
    grpc_http_sidecar_port: Annotated[
        int | None,
        typer.Option(help="Metrics, flush and profiles over HTTP beside gRPC; 0 is none.", show_default="--port + 1"),
    ] = None,
    metrics_http_port: Annotated[int | None, typer.Option(hidden=True)] = None,
    host: Annotated[str, typer.Option(help="Address for gRPC and HTTP; KV events are for this machine only.")] = (
        "127.0.0.1"
    ),
    host_name: HostNameOption = None,
    served_model_name: Annotated[str | None, typer.Option(help="The model's name in requests.")] = None,
    dp_size: Annotated[
        int, typer.Option(min=1, help="Data-parallel ranks: a scheduler process and a KV cache each.")
    ] = 1,
    block_size: Annotated[int, typer.Option(min=1, max=1024, help="Tokens in a block of the KV cache.")] = 16,
    kv_tokens: Annotated[int, typer.Option(min=64, help="Tokens that the KV cache holds.")] = 16_384,
    host_kv_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens that the host tier behind it holds; 0 is no host tier.")
    ] = 0,
    storage_dir: Annotated[
        Path | None,
        typer.Option(help="Directory of blocks behind the host tier, kept for later and shared with other engines."),
    ] = None,
    storage_mb: Annotated[int, typer.Option(min=1, help="Megabytes of blocks that --storage-dir holds.")] = 4096,
    max_running: Annotated[int, typer.Option(min=1, help="Sequences that are computed together.")] = 32,
    max_context_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest prompt and answer together; the model's own if not given.")
    ] = None,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Prompt tokens that one step computes at most.")] = 512,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Threads of each rank's matrix products.", show_default="all cores, shared out"),
    ] = None,
    seed: Annotated[int, typer.Option(help="For requests that bring no seed of their own.")] = 0,
    log_level: Annotated[LogLevel, typer.Option(help="Least level of the log, which goes to standard error.")] = (
        LogLevel.INFO
    ),
    supervised: Annotated[
        bool, typer.Option("--supervised", help="Stop when standard input ends, as its starter is gone then.")
    ] = False,
) -> None:
    """Run the embedded engine: a real model on this machine's processor, with a KV cache that tells what it holds.

    Serves SGLang's gRPC protocol on --port and an OpenAI-compatible HTTP API two ports above. The scheduler runs in
    a process of its own; if it dies, requests in flight end with an error and the engine exits.
    """
    start_logging(log_level)
    if dp_size > MOST_RANKS:
        raise OptionInvalid("--dp-size", f"there are ports for {MOST_RANKS} ranks behind --port, not for {dp_size}")
    if chunk_tokens < block_size:
        raise OptionInvalid("--chunk-tokens", f"{chunk_tokens} is less than a block; give it at least {block_size}")
    if storage_dir is not None and host_kv_tokens < block_size:
        raise OptionInvalid("--storage-dir", "needs a host tier, through which its blocks come: add --host-kv-tokens")
    if metrics_http_port is not None:
        raise OptionInvalid("--metrics-http-port", f"is called {SIDECAR_OPTION} now; give it that name")
    options = EngineOptions(
        model=model,
        host=host,
        host_names=tuple(map(checked_host_name, host_name or ())),
        port=port,
        sidecar_port=port + SIDECAR_OFFSET if grpc_http_sidecar_port is None else grpc_http_sidecar_port,
        served_model_name=served_model_name,
        ranks=dp_size,
        block_size=block_size,
        kv_tokens=kv_tokens,
        host_kv_tokens=host_kv_tokens,
        storage_dir=storage_dir,
        storage_mb=storage_mb,
        max_running=max_running,
        max_context_tokens=max_context_tokens,
        chunk_tokens=chunk_tokens,
        threads=threads or max(1, (os.cpu_count() or 1) // dp_size),
        seed=seed,
    )
    require_free(host, (port, port + HTTP_OFFSET), option="--port")
    if options.sidecar_port:
        require_free(host, (options.sidecar_port,), option=SIDECAR_OPTION)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(until_stopped(run_engine(options), supervised=supervised))


async def run_engine(options: EngineOptions, *, on_ready: OnReady | None = None) -> None:
    """Serve until cancelled. Raises `StartFailed`, or why it cannot go on, or what `on_ready` raised.

    Whatever it raises, no process, socket, port or file of it is left by then.
    """
    model = locate(options.model)
    failed: asyncio.Future[EngineError] = asyncio.get_running_loop().create_future()

    def note_failure(error: EngineError) -> None:
        if not failed.done():  # cancelled: we are stopping, and a rank that was told so too is no failure
            failed.set_result(error)

    async with AsyncExitStack() as stack:
        ipc_dir = stack.enter_context(ipc_directory())
        scheduler = await stack.enter_async_context(ZmqScheduler(ipc_dir, on_failed=note_failure))
        ranks = RankProcesses(options.configs(model, ipc_dir), on_exit=scheduler.rank_died)
        await stack.enter_async_context(ranks)
        tokenizer = await asyncio.to_thread(load_tokenizer, model)
        await _until_ready(scheduler, options.ranks)
        feeds = {each.rank: ZmqFrameFeed(each.events_endpoint, each.replay_endpoint) for each in scheduler.ranks}
        events = await stack.enter_async_context(KvRelay(feeds))
        servicer = await stack.enter_async_context(options.servicer(model, tokenizer, scheduler, events, on_ready))
        stack.push_async_callback(scheduler.drain, within_s=DRAIN_S)
        stack.push_async_callback(servicer.fail, EngineStopping())  # first: who asks for its health goes elsewhere
        log.info("serving %s at grpc://%s:%d and http://%s:%d", *options.doors(model))
        error = await failed
        await servicer.fail(error)
        raise error


async def _until_ready(scheduler: ZmqScheduler, ranks: int) -> None:
    try:
        await scheduler.ready(ranks, deadline_s=READY_DEADLINE_S)
    except SchedulerDied as error:
        raise StartFailed(f"rank {error.rank}", error.reason) from error
