"""What the gateway may rely on from one worker, whatever it speaks."""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final, Protocol

from kvherd.core.ids import Rank, RequestId, WorkerId
from kvherd.ports.completions import Tokenizer, Usage

SGLANG_HEALTH_S: Final = 20.0
"""A stock SGLang says that it is well after the next step of its scheduler, and by then that it is not."""


class WorkerKind(StrEnum):
    """What a worker turned out to be; detected, never guessed from its URL."""

    KVHERD_HTTP = "kvherd-http"
    VLLM_HTTP = "vllm-http"
    SGLANG_HTTP = "sglang-http"
    OPENAI_HTTP = "openai-http"
    SGLANG_GRPC = "sglang-grpc"
    VLLM_GRPC = "vllm-grpc"
    TRTLLM_GRPC = "trtllm-grpc"
    MLX_GRPC = "mlx-grpc"


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What detection learned. `events_url` is where its KV events are, if anywhere; `block_size` 0 is unknown.

    `adapters` are those of the models that are LoRA adapters of the first. `addressable`: a call may name its rank.
    `max_running` requests are computed at a time, by all ranks together; 0 is unknown.
    `health_s`: it may need so long to tell its health, by its own rules; 0: it answers at once, if it lives.
    """

    kind: WorkerKind
    models: tuple[str, ...]
    block_size: int = 0
    ranks: int = 1
    max_context_tokens: int = 0
    capacity_tokens: int = 0
    max_running: int = 0
    events_url: str | None = None
    version: str = ""
    adapters: tuple[str, ...] = ()
    addressable: bool = False
    health_s: float = 0.0


class News(Protocol):
    """Who wants to know how an answer goes. Both are called at most once, must be cheap and must not raise."""

    def first_token(self) -> None:
        """The first piece of the answer's content goes out."""
        ...

    def usage(self, told: Usage) -> None:
        """What it cost, if the worker says, before the answer ends."""
        ...


class NewsTo:
    """`News` by two calls, either of which may be missing."""

    def __init__(
        self, on_first_token: Callable[[], None] | None = None, on_usage: Callable[[Usage], None] | None = None
    ) -> None:
        self._on_first_token = on_first_token
        self._on_usage = on_usage

    def first_token(self) -> None:
        if self._on_first_token is not None:
            self._on_first_token()

    def usage(self, told: Usage) -> None:
        if self._on_usage is not None:
            self._on_usage(told)


class Call:
    """One request on the data path. `body` is what the client sent, untouched; `prompt_token_ids` is what routing
    made of it, if it did (a gRPC worker needs it, an HTTP worker does not), with `tokenizer`: they are nothing to a
    worker that has another one, though its model has the same name. None: with the worker's own. `extra_headers` go
    into the answer.

    `rank`, of an addressable worker, is to serve it, and the worker finds out how to say so.

    `ends`: when nobody waits for its answer any more, by the event loop's clock, and how many seconds the client gave
    it; the engine is told where it can be. An engine that ends it then has not failed: `DeadlinePassed` may be raised.

    Never changed. No dataclass, for one is made for every try: see `DataRequest`.
    """

    __slots__ = (
        "body",
        "ends",
        "extra_headers",
        "headers",
        "method",
        "model",
        "news",
        "path",
        "prompt_token_ids",
        "rank",
        "request",
        "stream",
        "tokenizer",
    )

    def __init__(  # noqa: PLR0917 - what a call is
        self,
        method: str,
        path: str,
        headers: Sequence[tuple[bytes, bytes]],
        body: bytes,
        request: RequestId,
        model: str = "",
        stream: bool = False,
        prompt_token_ids: Sequence[int] | None = None,
        extra_headers: Sequence[tuple[bytes, bytes]] = (),
        rank: Rank | None = None,
        news: News | None = None,
        ends: tuple[float, float] | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.method = method
        self.path = path
        self.headers = headers
        self.body = body
        self.request = request
        self.model = model
        self.stream = stream
        self.prompt_token_ids = prompt_token_ids
        self.extra_headers = extra_headers
        self.rank = rank
        self.news = news
        self.ends = ends
        self.tokenizer = tokenizer

    @property
    def on_first_token(self) -> Callable[[], None] | None:
        return None if self.news is None else self.news.first_token

    @property
    def on_usage(self) -> Callable[[Usage], None] | None:
        return None if self.news is None else self.news.usage

    def changed(
        self,
        *,
        headers: Sequence[tuple[bytes, bytes]] | None = None,
        body: bytes | None = None,
        ends: tuple[float, float] | None = None,
    ) -> "Call":
        """The same but for what is given."""
        return Call(
            self.method,
            self.path,
            self.headers if headers is None else headers,
            self.body if body is None else body,
            self.request,
            self.model,
            self.stream,
            self.prompt_token_ids,
            self.extra_headers,
            self.rank,
            self.news,
            self.ends if ends is None else ends,
            self.tokenizer,
        )


class Responder(Protocol):
    """Where an answer goes, byte by byte. Methods are synchronous and cheap; order is kept.

    After `start`, exactly one of `end` and `fail` follows. Once the client is gone the calls do nothing, and the
    task that runs `Worker.forward` is cancelled.
    """

    @property
    def started(self) -> bool: ...

    def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None: ...

    def write(self, data: bytes) -> None: ...

    def write_chunk(self, chunk: bytes) -> None:
        """`write` what a whole chunk of events holds (`wire.http_chunks`), which may be passed on as it is."""
        ...

    def end(self) -> None: ...

    def fail(self, reason: str) -> None:
        """End a started answer that cannot be completed: an SSE error event, or a cut connection; never silence."""
        ...

    async def drain(self) -> None:
        """Wait until the client has taken enough that more may be written."""
        ...

    def when_drained(self, then: Callable[[], None]) -> None:
        """Call `then` when more may be written, before returning if that is now. Also if the client leaves."""
        ...


class Flight(Protocol):
    """A request under way for which no task waits: a task costs more than all else that a small answer needs."""

    def cancel(self) -> None:
        """End it at once, on the engine too. It does not land any more."""
        ...


Landed = Callable[[Exception | Coroutine[Any, Any, None] | None], None]
"""Called once, and never from within `launch`. None: the answer has ended. An error: what awaiting would have raised.
A coroutine: it is to go on in a task, as another try on a new connection must, and is awaited as `forward` would be.
"""


@dataclass(frozen=True, slots=True)
class RankOutcome:
    rank: Rank
    done: bool
    message: str


@dataclass(frozen=True, slots=True)
class FlushAnswer:
    """A worker's own answer to a flush. `done` False is a refusal, or a wait that ended (`timed_out`): no failure."""

    done: bool
    message: str
    ranks: tuple[RankOutcome, ...] = ()
    timed_out: bool = False


NOT_HELD: Final = "new requests were not held: this engine cannot"
"""What the message of a flush says where `hold` had no effect."""

Opened = Callable[[], None]
"""Called once when an order is on its way: connected and sent, only the engine's answer is awaited."""

InDoubt = Callable[[bool], None]
"""Called with True when an order was sent to an engine that may obey it after its caller has left, and may not tell of
that at once; with False when it has answered and will be asked again.
"""


@dataclass(frozen=True, slots=True)
class ProfileAnswer:
    """What became of an order to begin or end a profile, in the engine's own words; where its traces are, if told.
    `done` False is a refusal by ranks that are told apart: another raises.
    """

    message: str
    profile_id: str = ""
    files: tuple[str, ...] = ()
    done: bool = True
    ranks: tuple[RankOutcome, ...] = ()


def not_held(answer: FlushAnswer) -> FlushAnswer:
    """The answer of an engine that cannot hold requests and was asked to."""
    return replace(answer, message="; ".join(filter(None, (answer.message, NOT_HELD))))


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """All ranks together. `ranks`: each by itself, where the worker tells them apart."""

    running: int
    waiting: int
    used_tokens: int = 0
    capacity_tokens: int = 0
    ranks: Mapping[Rank, "WorkerLoad"] = field(default_factory=dict, compare=False)


class Worker(Protocol):
    """One engine worker. Any method may raise a `WorkerError`, and no other error of its own.

    Calls are safe to cancel at any await; cancelling `forward` aborts the request on the engine. Deadlines are the
    caller's. Methods never retry.
    """

    @property
    def id(self) -> WorkerId: ...

    async def detect(self) -> WorkerFacts: ...

    async def forward(self, call: Call, responder: Responder) -> None:
        """Run one request and write its whole answer. Raises before `responder.start` if another worker may try;
        once started, failures go to `responder.fail` and raise `WorkerFailed` too.
        """
        ...

    def launch(self, call: Call, responder: Responder, landed: Landed) -> Flight | None:
        """`forward` without a task. None: it cannot now, nothing has happened, and `forward` is to be awaited."""
        ...

    async def probe(self) -> None:
        """Return if it is healthy; raise what is wrong."""
        ...

    async def load(self) -> WorkerLoad: ...

    async def tokenize(self, body: bytes) -> Sequence[int]:
        """Its own tokens of this chat's or completion's prompt. Raises `WorkerUnsupported` if it does not tell."""
        ...

    async def flush(
        self, *, timeout_s: float, hold: bool = False, opened: Opened | None = None, in_doubt: InDoubt | None = None
    ) -> FlushAnswer:
        """Clear its cache, now or when it is idle within `timeout_s`. With `hold`, requests that come meanwhile wait
        behind the flush; an engine that cannot do so flushes without, and its answer's message says it.

        Raises `WorkerUnsupported` if this kind cannot flush. Calls `opened` once the order was sent. Cancelled, it
        withdraws the order, where `in_doubt` does not say that it cannot.
        """
        ...

    async def start_profile(self, fields: Mapping[str, object]) -> ProfileAnswer:
        """Begin a profile; `fields` are SGLang's, checked already (`wire/profile_fields`).

        Raises `WorkerUnsupported` where the engine has no profiler, `WorkerRefused` with its reason where it will not
        now, `FieldInvalid` for a field that no way to this engine carries.
        """
        ...

    async def stop_profile(self) -> ProfileAnswer:
        """End it; the traces are whole when this returns. Raises as `start_profile` does."""
        ...

    async def metrics(self) -> bytes:
        """The engine's own metrics, in Prometheus' text format. Raises `WorkerUnsupported` if it has none."""
        ...

    def place_sidecar(self, url: str | None) -> None:
        """Where the HTTP sidecar of an engine on gRPC is; None: one port above it. Raises `OptionInvalid`."""
        ...

    async def close(self) -> None:
        """Release every connection; cancelled, without waiting for their ends. Idempotent; nothing may be called after
        it.
        """
        ...
