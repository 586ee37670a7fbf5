"""Workers that do what a test says, in no time of their own."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvherd.core.errors import WorkerError, WorkerFailed, WorkerUnsupported
from kvherd.core.ids import Rank, WorkerId
from kvherd.ports.completions import Usage
from kvherd.ports.worker import (
    Call,
    Flight,
    FlushAnswer,
    InDoubt,
    Landed,
    Opened,
    ProfileAnswer,
    RankOutcome,
    Responder,
    WorkerFacts,
    WorkerKind,
    WorkerLoad,
)
from kvherd.wire.http_chunks import content

HOURS = 3600.0


@dataclass
class FakeResponder:
    """Keeps what was answered. `failed` is the reason of a broken answer."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    ended: bool = False
    failed: str = ""

    @property
    def started(self) -> bool:
        return self.status != 0

    def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        assert not self.started, "an answer starts once"
        self.status = status
        self.headers = {name.decode().lower(): value.decode() for name, value in headers}

    def write(self, data: bytes) -> None:
        assert self.started, "an answer starts before its body"
        assert not self.ended, "nothing follows the end"
        self.body += data

    def write_chunk(self, chunk: bytes) -> None:
        self.write(content(chunk))

    def end(self) -> None:
        assert self.started, "an answer starts before its end"
        assert not self.ended, "an answer ends once"
        self.ended = True

    def fail(self, reason: str) -> None:
        assert self.started, "only a started answer is failed; before that, raise"
        self.ended = True
        self.failed = reason

    async def drain(self) -> None:
        await asyncio.sleep(0)

    def when_drained(self, then: Callable[[], None]) -> None:
        then()


class FakeFlight:
    """Lands when a task ends that does what `forward` does."""

    def __init__(self, task: asyncio.Task[None], landed: Landed) -> None:
        self._task = task
        self._landed = landed
        self._cancelled = False
        task.add_done_callback(self._land)

    def cancel(self) -> None:
        self._cancelled = True
        self._task.cancel()

    def _land(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if self._cancelled:
            return
        self._landed(error if isinstance(error, Exception) else None)


@dataclass
class FakeWorker:
    """A worker of `ports.worker.Worker`.

    `fails` is raised by every call before anything happened; `breaks` ends an answer in its middle. `takes_s` is what
    a flush waits on its engine, `opens_s` what connecting takes, `first_byte_s` how long an answer needs to begin, and
    `chunk_s` for each of its chunks. `launches`: it has a connection that a request can be launched on.
    `takes_back`: a flush whose caller leaves is not obeyed; `cut` is raised in place of an answer to one.
    """

    id: WorkerId
    facts: WorkerFacts = field(default_factory=lambda: WorkerFacts(WorkerKind.KVHERD_HTTP, ("m",), block_size=4))
    fails: WorkerError | None = None
    breaks: str = ""
    takes_s: float = 0.0
    opens_s: float = 0.0
    first_byte_s: float = 0.0
    chunk_s: float = 0.0
    says_opened: bool = True
    takes_back: bool = True
    cut: WorkerError | None = None
    answer: FlushAnswer = field(default_factory=lambda: FlushAnswer(done=True, message="cleared"))
    chunks: tuple[bytes, ...] = (b'{"ok":', b"true}")
    status: int = 200
    answer_headers: tuple[tuple[bytes, bytes], ...] = ((b"content-type", b"application/json"),)
    usage: Usage | None = None
    loaded: WorkerLoad = field(default_factory=lambda: WorkerLoad(running=0, waiting=0))
    tokens: Callable[[bytes], list[int]] | None = None
    tells_metrics: bytes = b""
    profiled: list[dict[str, object]] = field(default_factory=list)
    flushes: int = 0
    held: int = 0
    opening_now: int = 0
    probes: int = 0
    closed: bool = False
    launches: bool = False
    sidecar: str | None = None
    calls: list[Call] = field(default_factory=list)
    cancelled: int = 0

    def _check(self) -> None:
        assert not self.closed, "nothing may be called after close"
        if self.fails is not None:
            raise self.fails

    async def detect(self) -> WorkerFacts:
        await asyncio.sleep(self.opens_s)
        self._check()
        return self.facts

    async def forward(self, call: Call, responder: Responder) -> None:
        self.calls.append(call)
        try:
            await asyncio.sleep(self.first_byte_s)
            self._check()
            extra = tuple(call.extra_headers)
            responder.start(self.status, self.answer_headers + extra)
            if call.on_first_token is not None and self.status == 200:
                call.on_first_token()
            for chunk in self.chunks:
                await asyncio.sleep(self.chunk_s)
                responder.write(chunk)
                await responder.drain()
                if self.breaks:
                    responder.fail(self.breaks)
                    raise WorkerFailed(self.id, self.breaks)
            if call.on_usage is not None and self.usage is not None:
                call.on_usage(self.usage)
            responder.end()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    def launch(self, call: Call, responder: Responder, landed: Landed) -> Flight | None:
        if not self.launches:
            return None
        return FakeFlight(asyncio.get_running_loop().create_task(self.forward(call, responder)), landed)

    async def probe(self) -> None:
        self.probes += 1
        await asyncio.sleep(self.opens_s)
        self._check()

    async def load(self) -> WorkerLoad:
        self._check()
        return self.loaded

    async def tokenize(self, body: bytes) -> list[int]:
        self._check()
        if self.tokens is None:
            raise WorkerUnsupported(self.id, "telling its tokens")
        return self.tokens(body)

    async def flush(
        self, *, timeout_s: float, hold: bool = False, opened: Opened | None = None, in_doubt: InDoubt | None = None
    ) -> FlushAnswer:
        self.flushes += 1
        self.held += hold
        self.opening_now += 1
        try:
            await asyncio.sleep(self.opens_s)
        finally:
            self.opening_now -= 1
        self._check()
        if opened is not None and self.says_opened:
            opened()
        if in_doubt is not None and not self.takes_back:
            in_doubt(True)
        await asyncio.sleep(self.takes_s)
        if self.cut is not None:
            raise self.cut
        return self.answer

    async def start_profile(self, fields: Mapping[str, object]) -> ProfileAnswer:
        await asyncio.sleep(self.opens_s + self.takes_s)
        self._check()
        self.profiled.append(dict(fields))
        return ProfileAnswer("recording", "profile-1")

    async def stop_profile(self) -> ProfileAnswer:
        await asyncio.sleep(self.opens_s + self.takes_s)
        self._check()
        return ProfileAnswer("recorded", "profile-1", ("/tmp/profile-1-rank0.trace.json",))

    async def metrics(self) -> bytes:
        self._check()
        return self.tells_metrics

    def place_sidecar(self, url: str | None) -> None:
        self.sidecar = url

    async def close(self) -> None:
        self.closed = True
        await asyncio.sleep(0)


def refusing_ranks(*reasons: str) -> FlushAnswer:
    """An answer whose ranks each refuse for a reason, an empty one being a rank that did it."""
    ranks = tuple(RankOutcome(rank=Rank(index), done=not why, message=why) for index, why in enumerate(reasons))
    return FlushAnswer(done=not any(reasons), message="; ".join(filter(None, reasons)), ranks=ranks)


def cannot_flush(worker: WorkerId) -> WorkerUnsupported:
    return WorkerUnsupported(worker, "flush")
