"""The only fan-out: one order to every worker, and an honest answer for each.

At most `at_once` orders are being opened at one time. An order holds its slot until it is sent (the worker calls
`opened`), has ended, or has taken `opening_s`: one that waits on its engine holds none, and a herd of unreachable
hosts cannot keep the living from being reached. `in_flight` bounds those under way altogether.
The deadline counts from the call and includes waiting for a slot and connecting.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvherd.core.errors import FieldInvalid, WorkerError, WorkerTimedOut
from kvherd.core.fleet.fanout import FanoutReport, Outcome, RankResult, WorkerResult, is_own_answer, outcome_of
from kvherd.core.ids import WorkerId
from kvherd.ports.worker import FlushAnswer, ProfileAnswer, RankOutcome, Worker
from kvherd.wire.status import public_message

log = logging.getLogger(__name__)

GRACE_S = 5.0
"""What a worker gets beyond the time the engine may wait: connecting, sending and answering."""


Flushed = Callable[[WorkerId, float], None]
"""Told of which worker, and when the order was sent to it, by the event loop's clock."""


@dataclass(frozen=True, slots=True)
class FlushHeed:
    """Who keeps account of what workers hold. `obeyed`: it cleared its cache; it is called before the order's caller is
    answered. `in_doubt`: the order reached it, and whether it obeys nobody will hear from it.
    """

    obeyed: Flushed
    in_doubt: Flushed


UNHEEDED: Final = FlushHeed(obeyed=lambda _, __: None, in_doubt=lambda _, __: None)
"""Nobody keeps account."""


@dataclass(frozen=True, slots=True)
class Addressee:
    """A worker and what it turned out to be (empty: not detected yet)."""

    worker: Worker
    kind: str


@dataclass(slots=True)
class _Slots:
    """Bounds of one fan-out."""

    at_once: int
    in_flight: int
    opening_s: float
    opening: asyncio.Semaphore = field(init=False)
    flying: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self.opening = asyncio.Semaphore(self.at_once)
        self.flying = asyncio.Semaphore(self.in_flight)


async def flush_fleet(
    fleet: Sequence[Addressee],
    *,
    timeout_s: float,
    heed: FlushHeed,
    hold: bool = False,
    at_once: int = 32,
    in_flight: int = 1024,
    opening_s: float = 1.0,
) -> FanoutReport:
    """Order every worker to clear its cache, and return within `timeout_s` + 5 s with one result a worker.

    `timeout_s` is how long an engine may wait to be idle; 0 is now or refused. With `hold`, requests that come
    meanwhile wait behind the flush, where the engine can do that. `heed` is told of each worker that did it, at
    once, and of each that may. Raises nothing for a worker's sake. Cancelling withdraws what is under way.
    """
    slots = _Slots(at_once, in_flight, opening_s)

    async def order(to: Addressee, started_s: float) -> WorkerResult:
        async with slots.flying:
            ordered_s, answer = await _flush_in_slot(to.worker, slots, heed, timeout_s=timeout_s, hold=hold)
        if answer.done:
            heed.obeyed(to.worker.id, ordered_s)
        return _answered(to, answer, started_s)

    return await _order_all(fleet, order, deadline_s=timeout_s + GRACE_S)


PROFILE_S = 605.0
"""An engine has ten minutes to begin or end a profile: traces are large."""

ProfileOrder = Callable[[Worker], Awaitable[ProfileAnswer]]


async def profile_fleet(fleet: Sequence[Addressee], order: ProfileOrder, *, at_once: int = 32) -> FanoutReport:
    """Give every worker this order about its profile, and return within `PROFILE_S` with one result a worker.

    Raises nothing for a worker's sake.
    """
    slots = asyncio.Semaphore(at_once)

    async def give(to: Addressee, started_s: float) -> WorkerResult:
        async with slots:
            answer = await order(to.worker)
        outcome = Outcome.DONE if answer.done else Outcome.REFUSED
        return _result(to, outcome, answer.message, started_s, ranks=_each(answer.ranks), files=answer.files)

    return await _order_all(fleet, give, deadline_s=PROFILE_S)


_Give = Callable[[Addressee, float], Awaitable[WorkerResult]]


async def _order_all(fleet: Sequence[Addressee], give: _Give, *, deadline_s: float) -> FanoutReport:
    """Give the order to each worker, at once; whatever goes wrong at one is its own result."""
    started_s = asyncio.get_running_loop().time()

    async def result(to: Addressee) -> WorkerResult:
        try:
            async with asyncio.timeout_at(started_s + deadline_s):
                return await give(to, started_s)
        except TimeoutError:
            return _result(to, Outcome.TIMED_OUT, str(WorkerTimedOut(to.worker.id, deadline_s)), started_s)
        except FieldInvalid as error:
            return _result(to, Outcome.REFUSED, str(error), started_s)
        except WorkerError as error:
            return _result(to, outcome_of(error), str(error), started_s)
        except Exception as error:  # a defect in one adapter must not cost the other workers their order
            log.exception("an order to %s failed unforeseen", to.worker.id)
            return _result(to, Outcome.FAILED, public_message(error), started_s)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(result(to)) for to in fleet]
    return FanoutReport(tuple(task.result() for task in tasks))


async def _flush_in_slot(
    worker: Worker, slots: _Slots, heed: FlushHeed, *, timeout_s: float, hold: bool
) -> tuple[float, FlushAnswer]:
    """Flush one worker, holding an opening slot no longer than its opening takes; tells when it was ordered."""
    await slots.opening.acquire()
    loop, held, doubt = asyncio.get_running_loop(), True, False

    def give_back() -> None:
        nonlocal held
        if held:
            held = False
            slots.opening.release()

    def in_doubt(is_so: bool) -> None:
        nonlocal doubt
        doubt = is_so

    ordered_s = loop.time()
    timer = loop.call_later(slots.opening_s, give_back)
    try:
        return ordered_s, await worker.flush(timeout_s=timeout_s, hold=hold, opened=give_back, in_doubt=in_doubt)
    except BaseException as error:
        if doubt and not is_own_answer(error):
            heed.in_doubt(worker.id, ordered_s)
        raise
    finally:
        timer.cancel()
        give_back()


def _answered(to: Addressee, answer: FlushAnswer, started_s: float) -> WorkerResult:
    missed = Outcome.TIMED_OUT if answer.timed_out else Outcome.REFUSED
    outcome = Outcome.DONE if answer.done else missed
    return _result(to, outcome, answer.message, started_s, ranks=_each(answer.ranks))


def _each(ranks: Iterable[RankOutcome]) -> tuple[RankResult, ...]:
    return tuple(RankResult(one.rank, Outcome.DONE if one.done else Outcome.REFUSED, one.message) for one in ranks)


def _result(
    to: Addressee,
    outcome: Outcome,
    message: str,
    started_s: float,
    *,
    ranks: tuple[RankResult, ...] = (),
    files: tuple[str, ...] = (),
) -> WorkerResult:
    seconds = asyncio.get_running_loop().time() - started_s
    return WorkerResult(to.worker.id, to.kind, outcome, message, round(seconds, 6), ranks, files)
