"""The scheduler processes of an engine: started together, watched, and gone when this is left.

    async with RankProcesses(configs, on_exit=scheduler.rank_died):
        ...                                     # a rank that exits by itself is told of at once

Whatever happens (a start that fails half-way, a cancellation, an error in the body), no process is left: each gets
SIGTERM, a bounded time to end, and then SIGKILL. Should this process itself be killed, theirs end with its pipes.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Self

from kvherd.core.errors import PortInUse, StartFailed
from kvherd.core.ids import Rank
from kvherd.services.engine.last_words import LastWords
from kvherd.services.engine.port_probe import port_is_free
from kvherd.wire.rank_config import RankConfig, encode_rank_config

log = logging.getLogger(__name__)

OnExit = Callable[[Rank, str], None]
"""Told once of each rank that ended without having been asked to, with its reason in words."""


class RankProcesses:
    """Entering starts them, and raises `PortInUse` or `StartFailed`; it does not wait until they are ready."""

    def __init__(self, configs: Sequence[RankConfig], *, on_exit: OnExit, stops_within_s: float = 5.0) -> None:
        self._configs = configs
        self._on_exit = on_exit
        self._stops_within_s = stops_within_s
        self._processes: dict[Rank, asyncio.subprocess.Process] = {}
        self._watchers = asyncio.TaskGroup()
        self._stopping = False

    @property
    def pids(self) -> dict[Rank, int]:
        return {rank: process.pid for rank, process in self._processes.items()}

    async def __aenter__(self) -> Self:
        for config in self._configs:
            _require_free_ports(config)
        await self._watchers.__aenter__()
        try:
            for config in self._configs:
                await self._start(config)
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    async def _start(self, config: RankConfig) -> None:
        command = [sys.executable, "-m", "kvherd.runtime.process", f"rank={config.rank}"]
        threads = str(config.threads)
        environment = os.environ | {"OPENBLAS_NUM_THREADS": threads, "OMP_NUM_THREADS": threads}
        pipe = asyncio.subprocess.PIPE
        try:
            with _sigint_inherited_blocked():
                process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stderr=pipe, env=environment)
        except OSError as error:
            raise StartFailed(f"rank {config.rank}", error.strerror or str(error)) from error
        rank = Rank(config.rank)
        self._processes[rank] = process
        self._watchers.create_task(self._watch(rank, process), name=f"rank {rank}")
        assert process.stdin is not None
        process.stdin.write(encode_rank_config(config))
        with suppress(ConnectionError):  # it is gone already: its watcher says why
            await process.stdin.drain()

    async def _watch(self, rank: Rank, process: asyncio.subprocess.Process) -> None:
        """Pass its log on; when it ends unasked, say so."""
        assert process.stderr is not None
        words = LastWords()
        while chunk := await process.stderr.read(65_536):
            for level, text in words.hear(chunk):
                if not self._stopping:
                    log.log(level, "rank %d: %s", rank, text)
        status = await process.wait()
        if not self._stopping:
            self._on_exit(rank, _reason(status, words.last))

    async def _stop(self) -> None:
        self._stopping = True
        try:
            self._signal_all(signal.SIGTERM)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._stops_within_s):
                    for process in self._processes.values():
                        await process.wait()
        finally:  # also when cancelled: the signal itself needs no await
            self._signal_all(signal.SIGKILL)
            for process in self._processes.values():
                if process.stdin is not None:
                    process.stdin.close()
            await self._watchers.__aexit__(None, None, None)

    def _signal_all(self, number: signal.Signals) -> None:
        for process in self._processes.values():
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.send_signal(number)


def _reason(status: int, last_words: str) -> str:
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return last_words or f"it ended with status {status}"


def _require_free_ports(config: RankConfig) -> None:
    """Say it here, before a process is started, and by the option's name."""
    for endpoint in (config.events_endpoint, config.replay_endpoint):
        if endpoint.startswith("tcp://"):
            host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
            if port.isdigit() and not port_is_free(host.strip("[]"), int(port)):
                raise PortInUse(int(port), config.port_option)


@contextmanager
def _sigint_inherited_blocked() -> Iterator[None]:
    """A process started in here never sees Ctrl-C, not even before its own code runs; ours comes when this ends."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
