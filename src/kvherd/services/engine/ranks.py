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
import subprocess
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

_KILLED_S = 2.0
"""A process that was killed is gone in less than a millisecond, unless the machine stands still."""

OnExit = Callable[[Rank, str], None]
"""Told once of each rank that ended without having been asked to, with its reason in words."""


class RankProcesses:
    """Entering starts them, and raises `PortInUse` or `StartFailed`; it does not wait until they are ready."""

    def __init__(self, configs: Sequence[RankConfig], *, on_exit: OnExit, stops_within_s: float = 5.0) -> None:
        self._configs = configs
        self._on_exit = on_exit
        self._stops_within_s = stops_within_s
        self._processes: dict[Rank, subprocess.Popen[bytes]] = {}
        self._group = asyncio.TaskGroup()
        self._watchers: list[asyncio.Task[None]] = []
        self._stopping = False

    @property
    def pids(self) -> dict[Rank, int]:
        return {rank: process.pid for rank, process in self._processes.items()}

    async def __aenter__(self) -> Self:
        for config in self._configs:
            _require_free_ports(config)
        await self._group.__aenter__()
        try:
            for config in self._configs:
                rank = Rank(config.rank)
                self._processes[rank] = process = _spawn(config)
                watcher = self._watch(rank, process)
                self._watchers.append(self._group.create_task(watcher, name=f"rank {rank}"))
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    async def _watch(self, rank: Rank, process: subprocess.Popen[bytes]) -> None:
        """Pass its log on; when it ends unasked, say so."""
        words = LastWords()
        log_lines = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        pipe, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(log_lines), process.stderr)
        try:
            while chunk := await log_lines.read(65_536):
                for level, text in words.hear(chunk):
                    if not self._stopping:
                        log.log(level, "rank %d: %s", rank, text)
        finally:
            pipe.close()
        status = await asyncio.to_thread(process.wait)  # its pipe is closed: this takes no time
        if not self._stopping:
            self._on_exit(rank, _reason(status, words.last))

    async def _stop(self) -> None:
        self._stopping = True
        try:
            self._signal_all(signal.SIGTERM)
            if self._watchers:
                await asyncio.wait(self._watchers, timeout=self._stops_within_s)
        finally:  # also when cancelled: the signal itself needs no await
            self._signal_all(signal.SIGKILL)
            for process in self._processes.values():
                if process.stdin is not None:
                    process.stdin.close()
            try:
                await self._group.__aexit__(None, None, None)
            finally:
                self._reap()

    def _reap(self) -> None:
        """Of those whose watcher was cancelled nobody else would."""
        for process in self._processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=_KILLED_S)

    def _signal_all(self, number: signal.Signals) -> None:
        for process in self._processes.values():
            process.send_signal(number)  # does nothing to one that has ended


def _spawn(config: RankConfig) -> subprocess.Popen[bytes]:
    """Start one rank and give it its configuration. Raises `StartFailed`.

    Not the event loop's own way to start processes: uvloop resets signals in between, and a Ctrl-C that comes while
    a rank starts would kill it before its own code could ignore it.
    """
    command = [sys.executable, "-m", "kvherd.runtime.process", f"rank={config.rank}"]
    threads = str(config.threads)
    environment = os.environ | {"OPENBLAS_NUM_THREADS": threads, "OMP_NUM_THREADS": threads}
    try:
        with _sigint_blocked():
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, env=environment
            )
    except OSError as error:
        raise StartFailed(f"rank {config.rank}", error.strerror or str(error)) from error
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it is gone already: its watcher says why
        process.stdin.write(encode_rank_config(config))
    return process


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
def _sigint_blocked() -> Iterator[None]:
    """A process started in here never sees Ctrl-C; should one come to this one meanwhile, it comes when this ends."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
