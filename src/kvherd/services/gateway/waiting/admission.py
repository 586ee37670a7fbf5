"""How many requests are under way at once, and how many may wait; what comes beyond is told to return later.

Two things can be waited for: a place among those under way, and a worker with little before it (late binding, see
`late_binding.py`). Who waits for a worker has given its place back. Both wait in one room with one bound, fair between
the names of API keys.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kvherd.core.errors import KvherdError
from kvherd.core.fleet.refusals import DeadlinePassed, GatewayBusy, WaitedInVain
from kvherd.core.fleet.waiting_line import Ticket, WaitingLine
from kvherd.ports.worker import Flight, Landed, Responder
from kvherd.services.gateway.relay.edge import DataHandler, DataRequest, Launch
from kvherd.services.gateway.settings import AdmissionBounds
from kvherd.services.gateway.waiting.passage import Passage, launch_none, launch_within
from kvherd.services.gateway.waiting.patience import deadline_s, with_deadline

_LOOK_S: Final = 0.25
"""A worker may get room without a sign, such as by its rate's being learned."""
_SOONEST_S: Final = 0.001


@dataclass(slots=True, eq=False)
class _Waiter:
    turn: asyncio.Future[bool]
    place: "Ticket[_Waiter] | None" = None
    line: "_Line | None" = None

    def join(self, line: "_Line", name: str, weight: float, cost_s: float, now_s: float) -> None:
        self.line, self.place = line, line.join(self, name=name, weight=weight, cost_s=cost_s, now_s=now_s)

    def leave(self) -> bool:
        """Whether it was still in line."""
        return self.line is not None and self.place is not None and self.line.leave(self.place)


_Line = WaitingLine[_Waiter]


@dataclass(slots=True, eq=False)
class Gate:
    """Those who wait for a worker of one kind; `room_in_s` is when one will have room, as far as can be told."""

    room_in_s: Callable[[], float]
    line: _Line = field(default_factory=_Line)


class Admission:
    """Turns, fair between names by `weight_of` each."""

    def __init__(
        self, bounds: AdmissionBounds | None = None, *, weight_of: Callable[[str], float] = lambda _: 1.0
    ) -> None:
        self._bounds = bounds or AdmissionBounds()
        self._weight_of = weight_of
        self._turns = _Line()
        self._overdue = _Line()
        self._gates: dict[Gate, None] = {}
        self._alarm: asyncio.TimerHandle | None = None
        self._binding = False
        self.running = 0
        self.waiting = 0

    @property
    def free(self) -> bool:
        return self.running < self._bounds.running and not len(self._turns)

    @property
    def full(self) -> bool:
        """As many wait as may."""
        return self.waiting >= self._bounds.waiting

    @property
    def held(self) -> int:
        """Those among the waiting who wait for a worker."""
        return self.waiting - len(self._turns)

    async def enter(self, name: str, within_s: float | None = None) -> None:
        """Return when it is this request's turn; `leave` must follow. `within_s` is the client's own deadline.

        Raises `GatewayBusy` at once, or `WaitedInVain` or `DeadlinePassed` later.
        """
        if self.free:
            self.running += 1
            return
        if self.full:
            raise GatewayBusy(self._bounds.waiting)
        waiter = _Waiter(asyncio.get_running_loop().create_future())
        waiter.join(self._turns, name, self._weight_of(name), 1.0, asyncio.get_running_loop().time())
        await self._wait(waiter, self._bounds.longest_s, None if within_s is None else (within_s, within_s))

    def enter_now(self) -> bool:
        """Whether it is this request's turn already; `leave` must follow if it is."""
        free = self.free
        self.running += free
        return free

    def leave(self) -> None:
        """A request has ended that had entered."""
        self.running -= 1
        if self.waiting:
            self.look()

    async def hold(
        self, gate: Gate, name: str, *, cost_s: float, longest_s: float, ends: tuple[float, float] | None = None
    ) -> None:
        """Return when a worker has room and it is this request's turn, or after `longest_s`.

        The request has entered. It gives its place back meanwhile and has one again however this ends. What the
        caller does until it awaits again is done before the next is judged. `ends`: how many seconds are left of the
        client's own deadline, and how many it gave. Raises as `enter` does later.
        """
        loop = asyncio.get_running_loop()
        waiter = _Waiter(loop.create_future())
        waiter.join(gate.line, name, self._weight_of(name), cost_s, loop.time())
        self._gates[gate] = None
        overdue = loop.call_later(longest_s, self._expedite, waiter)
        self.running -= 1
        try:
            await self._wait(waiter, longest_s + self._bounds.longest_s, ends)
        except BaseException:
            self.running += 1  # the caller gives it back
            raise
        finally:
            overdue.cancel()

    def look(self) -> None:
        """Let those go on whose turn it is. To be called when something ends that others may wait for."""
        if self._binding:
            return
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        while self.running < self._bounds.running:
            held = self._overdue.take() or self._released()
            ticket = held or self._turns.take()
            if ticket is None:
                self._look_again()
                return
            self.waiting -= 1
            if ticket.item.turn.done():
                continue  # it has left
            self.running += 1
            ticket.item.turn.set_result(True)
            if held:
                self._binding = True
                asyncio.get_running_loop().call_soon(self._bound)
                return

    def _bound(self) -> None:
        """The one that was let go has been sent somewhere: now the next can be judged."""
        self._binding = False
        self.look()

    def _look_again(self) -> None:
        if self._gates:
            soon_s = min(gate.room_in_s() for gate in self._gates)
            self._alarm = asyncio.get_running_loop().call_later(min(_LOOK_S, max(_SOONEST_S, soon_s)), self.look)

    def _released(self) -> "Ticket[_Waiter] | None":
        """Of the gates with room each in turn."""
        for gate in list(self._gates):
            if not len(gate.line):
                del self._gates[gate]
            elif gate.room_in_s() <= 0.0:
                del self._gates[gate]
                self._gates[gate] = None
                return gate.line.take()
        return None

    async def _wait(self, waiter: _Waiter, longest_s: float, ends: tuple[float, float] | None) -> None:
        left_s = min(longest_s, ends[0]) if ends is not None else longest_s
        clock = asyncio.get_running_loop().call_later(left_s, self._give_up, waiter)
        self.waiting += 1
        self.look()
        try:
            came = await waiter.turn
        except asyncio.CancelledError:
            if waiter.turn.cancelled():
                self._forget(waiter)
            elif waiter.turn.result():
                self.leave()
            raise
        finally:
            clock.cancel()
        if not came:
            raise WaitedInVain(longest_s) if ends is None or longest_s < ends[0] else DeadlinePassed(ends[1])

    def _expedite(self, waiter: _Waiter) -> None:
        """It has waited for a worker as long as it may: now it takes the next place there is."""
        if not waiter.turn.done() and waiter.place is not None and waiter.leave():
            place = waiter.place
            waiter.join(self._overdue, place.name, place.weight, 1.0, asyncio.get_running_loop().time())
            self.look()

    def _give_up(self, waiter: _Waiter) -> None:
        if not waiter.turn.done():
            self._forget(waiter)
            waiter.turn.set_result(False)

    def _forget(self, waiter: _Waiter) -> None:
        if waiter.leave():
            self.waiting -= 1


Refused = Callable[[DataRequest, KvherdError], None]
"""Takes note of a request that was not admitted."""


class _Stay(Passage):
    """Among those under way."""

    __slots__ = ("_admission",)

    def __init__(self, landed: Landed, admission: Admission) -> None:
        super().__init__(landed)
        self._admission = admission

    def leave(self) -> None:
        self._admission.leave()


class AdmittedPath:
    """A `DataHandler` and `Launch` before others, which have as many requests at a time as are admitted."""

    def __init__(
        self, inner: DataHandler, admission: Admission, refused: Refused = lambda *_: None, launch: Launch = launch_none
    ) -> None:
        self._inner = inner
        self._admission = admission
        self._refused = refused
        self._launch = launch

    async def __call__(self, request: DataRequest, responder: Responder) -> None:
        if not self._admission.enter_now():
            request = await self._wait(request)
        try:
            await self._inner(request, responder)
        finally:
            self._admission.leave()

    def launch(self, request: DataRequest, responder: Responder, landed: Landed) -> Flight | None:
        if not self._admission.enter_now():
            return None
        return launch_within(self._launch, request, responder, _Stay(landed, self._admission))

    async def _wait(self, request: DataRequest) -> DataRequest:
        """The request when its turn came: what it waited is taken off its own deadline."""
        now = asyncio.get_running_loop().time
        began_s = now()
        try:
            within_s = deadline_s(request.headers)
            await self._admission.enter(request.key, within_s)
        except KvherdError as error:
            self._refused(request, error)
            raise
        waited_s = now() - began_s
        headers = None if within_s is None else with_deadline(request.headers, within_s - waited_s)
        return request.changed(headers=headers, waited_s=waited_s)
