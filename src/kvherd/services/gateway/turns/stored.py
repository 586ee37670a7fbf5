"""What engines keep under a name, `/v1/responses` and conversations, is asked for where it is kept.

Which worker that is, is read off the answers that told a name. Where this gateway did not see that answer, for it was
another gateway's or an earlier life's, the workers are asked. Nothing is ever tried at a second worker: it would be
stored twice.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol

from kvherd.core.errors import KvherdError, WorkerError
from kvherd.core.fleet.refusals import DeadlinePassed, KeeperSilent, NameUnknown
from kvherd.core.fleet.roster import Member
from kvherd.core.fleet.spec import GRPC
from kvherd.core.ids import WorkerId
from kvherd.ports.worker import Call, Responder
from kvherd.services.gateway.fleet.fleet import Fleet
from kvherd.services.gateway.reading.prompts import LONG_BODY_BYTES
from kvherd.services.gateway.relay.edge import STORED, DataHandler, DataRequest
from kvherd.services.gateway.turns.access import AccessLog
from kvherd.services.gateway.turns.usage_samples import uncompressed
from kvherd.services.gateway.turns.witness import Around
from kvherd.services.gateway.waiting.patience import deadline_s, with_deadline
from kvherd.wire.http_chunks import content
from kvherd.wire.openai.stored import ToldNames, continued, is_name

ASK_S: Final = 5.0
MOST_ASKED_AT_ONCE: Final = 32
MOST_NAMES: Final = 65536
_ROOTS: Final = frozenset(STORED)


class KeptPath(Protocol):
    """A data path that can be told which worker is to answer."""

    def __call__(
        self, incoming: DataRequest, responder: Responder, keeper: WorkerId | None = None
    ) -> Awaitable[None]: ...


def at_keepers(
    inner: KeptPath, fleet: Fleet, access: AccessLog, *, ask_s: float = ASK_S, most_names: int = MOST_NAMES
) -> DataHandler:
    """A `DataHandler` before another. Raises `NameUnknown` where no worker keeps what is asked for, and `KeeperSilent`
    where that cannot be known now.
    """
    path = _StoredPath(inner, fleet, ask_s=ask_s, most_names=most_names)

    async def handle(request: DataRequest, responder: Responder) -> None:
        if not request.path.startswith(STORED):
            await inner(request, responder)
            return
        try:
            keeper, request = await path.keeper_in_time(request)
        except KvherdError as error:
            access.refused(request, error)
            raise
        await path.answer(request, responder, keeper)

    return handle


class _StoredPath:
    def __init__(self, inner: KeptPath, fleet: Fleet, *, ask_s: float, most_names: int) -> None:
        self._inner = inner
        self._fleet = fleet
        self._ask_s = ask_s
        self._most_names = most_names
        self._keepers: OrderedDict[str, WorkerId] = OrderedDict()

    async def keeper_in_time(self, request: DataRequest) -> tuple[WorkerId | None, DataRequest]:
        """The keeper, and the request with what is then left of the client's own deadline. Raises `DeadlinePassed`."""
        within_s, now = deadline_s(request.headers), asyncio.get_running_loop().time
        began_s = now()
        if within_s is None:
            keeper = await self.keeper(request)
            return keeper, request.changed(waited_s=now() - began_s)
        try:
            async with asyncio.timeout_at(began_s + within_s):
                keeper = await self.keeper(request)
        except TimeoutError:
            raise DeadlinePassed(within_s) from None
        waited_s = now() - began_s
        headers = with_deadline(request.headers, within_s - waited_s)
        return keeper, request.changed(headers=headers, waited_s=waited_s)

    async def keeper(self, request: DataRequest) -> WorkerId | None:
        """Who keeps what the request names; None if it names nothing, or nobody here could."""
        root, name = _parts(request.path)
        if name:
            return await self._keeper_of(f"{root}/{name}", name, request)
        long = len(request.body) >= LONG_BODY_BYTES
        past = await asyncio.to_thread(continued, request.body) if long else continued(request.body)
        return None if past is None else await self._keeper_of("/".join(past), past[1], request)

    async def answer(self, request: DataRequest, responder: Responder, keeper: WorkerId | None) -> None:
        if request.path in _ROOTS:
            request = request.changed(headers=uncompressed(request.headers))
            responder = _Learning(responder, self._remember)
        await self._inner(request, responder, keeper)

    async def _keeper_of(self, path: str, name: str, request: DataRequest) -> WorkerId | None:
        known = self._keepers.get(name)
        if known is not None and self._fleet.roster.get(known) is not None:
            self._keepers.move_to_end(name)
            return known
        members = [one for one in self._fleet.roster if not one.worker.startswith(GRPC)]
        if len(members) < 2:
            return members[0].worker if members else None
        found, silent = await self._ask_all(members, path, request)
        if found is None:
            raise KeeperSilent(name, tuple(silent)) if silent else NameUnknown(name)
        self._remember((name,), found)
        return found

    async def _ask_all(
        self, members: Sequence[Member], path: str, request: DataRequest
    ) -> tuple[WorkerId | None, list[WorkerId]]:
        """The first that has it, for which the others need not be waited; and those of which nobody knows."""
        found: list[WorkerId] = []
        silent: list[WorkerId] = []
        turns = asyncio.Semaphore(MOST_ASKED_AT_ONCE)

        async def ask(worker: WorkerId) -> None:
            async with turns:
                status = await self._status(worker, path, request)
            if status == 200:
                found.append(worker)
                for each in asking:
                    each.cancel()
            elif not 400 <= status < 500:
                silent.append(worker)

        async with asyncio.TaskGroup() as group:
            asking = [group.create_task(ask(member.worker)) for member in members]
        return (found[0] if found else None), silent

    async def _status(self, worker: WorkerId, path: str, request: DataRequest) -> int:
        """What it says of this path; 0 if it says nothing."""
        seen = _Status()
        try:
            async with asyncio.timeout(self._ask_s):
                call = Call("GET", path, request.headers, b"", request.request)
                await self._fleet.worker(worker).forward(call, seen)
        except (TimeoutError, WorkerError):
            return 0
        return seen.status

    def _remember(self, names: Sequence[str], worker: WorkerId) -> None:
        for name in names:
            self._keepers[name] = worker
            self._keepers.move_to_end(name)
        while len(self._keepers) > self._most_names:
            self._keepers.popitem(last=False)


class _Learning(Around):
    """Learns what the answer says to be stored."""

    def __init__(self, inner: Responder, remember: Callable[[Sequence[str], WorkerId], None]) -> None:
        super().__init__(inner)
        self._remember = remember
        self._worker = WorkerId("")
        self._told: ToldNames | None = None

    def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        named = {name.lower(): value for name, value in headers}
        if status < 300 and b"content-encoding" not in named:
            self._worker = WorkerId(named.get(b"x-kvherd-worker", b"").decode("latin-1"))
            stream = named.get(b"content-type", b"").startswith(b"text/event-stream")
            self._told = ToldNames(stream=stream)
        self._inner.start(status, headers)

    def write(self, data: bytes) -> None:
        if self._told is not None:
            self._told.feed(data)
            self._learn()
        self._inner.write(data)

    def write_chunk(self, chunk: bytes) -> None:
        self.write(content(chunk))

    def end(self) -> None:
        if self._told is not None:
            self._told.end()
            self._learn()
        self._inner.end()

    def _learn(self) -> None:
        if self._told is not None and self._told.found:
            self._remember(self._told.found, self._worker)
            self._told = None


class _Status:
    """A `Responder` to nobody, which notes the status."""

    def __init__(self) -> None:
        self.status = 0

    @property
    def started(self) -> bool:
        return self.status != 0

    def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self.status = status

    def write(self, data: bytes) -> None: ...

    def write_chunk(self, chunk: bytes) -> None: ...

    def end(self) -> None: ...

    def fail(self, reason: str) -> None:
        self.status = 0

    async def drain(self) -> None: ...

    def when_drained(self, then: Callable[[], None]) -> None:
        then()


def _parts(path: str) -> tuple[str, str]:
    """`/v1/responses/NAME/…` → `/v1/responses` and NAME; "" if there is none that could be one."""
    for root in STORED:
        if path.startswith(f"{root}/"):
            name = path[len(root) + 1 :].partition("/")[0]
            if not is_name(name):
                raise NameUnknown(name[:256])
            return root, name
    return path, ""
