"""How many requests are under way at once, and how many may wait; what comes beyond is told to return later."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from kvherd.core.errors import KvherdError
from kvherd.core.fleet.refusals import DeadlinePassed, GatewayBusy, WaitedInVain
from kvherd.ports.worker import Responder
from kvherd.services.gateway.patience import TIMEOUT, deadline_s
from kvherd.services.gateway.relay.edge import DataHandler, DataRequest


@dataclass(frozen=True, slots=True)
class AdmissionBounds:
    running: int = 4096
    waiting: int = 1024
    longest_s: float = 30.0


class Admission:
    """Turns, fair between names: of those that wait, each name has one after the other."""

    def __init__(self, bounds: AdmissionBounds | None = None) -> None:
        self._bounds = bounds or AdmissionBounds()
        self._queues: OrderedDict[str, deque[asyncio.Future[bool]]] = OrderedDict()
        self.running = 0
        self.waiting = 0

    @property
    def free(self) -> bool:
        return self.running < self._bounds.running and not self.waiting

    async def enter(self, name: str, within_s: float | None = None) -> None:
        """Return when it is this request's turn; `leave` must follow. `within_s` is the client's own deadline.

        Raises `GatewayBusy` at once, or `WaitedInVain` or `DeadlinePassed` later.
        """
        if self.free:
            self.running += 1
            return
        if self.waiting >= self._bounds.waiting:
            raise GatewayBusy(self._bounds.waiting)
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[bool] = loop.create_future()
        longest_s = min(self._bounds.longest_s, within_s or self._bounds.longest_s)
        clock = loop.call_later(longest_s, self._give_up, name, turn)
        self._queues.setdefault(name, deque()).append(turn)
        self.waiting += 1
        try:
            came = await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._forget(name, turn)
            elif turn.result():
                self.leave()
            raise
        finally:
            clock.cancel()
        if not came:
            raise DeadlinePassed(longest_s) if longest_s == within_s else WaitedInVain(longest_s)

    def leave(self) -> None:
        """A request has ended that had entered."""
        self.running -= 1
        while self.running < self._bounds.running and self._queues:
            name, queue = self._queues.popitem(last=False)
            turn = queue.popleft()
            if queue:
                self._queues[name] = queue  # behind the others
            self.waiting -= 1
            if not turn.done():
                self.running += 1
                turn.set_result(True)

    def _give_up(self, name: str, turn: "asyncio.Future[bool]") -> None:
        if not turn.done():
            self._forget(name, turn)
            turn.set_result(False)

    def _forget(self, name: str, turn: "asyncio.Future[bool]") -> None:
        queue = self._queues.get(name)
        if queue is not None and turn in queue:
            queue.remove(turn)
            self.waiting -= 1
            if not queue:
                del self._queues[name]


Refused = Callable[[DataRequest, KvherdError], None]
"""Takes note of a request that was not admitted."""


class AdmittedPath:
    """A `DataHandler` before another, which has as many requests at a time as are admitted."""

    def __init__(self, inner: DataHandler, admission: Admission, refused: Refused = lambda *_: None) -> None:
        self._inner = inner
        self._admission = admission
        self._refused = refused

    async def __call__(self, request: DataRequest, responder: Responder) -> None:
        if self._admission.free:
            await self._admission.enter(request.key)
        else:
            request = await self._wait(request)
        try:
            await self._inner(request, responder)
        finally:
            self._admission.leave()

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
        if within_s is None:
            return request
        left_s = max(0.001, within_s - (now() - began_s))
        others = [header for header in request.headers if header[0] != TIMEOUT]
        return request._replace(headers=[*others, (TIMEOUT, b"%.3f" % left_s)])
