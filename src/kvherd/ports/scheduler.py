"""What a servicer may rely on from the scheduler behind it: the embedded engine's, or a stock engine's."""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from kvherd.core.engine.generation import GenerationRequest, TokenDelta
from kvherd.core.engine.profile import ProfileRequest
from kvherd.core.engine.reports import OrderReport, RankFacts, RankLoad
from kvherd.core.ids import RequestId


class Scheduler(Protocol):
    """One scheduler process a rank, as one thing.

    Calls are safe to cancel at any await. Deadlines are the caller's, except where `timeout_s` is a parameter.
    """

    @property
    def ranks(self) -> Sequence[RankFacts]:
        """What each rank said when it came up, by rank."""
        ...

    @property
    def loads(self) -> Sequence[RankLoad]:
        """The latest load each rank reported by itself; `state` asks for the truth of the moment."""
        ...

    @property
    def late_answers(self) -> int:
        """Answers to orders that came when nobody waited for them any more."""
        ...

    @property
    def open_orders(self) -> int:
        """Orders that wait for an answer now."""
        ...

    def generate(self, request: GenerationRequest) -> AsyncIterator[TokenDelta]:
        """Stream the deltas of one generation, in order, without loss; the last has `finish`.

        Closing the iterator early aborts the request in the scheduler within one step. Raises `RequestDuplicate`
        if its id is alive, `SchedulerDied` or `EngineStopping` when that happens, also mid-stream.
        """
        ...

    async def abort(self, request: RequestId, *, reason: str = "") -> bool:
        """End a request; its stream gets a last delta with `finish` ABORT at once. False if the id is not alive."""
        ...

    async def flush(self, *, timeout_s: float, hold: bool = False) -> OrderReport:
        """Order every rank to clear its cache; `timeout_s` 0 is now or refused.

        Returns within `timeout_s` plus a small grace: ranks that gave no answer are `silent`. Late answers are
        dropped. Cancelling withdraws it: it holds nobody back any more. Raises `SchedulerDied`.
        """
        ...

    async def state(self, *, timeout_s: float = 5.0) -> OrderReport:
        """Ask every rank for its load of this moment. Raises `SchedulerDied`."""
        ...

    async def start_profile(self, profile: ProfileRequest, *, timeout_s: float) -> OrderReport:
        """Order every rank to record a profile: it is on at all of them or, if any refuses or is silent, at none.

        Cancelling withdraws it. Raises `SchedulerDied`.
        """
        ...

    async def stop_profile(self, *, timeout_s: float) -> OrderReport:
        """Order every rank to end its profile; the answers name the files, which are whole. Raises `SchedulerDied`."""
        ...
