"""One order to all workers: what became of it, worker by worker and rank by rank.

The rules of the answer:

* 200 when all workers that can obey did, 207 when some of them did, 502 when none did, 503 when there is no worker;
* a worker that cannot obey at all is `unsupported`: it is counted as not done and named, so `success` is false even
  where the status is 200.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvherd.core.errors import (
    WorkerError,
    WorkerLocked,
    WorkerRefused,
    WorkerTimedOut,
    WorkerUnreachable,
    WorkerUnsupported,
)
from kvherd.core.ids import Rank, WorkerId


class Outcome(StrEnum):
    DONE = "done"
    REFUSED = "refused"
    UNSUPPORTED = "unsupported"
    UNREACHABLE = "unreachable"
    TIMED_OUT = "timed_out"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class RankResult:
    rank: Rank
    outcome: Outcome
    message: str


@dataclass(frozen=True, slots=True)
class WorkerResult:
    """What became of the order at one worker. `ranks` is empty where the worker does not tell them apart; `files` are
    what it wrote, by its own account.
    """

    worker: WorkerId
    kind: str
    outcome: Outcome
    message: str
    seconds: float
    ranks: tuple[RankResult, ...] = ()
    files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FanoutReport:
    """One result a worker, in the order in which the workers were given."""

    results: tuple[WorkerResult, ...]

    @property
    def obeyed(self) -> list[WorkerId]:
        return [result.worker for result in self.results if result.outcome is Outcome.DONE]

    @property
    def success(self) -> bool:
        """Every worker did it; false for an empty fleet."""
        return bool(self.results) and len(self.obeyed) == len(self.results)

    @property
    def http_status(self) -> int:
        if not self.results:
            return 503
        if not self.obeyed:
            return 502
        able = sum(result.outcome is not Outcome.UNSUPPORTED for result in self.results)
        return 200 if len(self.obeyed) == able else 207

    def message(self, done: str) -> str:
        """A sentence such as "2 of 3 workers flushed; timed_out: cat"; `done` is the past participle."""
        if not self.results:
            return f"no worker is registered; nothing was {done}"
        total = len(self.results)
        head = f"{len(self.obeyed)} of {total} worker{'s' if total != 1 else ''} {done}"
        return "; ".join([head, *self._named_failures()])

    def _named_failures(self, most: int = 5) -> list[str]:
        """One part an outcome, naming the first few: a sentence with a thousand names helps nobody."""
        counts = Counter(result.outcome for result in self.results)
        parts = []
        for outcome in Outcome:
            if outcome is Outcome.DONE or not counts[outcome]:
                continue
            names = [result.worker for result in self.results if result.outcome is outcome]
            more = f" and {len(names) - most} more" if len(names) > most else ""
            parts.append(f"{outcome}: {', '.join(names[:most])}{more}")
        return parts


def outcome_of(error: WorkerError) -> Outcome:
    """Sort a worker's error by what it says about the order."""
    match error:
        case WorkerRefused() | WorkerLocked():
            return Outcome.REFUSED
        case WorkerUnsupported():
            return Outcome.UNSUPPORTED
        case WorkerUnreachable():
            return Outcome.UNREACHABLE
        case WorkerTimedOut():
            return Outcome.TIMED_OUT
        case _:
            return Outcome.FAILED


def is_own_answer(error: BaseException) -> bool:
    """Whether the worker itself said that it does not obey: it will not do so later either."""
    return isinstance(error, WorkerRefused | WorkerLocked | WorkerUnsupported)


def total_with_scheme(results: Sequence[WorkerResult], *schemes: str) -> int:
    """How many of the workers have an address of one of these schemes."""
    return sum(result.worker.startswith(tuple(f"{scheme}://" for scheme in schemes)) for result in results)
