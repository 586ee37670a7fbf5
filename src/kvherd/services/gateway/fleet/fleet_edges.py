"""What a fleet is given: how its parts are made, who follows its KV events, and its bounds."""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from kvherd.core.ids import WorkerId
from kvherd.ports.completions import Tokenizer
from kvherd.ports.kv_feed import EventSource, KvFeed
from kvherd.ports.worker import Worker
from kvherd.services.gateway.settings import ProbeBounds

WorkerFactory = Callable[[str, str | None], Worker]
"""Makes a worker from its URL and its engine's own key, if it has one; connects to nothing yet."""

FeedFactory = Callable[[EventSource], KvFeed]
"""Makes a source of KV events from where they are; connects to nothing yet. Raises `OptionInvalid`."""

TokenizerFactory = Callable[[str], Awaitable[Tokenizer]]
"""Fetches the tokenizer of the engine behind a gRPC URL, or reads it from a directory. Raises a `KvherdError`."""


Prepare = Callable[[Iterable[str]], None]
"""Loads what the factories above need for workers and events at these URLs, so that they do not stand still for it on
the event loop. It blocks for up to a second itself.
"""


@dataclass(frozen=True, slots=True)
class FleetConfig:
    probe: ProbeBounds = field(default_factory=ProbeBounds)
    load_deadline_s: float = 2.0
    detect_deadline_s: float = 5.0
    tokenizer_deadline_s: float = 30.0
    retry_s: float = 0.25
    max_retry_s: float = 5.0
    drain_s: float = 30.0
    retire_s: float = 600.0
    max_workers: int = 1024


class Following(Protocol):
    """Keeps an index true to the KV events of the workers it was given."""

    def add(self, worker: WorkerId, feed: KvFeed, *, model: str) -> None: ...

    def remove(self, worker: WorkerId) -> None: ...

    def returned(self, worker: WorkerId) -> None: ...
