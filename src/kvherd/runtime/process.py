"""One rank of the embedded engine as a process: `python -m kvherd.runtime.process`.

Its configuration is one line of JSON on standard input, which stays open: its end means that the parent is gone.
SIGTERM and `Stop` end it with 0. SIGINT is the parent's affair: Ctrl-C reaches the whole process group. What it
cannot survive is its last message, `Fatal`, and a line in the log, and it ends with 1.
"""

import ctypes
import logging
import os
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType

import zmq

from kvherd.core.engine.reports import RankFacts
from kvherd.core.errors import KvherdError
from kvherd.core.ids import Rank
from kvherd.core.scheduler.scheduler import Scheduler
from kvherd.core.scheduler.steps import SchedulerLimits
from kvherd.ports.block_store import BlockStore
from kvherd.runtime.batch import ModelFacts
from kvherd.runtime.engine_model import load_engine_model
from kvherd.runtime.file_store import FileBlockStore
from kvherd.runtime.kv_publisher import KvPublisher
from kvherd.runtime.profiler import Profiler
from kvherd.runtime.rank_link import RankLink
from kvherd.runtime.rank_loop import PARENT_GONE, RankLoop
from kvherd.runtime.step_thread import Threads
from kvherd.wire import scheduler_ipc as ipc
from kvherd.wire.rank_config import RankConfig, decode_rank_config

log = logging.getLogger("kvherd.rank")

STEP_ENDS_WITHIN_S = 5.0
_PR_SET_NAME = 15


def main() -> int:
    """Read the configuration, serve until told to stop, answer the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave_at_once)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(message)s")
    try:
        config = decode_rank_config(_first_line(sys.stdin.fileno()))
    except KvherdError as error:
        log.critical("%s", error)
        return 1
    _set_process_name(f"kvherd-rank{config.rank}")
    with zmq.Context() as context:
        try:
            link = RankLink(context, config)
        except zmq.ZMQError as error:
            log.critical("no servicer can be reached in %s: %s", config.ipc_dir, error)
            return 1
        try:
            reason = serve(config, context, link)
            log.info("rank %d stops: %s", config.rank, reason)
            if reason == PARENT_GONE:  # killed, it could not take its sockets away
                shutil.rmtree(config.ipc_dir, ignore_errors=True)
        except KvherdError as error:
            log.critical("%s", error)
            link.send(ipc.Fatal(Rank(config.rank), str(error)))
            return 1
        except Exception as error:  # the process boundary: the servicer must hear why, whatever it was
            log.exception("rank %d cannot go on", config.rank)
            link.send(ipc.Fatal(Rank(config.rank), f"{type(error).__name__}: {error}"))
            return 1
        finally:
            link.close()
    return 0


def serve(config: RankConfig, context: zmq.Context[zmq.Socket[bytes]], link: RankLink) -> str:
    """Load the model, say `Ready`, run the loop; answers why it ended. Raises what cannot be survived."""
    rank = Rank(config.rank)
    publisher = KvPublisher(
        context,
        rank,
        events_endpoint=config.events_endpoint,
        replay_endpoint=config.replay_endpoint,
        topic=config.events_topic,
        kept_batches=config.replay_batches,
        port_option=config.port_option,
    )
    try:
        model = load_engine_model(
            config.model,
            pool_blocks=config.pool_blocks,
            block_size=config.block_size,
            max_context_tokens=config.max_context_tokens,
            host_blocks=config.host_blocks,
        )
        store = _store(config)
        namespace = model.block_namespace() if store is not None else None
        scheduler = Scheduler(rank, replace(_limits(config, model.facts), store=namespace))
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        profiler = Profiler(
            rank, config.block_size, lambda: scheduler.load(time.monotonic()), lambda: _wake(wake_write)
        )
        loop = RankLoop(rank, scheduler, link, publisher, profiler, wake_fd=wake_read, stdin_fd=sys.stdin.fileno())
        signal.signal(signal.SIGTERM, lambda *_: loop.stop("SIGTERM"))
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        threads = Threads(model, store, lambda: _wake(wake_write), watch=profiler.watch)
        link.send(ipc.Ready(_facts(config, model.facts, publisher)))
        try:
            return loop.run(threads)
        finally:
            threads.stop(within_s=STEP_ENDS_WITHIN_S)
    finally:
        publisher.close()


def _store(config: RankConfig) -> BlockStore | None:
    if not config.storage_dir:
        return None
    return FileBlockStore(Path(config.storage_dir), most_bytes=config.storage_bytes)


def _limits(config: RankConfig, facts: ModelFacts) -> SchedulerLimits:
    return SchedulerLimits(
        pool_blocks=config.pool_blocks,
        vocab_size=facts.vocab_size,
        max_context_tokens=facts.max_context_tokens,
        block_size=config.block_size,
        host_blocks=config.host_blocks,
        max_running=config.max_running,
        max_waiting=config.max_waiting,
        chunk_tokens=config.chunk_tokens,
        eos_token_ids=facts.eos_token_ids,
        seed=config.seed,
    )


def _facts(config: RankConfig, model: ModelFacts, publisher: KvPublisher) -> RankFacts:
    return RankFacts(
        rank=Rank(config.rank),
        pid=os.getpid(),
        block_size=config.block_size,
        capacity_tokens=config.pool_blocks * config.block_size,
        max_running=config.max_running,
        max_context_tokens=model.max_context_tokens,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        events_endpoint=publisher.events_endpoint,
        replay_endpoint=publisher.replay_endpoint,
        weights_bytes=model.weights_bytes,
        kv_bytes=model.kv_bytes,
    )


def _first_line(fd: int) -> bytes:
    """Read no further than the end of the line: what follows is for the loop to see."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(fd, 1)
        if not byte:
            break
        line += byte
    return bytes(line)


def _wake(fd: int) -> None:
    try:
        os.write(fd, b"\0")
    except BlockingIOError:
        return  # full: the loop has a reason to wake already


def _leave_at_once(_number: int, _frame: FrameType | None) -> None:
    """SIGTERM before the loop runs: nothing was promised to anybody yet."""
    raise SystemExit(0)


def _set_process_name(name: str) -> None:
    """What `ps` and `top` show for the thread group; a nicety of Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main())
