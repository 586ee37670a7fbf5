"""What may be relied on from an engine that can profile itself."""

from collections.abc import Mapping
from typing import Protocol

from kvherd.ports.worker import Worker


class ProfiledWorker(Worker, Protocol):
    """A worker that takes orders to profile, as far as its engine does. Returns the engine's own words.

    Raises `WorkerUnsupported` where the engine has no profiler, `WorkerRefused` with its reason where it will not now,
    `FieldInvalid` for a field that would not reach it. A deadline is the caller's.
    """

    async def start_profile(self, fields: Mapping[str, object]) -> str: ...

    async def stop_profile(self) -> str: ...
