"""Flushes that wait for an idle moment.

Each is answered exactly once: done when the cache is cleared, timed out at its time, or refused at once; one that is
withdrawn is not answered at all. All that wait share one clearing. A flush that holds keeps requests that came after
it from being admitted.
"""

import math
from dataclasses import dataclass

from kvherd.core.engine.reports import Blocker, OrderAnswer
from kvherd.core.ids import OrderId, Rank

MAX_PENDING = 1024


@dataclass(frozen=True, slots=True)
class PendingFlush:
    """`serial` is its turn among the requests."""

    order: OrderId
    serial: int
    timeout_s: float
    deadline_s: float
    hold: bool


def describe(blockers: tuple[Blocker, ...]) -> str:
    return ", ".join(f"{blocker.count} {blocker.kind}" for blocker in blockers)


class Flushes:
    """The flushes that wait on one rank."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._pending: list[PendingFlush] = []

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def next_deadline_s(self) -> float | None:
        return min((flush.deadline_s for flush in self._pending), default=None)

    @property
    def hold_from(self) -> float:
        """Requests with a later turn than this wait behind a flush."""
        return min((flush.serial for flush in self._pending if flush.hold), default=math.inf)

    def refusal(self, timeout_s: float, blockers: tuple[Blocker, ...]) -> str | None:
        """Why a flush with this time-out is not even tried, in words; None if it may be (or may wait)."""
        if not math.isfinite(timeout_s) or timeout_s < 0:
            return f"timeout_s is {timeout_s}; it must be a finite number of seconds, 0 or more"
        if blockers and timeout_s == 0:
            return f"the engine is busy: {describe(blockers)}"
        if len(self._pending) >= MAX_PENDING:
            return f"{MAX_PENDING} flushes are waiting here already, the limit"
        return None

    def add(self, flush: PendingFlush) -> None:
        self._pending.append(flush)

    def refused(self, order: OrderId, message: str, blockers: tuple[Blocker, ...] = ()) -> OrderAnswer:
        return OrderAnswer(order, self._rank, done=False, message=message, blockers=blockers)

    def withdraw(self, order: OrderId) -> None:
        """Its caller left: it holds nobody back any more. One that does not wait here is none of our affair."""
        self._pending = [flush for flush in self._pending if flush.order != order]

    def expire(self, now_s: float, blockers: tuple[Blocker, ...]) -> list[OrderAnswer]:
        """Give up those whose time has come."""
        due = [flush for flush in self._pending if flush.deadline_s <= now_s]
        self._pending = [flush for flush in self._pending if flush.deadline_s > now_s]
        return [
            OrderAnswer(
                flush.order,
                self._rank,
                done=False,
                message=f"not idle within {flush.timeout_s:g} s: {describe(blockers)}",
                timed_out=True,
                blockers=blockers,
            )
            for flush in due
        ]

    def cleared(self, blocks: int) -> list[OrderAnswer]:
        """The cache was cleared: all that wait are done."""
        done, self._pending = self._pending, []
        return [
            OrderAnswer(flush.order, self._rank, done=True, message=f"cleared {blocks} blocks", cleared_blocks=blocks)
            for flush in done
        ]

    def refuse_all(self, reason: str) -> list[OrderAnswer]:
        """Nothing will be cleared any more."""
        refused, self._pending = self._pending, []
        return [self.refused(flush.order, reason) for flush in refused]
