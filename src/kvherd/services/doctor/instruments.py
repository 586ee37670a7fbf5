"""What an examination is done with, and what an operator said of the patient."""

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvherd.core.ids import Rank
from kvherd.ports.completions import Tokenizer
from kvherd.ports.kv_feed import KvFeed
from kvherd.ports.kv_frames import FrameFeed
from kvherd.ports.worker import Worker, WorkerFacts, WorkerKind
from kvherd.wire.told_events import EventsTold


class Answer(Protocol):
    @property
    def status(self) -> int: ...

    def document_if_ok(self) -> Mapping[str, Any]: ...


class HttpDoor(Protocol):
    """Asks the server itself. Raises a `WorkerError`; any status is an answer."""

    async def ask(self, method: str, path: str) -> Answer: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Complaint:
    """What the operator named. `requests` False: nothing may be generated."""

    url: str
    host: str = "127.0.0.1"
    events: str | None = None
    replay: str | None = None
    bind: bool = False
    tokenizer: str | None = None
    requests: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruments:
    """`door` is of a server on HTTP, `methods` names the calls of one on gRPC. `frames` makes a reader for each rank
    from the endpoints of rank 0 and may raise `OptionInvalid`; `feed` one for a URL of gRPC; `tokenizer` as the
    gateway's; `expires_at_s` is when the certificate expires that the server showed, if it showed one.
    """

    worker: Worker
    door: HttpDoor | None
    methods: Callable[[], Awaitable[frozenset[str]]] | None
    frames: Callable[[str, str | None, int, bool], Mapping[Rank, FrameFeed]]
    feed: Callable[[str], KvFeed]
    tokenizer: Callable[[str], Awaitable[Tokenizer]]
    expires_at_s: Callable[[], float | None] = lambda: None
    wall: Callable[[], float] = time.time


@dataclass(slots=True)
class Chart:
    """What was learned on the way."""

    complaint: Complaint
    facts: WorkerFacts
    told: EventsTold = field(default_factory=EventsTold)

    @property
    def vllm(self) -> bool:
        return self.facts.kind in (WorkerKind.VLLM_HTTP, WorkerKind.VLLM_GRPC)

    @property
    def sglang(self) -> bool:
        return self.facts.kind is WorkerKind.SGLANG_HTTP or (
            self.facts.kind is WorkerKind.SGLANG_GRPC and not self.facts.version.startswith("kvherd")
        )

    @property
    def over_http(self) -> bool:
        return self.complaint.url.startswith("http")

    @property
    def model(self) -> str:
        return next(iter(self.facts.models), "")
