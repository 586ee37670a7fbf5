"""Orders to all ranks, and their answers, matched by order and rank.

An answer belongs to the order whose id it carries, however late it comes: one that comes after its order was given up
is dropped and counted, and can never be taken for the next order's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvherd.core.engine.reports import OrderAnswer, OrderReport
from kvherd.core.ids import OrderId, Rank


@dataclass(slots=True)
class _Open:
    ranks: tuple[Rank, ...]
    answers: dict[Rank, OrderAnswer] = field(default_factory=dict)


class Orders:
    """The orders under way at one engine."""

    def __init__(self) -> None:
        self._open: dict[OrderId, _Open] = {}
        self.late_answers = 0

    def __len__(self) -> int:
        return len(self._open)

    def open(self, order: OrderId, ranks: Sequence[Rank]) -> None:
        self._open[order] = _Open(tuple(ranks))

    def answered(self, answer: OrderAnswer) -> OrderReport | None:
        """Take one rank's answer; the report once every rank has answered. A rank's second answer is dropped."""
        under_way = self._open.get(answer.order)
        if under_way is None or answer.rank not in under_way.ranks or answer.rank in under_way.answers:
            self.late_answers += 1
            return None
        under_way.answers[answer.rank] = answer
        if len(under_way.answers) < len(under_way.ranks):
            return None
        return self.close(answer.order)

    def silent(self, order: OrderId) -> tuple[Rank, ...]:
        """The ranks that have not answered it yet; none if it is not under way."""
        under_way = self._open.get(order)
        return tuple(rank for rank in under_way.ranks if rank not in under_way.answers) if under_way else ()

    def close(self, order: OrderId) -> OrderReport:
        """End it now, with whatever has come; ranks without an answer are silent."""
        under_way = self._open.pop(order)
        return OrderReport(
            answers=tuple(under_way.answers[rank] for rank in under_way.ranks if rank in under_way.answers),
            silent=tuple(rank for rank in under_way.ranks if rank not in under_way.answers),
        )

    def forget(self, order: OrderId) -> None:
        """Nobody waits for it any more; its answers are late from now on."""
        self._open.pop(order, None)
