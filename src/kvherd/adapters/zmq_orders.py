"""Orders to an engine's scheduler processes: sent to every rank, waited for, and taken back when nobody waits.

Answers come in by `take`. An order that ends without every rank's answer is withdrawn, so that it holds nobody back
where it still waits; and since a rank reads what is sent to it in order, a rank that was stopped reads the order and
its withdrawal together.
"""

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import Callable, Iterable, Sequence

from kvherd.core.engine.orders import Orders
from kvherd.core.engine.reports import OrderAnswer, OrderReport
from kvherd.core.errors import EngineError, QueueFull
from kvherd.core.ids import OrderId, Rank
from kvherd.wire import scheduler_ipc as ipc


class OrderDesk:
    """`send` may raise `QueueFull`."""

    def __init__(self, send: Callable[[Rank, ipc.ToRank], None]) -> None:
        self._send = send
        self._orders = Orders()
        self._reports: dict[OrderId, asyncio.Future[OrderReport]] = {}
        self._prefix = uuid.uuid4().hex[:8]
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._orders)

    @property
    def late_answers(self) -> int:
        return self._orders.late_answers

    def new_id(self) -> OrderId:
        return OrderId(f"{self._prefix}-{next(self._numbers)}")

    async def give(self, message: ipc.Order, ranks: Sequence[Rank], wait_s: float) -> OrderReport:
        """Every rank's answer; those that gave none within `wait_s` are silent. Raises what `fail` was told."""
        order = message.order
        self._orders.open(order, ranks)
        done: asyncio.Future[OrderReport] = asyncio.get_running_loop().create_future()
        self._reports[order] = done
        try:
            for rank in ranks:
                self._send(rank, message)
            async with asyncio.timeout(wait_s):
                return await done
        except TimeoutError:
            self.withdraw(order, self._orders.silent(order))
            return self._orders.close(order)
        except (asyncio.CancelledError, QueueFull):
            self.withdraw(order, self._orders.silent(order))
            raise
        finally:
            del self._reports[order]
            self._orders.forget(order)

    def withdraw(self, order: OrderId, ranks: Iterable[Rank]) -> None:
        for rank in ranks:
            with contextlib.suppress(QueueFull):  # a rank that takes no frame at all is dead or will be declared so
                self._send(rank, ipc.Withdraw(order))

    def take(self, answer: OrderAnswer) -> None:
        report = self._orders.answered(answer)
        waiting = self._reports.get(answer.order)
        if report is not None and waiting is not None and not waiting.done():
            waiting.set_result(report)

    def fail(self, error: EngineError) -> None:
        """No answer will come any more."""
        for report in self._reports.values():
            if not report.done():
                report.set_exception(error)
