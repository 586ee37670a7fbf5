"""What one turn of the event loop reads is handled together, and what comes of it is written together.

The kernel's code for a read or a write and ours for what was read push each other out of the processor's caches: to
read for everybody, then to handle everything, then to write for everybody costs a quarter less than all three for one
after the other. Nothing waits for longer than the turn takes, nor is written behind more than `_MOST` others.
"""

import asyncio
from collections.abc import Callable
from typing import Final

_MOST: Final = 32

AT_ONCE_BYTES: Final = 16 * 1024
"""A longer piece is handled where it is read: it costs more by its length than by being one, and would be held."""

CallSoon = Callable[[Callable[[], None]], object]


class TurnwiseConnection:
    """The protocol of a connection whose pieces are handled, and whose writes leave, with those of others."""

    __slots__ = ("_turn", "_unread", "_unsent", "transport")

    transport: asyncio.Transport

    def __init__(self, turn: "LoopTurn") -> None:
        self._turn = turn
        self._unread = self._unsent = b""

    def take(self, data: bytes) -> None:
        """Handle a piece that was read. What it raises ends the connection."""
        raise NotImplementedError

    def data_received(self, data: bytes) -> None:
        if self._unread:
            self.handle()
        self._unread = data
        if len(data) > AT_ONCE_BYTES:
            self.handle()
        else:
            self._turn.read(self)

    def handle(self) -> None:
        """What was read, if that has not been done meanwhile."""
        data, self._unread = self._unread, b""
        if data:
            self.take(data)

    def send(self, data: bytes) -> None:
        """In order, and before anything else is read."""
        if len(self._unsent) + len(data) > AT_ONCE_BYTES:
            self.release()
        if len(data) > AT_ONCE_BYTES:
            self.transport.write(data)
        elif self._unsent:
            self._unsent += data
        else:
            self._unsent = data
            self._turn.write(self)

    def release(self) -> None:
        """Write what was sent and waits; it stays where nothing can be written any more."""
        if self._unsent and not self.transport.is_closing():
            unsent, self._unsent = self._unsent, b""
            self.transport.write(unsent)

    def failed(self, error: Exception) -> None:
        """As a loop ends the connection of a protocol that raises."""
        told = {"message": "what came over a connection could not be handled", "exception": error}
        asyncio.get_running_loop().call_exception_handler(told)
        self.transport.abort()


class Staged:
    """Work in two steps, each done for all who came in the same turn before the other is begun."""

    __slots__ = ()

    def prepare(self) -> None:
        """The first step. Must not raise."""
        raise NotImplementedError

    def proceed(self) -> None:
        """The second one. Must not raise."""
        raise NotImplementedError


class LoopTurn:
    """Those who have read and those who have something to write, each in the order they came."""

    __slots__ = ("_call_soon", "_due", "_reading", "_staged", "_writing")

    def __init__(self, call_soon: CallSoon | None = None) -> None:
        """`call_soon` calls what it is given before anything else is read. None: that of the loop it is used in."""
        self._call_soon = call_soon
        self._reading: list[TurnwiseConnection] = []
        self._writing: list[TurnwiseConnection] = []
        self._staged: list[Staged] = []
        self._due = False

    def read(self, one: TurnwiseConnection) -> None:
        """It is asked to handle what it has read when all others have read as well."""
        self._reading.append(one)
        if not self._due:
            self._fall_due()

    def write(self, one: TurnwiseConnection) -> None:
        """It is released before anything else is read."""
        self._writing.append(one)
        if len(self._writing) >= _MOST:
            self._release()
        elif not self._due:
            self._fall_due()

    def stage(self, one: Staged) -> None:
        """It is asked to prepare, and then to proceed, when what was read is handled."""
        self._staged.append(one)
        if not self._due:
            self._fall_due()

    def _fall_due(self) -> None:
        self._due = True
        if self._call_soon is None:
            self._call_soon = asyncio.get_running_loop().call_soon
        self._call_soon(self._end)

    def _end(self) -> None:
        try:
            while self._reading or self._staged or self._writing:
                reading, self._reading = self._reading, []
                for one in reading:
                    try:
                        one.handle()
                    except Exception as error:  # noqa: BLE001 - the others that were read have no part in it
                        one.failed(error)
                if self._staged:
                    self._go_through()
                self._release()
        finally:
            self._due = False

    def _go_through(self) -> None:
        staged, self._staged = self._staged, []
        for each in staged:
            each.prepare()
        for each in staged:
            each.proceed()

    def _release(self) -> None:
        writing, self._writing = self._writing, []
        for one in writing:
            one.release()
