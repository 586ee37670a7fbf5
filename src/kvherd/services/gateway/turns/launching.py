"""A turn for which no task waits: what a worker's connection tells it moves it on.

It does what `DataPath.finish` does, with a task only where there is something to await: another try, or a connection
that is not there yet.
"""

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any

from kvherd.core.errors import KvherdError, WorkerError
from kvherd.ports.loop_turn import Staged
from kvherd.ports.worker import Call, Flight, Landed, Responder, Worker
from kvherd.services.gateway.turns.choosing import Choice
from kvherd.services.gateway.turns.turn import Turn
from kvherd.services.gateway.waiting.passage import hand_over
from kvherd.services.gateway.waiting.patience import GivesUp, Wait


class Path:
    """The steps of the data path, see there. A class and no protocol, so that these are compiled to calls.

    It has no attributes: compiled, one that is declared here and set by who extends it stays unset here.
    """

    def begin_try(self, turn: Turn, choice: Choice, now_s: float) -> tuple[Worker, Call, Responder]:
        raise NotImplementedError

    def end_try(self, turn: Turn, error: BaseException | None, now_s: float) -> None:
        raise NotImplementedError

    def may_try_again(self, turn: Turn, error: WorkerError) -> bool:
        raise NotImplementedError

    def wait(self, turn: Turn, who: GivesUp) -> Wait:
        raise NotImplementedError

    def close(self, turn: Turn, error: BaseException | None, now_s: float) -> None:
        raise NotImplementedError

    def now_s(self) -> float:
        raise NotImplementedError

    async def finish(self, turn: Turn, answer: Awaitable[None] | None = None) -> None:
        raise NotImplementedError

    def read_now(self, turn: Turn) -> bool:
        """Read its prompt; False where that takes a thread."""
        raise NotImplementedError

    async def read_and_finish(self, turn: Turn) -> None:
        """The same in a thread, and see it through."""
        raise NotImplementedError

    def choose_now(self, turn: Turn, now_s: float) -> Choice | None:
        """Whose turn it is to serve it; None where it has to wait for a worker."""
        raise NotImplementedError


class Launched(Staged):
    """A `Flight`. One that is staged is given its prompt and its worker at the end of the turn that launched it;
    whatever then goes wrong, it lands with that.
    """

    __slots__ = ("_begun", "_flight", "_landed", "_over", "_path", "_starting", "_turn", "_wait")

    def __init__(self, path: Path, turn: Turn, landed: Landed) -> None:
        self._path = path
        self._turn = turn
        self._landed = landed
        self._flight: Flight | None = None
        self._begun = self._over = False
        self._wait: Wait | None = None
        self._starting: tuple[asyncio.Handle, Coroutine[Any, Any, None]] | None = None

    def prepare(self) -> None:
        """Read its prompt."""
        if self._over:
            return
        path, turn = self._path, self._turn
        try:
            if not path.read_now(turn):
                self._over = True
                hand_over(self._landed, path.read_and_finish(turn), self._abandoned)
        except Exception as error:  # noqa: BLE001 - the edge of the process, as for a task
            self._fail(error)

    def proceed(self) -> None:
        """Choose who is to serve it, and send it there."""
        if self._over:
            return
        path, turn = self._path, self._turn
        now_s = path.now_s()
        try:
            choice = path.choose_now(turn, now_s)
            if choice is None:
                self._over = True
                hand_over(self._landed, path.finish(turn), self._abandoned)
                return
        except Exception as error:  # noqa: BLE001 - the edge of the process, as for a task
            self._fail(error)
            return
        try:
            self.launch(choice, now_s)
        except Exception as error:  # noqa: BLE001 - the edge of the process, as for a task
            self._over = True
            self._landed(error)

    def _fail(self, error: Exception) -> None:
        self._over = True
        self._path.close(self._turn, error, self._path.now_s())
        self._landed(error)

    def launch(self, choice: Choice, now_s: float) -> Flight:
        """Raises a `KvherdError` if nobody serves it."""
        path, turn = self._path, self._turn
        try:
            worker, call, responder = path.begin_try(turn, choice, now_s)
        except BaseException as error:
            path.close(turn, error, path.now_s())
            raise
        self._begun = True
        try:
            self._flight = worker.launch(call, responder, self.landed)
        except BaseException as error:
            now_s = path.now_s()
            path.end_try(turn, error, now_s)
            path.close(turn, error, now_s)
            raise
        if self._flight is not None:
            self._wait = path.wait(turn, self)
        else:
            answer = worker.forward(call, responder)
            self._starting = asyncio.get_running_loop().call_soon(self._start, answer), answer
        return self

    def cancel(self) -> None:
        left = asyncio.CancelledError()
        self._over = True
        if not self._begun:
            self._path.close(self._turn, left, self._path.now_s())
            return
        if self._starting is not None:
            handle, answer = self._starting
            handle.cancel()
            answer.close()
        elif self._flight is not None:
            self._flight.cancel()
        self._path.close(self._turn, left, self._end_try(left))

    def landed(self, outcome: Exception | Coroutine[Any, Any, None] | None) -> None:
        """The worker's flight has ended, or is to go on in a task."""
        path, turn = self._path, self._turn
        self._flight = None
        if outcome is not None and isinstance(outcome, Coroutine):
            if self._wait is not None:
                self._wait.over()
            self._go_on(outcome)
            return
        now_s = self._end_try(outcome)
        if isinstance(outcome, WorkerError):
            if path.may_try_again(turn, outcome):
                hand_over(self._landed, path.finish(turn), self._abandoned)
                return
            outcome = None  # its client was told
        path.close(turn, outcome, now_s)
        self._landed(outcome)

    def give_up(self, why: KvherdError) -> None:
        if self._flight is not None:
            self._flight.cancel()
            self.landed(why if isinstance(why, Exception) else None)

    def _start(self, answer: Coroutine[Any, Any, None]) -> None:
        """There was no connection that could be used at once."""
        self._starting = None
        self._go_on(answer)

    def _go_on(self, answer: Coroutine[Any, Any, None]) -> None:
        """Await the rest of this try in a task."""

        def abandoned() -> None:
            self._path.end_try(self._turn, asyncio.CancelledError(), self._path.now_s())
            self._abandoned()

        hand_over(self._landed, self._path.finish(self._turn, answer), abandoned, within=answer)

    def _end_try(self, error: BaseException | None) -> float:
        """When that was."""
        if self._wait is not None:
            self._wait.over()
            self._wait = None  # it refers back to this object
        now_s = self._path.now_s()
        self._path.end_try(self._turn, error, now_s)
        return now_s

    def _abandoned(self) -> None:
        self._path.close(self._turn, asyncio.CancelledError(), self._path.now_s())
