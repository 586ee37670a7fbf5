"""Parts of a herd as child processes: started together, watched, and ended together.

Every part is the leader of its own process group and holds the reading end of a pipe from us on its standard input:
a part that sees the end of it knows that we are gone, however we went. A Ctrl-C in the terminal reaches us only.
"""

import asyncio
import os
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from kvherd.core.errors import PartDied, StartFailed

LINE_LIMIT_BYTES = 1 << 20
OURS = "kvherd: "


@dataclass(frozen=True, slots=True)
class Part:
    """`answers` is asked, in a thread, whether the part is ready; it must return within seconds."""

    name: str
    command: tuple[str, ...]
    log: Path
    answers: Callable[[], bool]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Child:
    part: Part
    process: asyncio.subprocess.Process
    exit: asyncio.Task[int]
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=30))

    @property
    def ended(self) -> bool:
        return self.process.returncode is not None

    @property
    def last_words(self) -> str:
        """Why it ended, as it said itself; else how it ended."""
        code = self.process.returncode
        ours = [line.removeprefix(OURS) for line in self.last_lines if line.startswith(OURS)]
        how = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        said = ours or list(self.last_lines)
        return f"{said[-1] if said else 'it said nothing'} ({how}; log: {self.part.log})"


class Supervisor:
    """Owns the children; leaving it ends them all: SIGTERM, and SIGKILL for whoever is left after `grace_s`."""

    def __init__(self, *, on_line: Callable[[Child, str], None], grace_s: float) -> None:
        self._on_line = on_line
        self._grace_s = grace_s
        self._children: list[Child] = []
        self._readers: list[asyncio.Task[None]] = []
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._group = await self._stack.enter_async_context(asyncio.TaskGroup())
        self._stack.push_async_callback(self._stop)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Not told of the error: the readers of the children's output must outlive it, for their last lines.
        await self._stack.aclose()

    async def start(self, part: Part) -> Child:
        process = await asyncio.create_subprocess_exec(
            *part.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=LINE_LIMIT_BYTES,
            process_group=0,
            env=os.environ | part.environment,
        )
        child = Child(part, process, exit=self._group.create_task(process.wait()))
        self._children.append(child)
        self._readers.append(self._group.create_task(self._follow(child)))
        return child

    async def wait_ready(self, children: Sequence[Child], *, deadline_s: float, ready: Callable[[Child], None]) -> None:
        """Return once every one answers, calling `ready` for each. Raises `StartFailed` for the first that will not."""
        waiting = list(children)
        try:
            async with asyncio.timeout(deadline_s):
                while waiting:
                    for child in list(waiting):
                        if child.ended:
                            await self._read_to_the_end()
                            raise StartFailed(child.part.name, child.last_words)
                        if await asyncio.to_thread(child.part.answers):
                            waiting.remove(child)
                            ready(child)
                    await asyncio.sleep(0.05)
        except TimeoutError:
            slow = waiting[0].part
            raise StartFailed(slow.name, f"no answer within {deadline_s:g} s (log: {slow.log})") from None

    async def first_death(self) -> PartDied:
        """Wait until any child ends by itself, and say why it did."""
        await asyncio.wait([child.exit for child in self._children], return_when=asyncio.FIRST_COMPLETED)
        await self._read_to_the_end()
        dead = next(child for child in self._children if child.ended)
        return PartDied(dead.part.name, dead.last_words)

    async def _follow(self, child: Child) -> None:
        """Copy a child's output to its log, line by line, until the child and all its own children have closed it."""
        stdout = child.process.stdout
        assert stdout is not None
        with child.part.log.open("wb", buffering=0) as log:
            while True:
                try:
                    line = await stdout.readline()
                except ValueError:  # longer than the limit: dropped by the reader
                    continue
                if not line:
                    return
                log.write(line)
                text = line.decode(errors="replace").rstrip()
                if text:
                    child.last_lines.append(text)
                    self._on_line(child, text)

    async def _read_to_the_end(self) -> None:
        """Give the last lines of a child that has just ended the time to arrive."""
        ended = [reader for reader, child in zip(self._readers, self._children, strict=True) if child.ended]
        if ended:
            await asyncio.wait(ended, timeout=1.0)

    async def _stop(self) -> None:
        try:
            for child in self._children:
                with suppress(ProcessLookupError):
                    child.process.terminate()
            if self._children:
                await asyncio.wait([child.exit for child in self._children], timeout=self._grace_s)
        finally:
            for child in self._children:
                with suppress(ProcessLookupError):  # the usual case: the whole group has ended
                    os.killpg(child.process.pid, signal.SIGKILL)
            if self._readers:
                await asyncio.wait(self._readers, timeout=1.0)
            for reader in self._readers:
                reader.cancel()
