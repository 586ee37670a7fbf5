"""One client's connection: its requests, one after the other, for its whole life.

A request whose answer is a matter of bytes alone is launched and lands, without a task, which would cost more than all
else that is done for it; any other has a task of its own. Reading goes on while an answer is written, so that a client
that leaves is noticed at once; it stops when a complete request waits behind the one being answered, so that a client
that only sends cannot fill the memory.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Final, cast

from kvherd.core.errors import CallerTooSlow, GatewayFull, GatewayStopping, KvherdError
from kvherd.core.ids import RequestId
from kvherd.ports.loop_turn import TurnwiseConnection
from kvherd.ports.worker import Flight
from kvherd.services.gateway.relay.asgi import answer_with_app
from kvherd.services.gateway.relay.departure import HalfClosed, let_go
from kvherd.services.gateway.relay.edge import DataRequest, RelayLimits
from kvherd.services.gateway.relay.identity import address_of
from kvherd.services.gateway.relay.incoming import Incoming, Refusal, Stage
from kvherd.services.gateway.relay.premises import Premises
from kvherd.services.gateway.relay.requests import RequestParser
from kvherd.services.gateway.relay.responder import CONTINUE, ConnectionResponder

_log: Final = logging.getLogger(__name__)
_IDLE, _HEAD, _BODY = Stage.IDLE, Stage.HEAD, Stage.BODY


class AnswerUnfinished(Exception):
    """A handler returned without ending its answer: a defect of that handler."""


class Connection(TurnwiseConnection):
    """Owned by the server that made it; its task lives in the server's group and ends with the connection."""

    __slots__ = (
        "_busy",
        "_cut_off",
        "_drainers",
        "_ends_at_s",
        "_flight",
        "_gone",
        "_half_closed",
        "_in_app",
        "_lost",
        "_parser",
        "_peer",
        "_premises",
        "_read_s",
        "_reading",
        "_responder",
        "_secured",
        "_server",
        "_stage",
        "_stage_since_s",
        "_stalled_since_s",
        "_task",
    )

    _parser: RequestParser

    def __init__(self, premises: Premises, *, secured: bool = False) -> None:
        super().__init__(premises.turn)
        self._premises = premises
        self._secured = secured
        self._stage = _IDLE
        self._stage_since_s = self._read_s = premises.now_s
        self._stalled_since_s: float | None = None
        self._ends_at_s: float | None = None
        self._half_closed: HalfClosed | None = None
        self._busy = self._in_app = self._lost = self._cut_off = False
        self._reading = True
        self._responder: ConnectionResponder | None = None
        self._gone: asyncio.Future[None] | None = None
        self._drainers: list[Callable[[], None]] = []
        self._flight: Flight | None = None
        self._task: asyncio.Task[None] | None = None
        self._peer = self._server = ""

    # --- called by the event loop ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is none by class
        premises = self._premises
        self._peer = address_of(self.transport, "peername")
        self._server = address_of(self.transport, "sockname")
        self._parser = RequestParser(premises.limits, self._peer, secured=self._secured, judge=premises.judge)
        self.transport.set_write_buffer_limits(high=premises.limits.write_buffer_bytes)
        if len(premises.connections) >= premises.limits.connections:
            self._parser.refuse(GatewayFull(premises.limits.connections))
        elif premises.stopping:
            self._parser.refuse(GatewayStopping())
        premises.connections.add(self)
        if self._parser.ready:
            self._proceed()

    def take(self, data: bytes) -> None:
        parser = self._parser
        self._read_s = self._premises.now_s
        parser.feed(data)
        if parser.stage is not self._stage:
            self._stage = parser.stage
            self._stage_since_s = self._read_s
        if parser.wants_continue:
            self._let_client_continue()
        if parser.ready:
            if not self._busy and self._stalled_since_s is None:
                self._proceed()
            elif self._reading:
                self._reading = False
                self.transport.pause_reading()

    def eof_received(self) -> bool:
        """One that only finished sending gets its answers; one that closed looks the same until it is written to."""
        self.handle()
        self.release()
        self._parser.finish()
        waits_for_answers = self._busy or self._parser.ready
        if not waits_for_answers or self._ends_at_s is not None or self._secured:
            self._leave()
            return False
        self._reading = True  # there is nothing to resume
        self._half_closed = HalfClosed(self.transport, self._premises.loop, self._sound, self._leave_for_good)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._unread = self._unsent = b""
        self._leave()
        premises = self._premises
        premises.connections.discard(self)
        if premises.stopping and not premises.connections:
            premises.deserted.set()
        self._parser.close()

    def pause_writing(self) -> None:
        self._stalled_since_s = self._premises.now_s

    def resume_writing(self) -> None:
        self._stalled_since_s = None
        self._release_drainers()
        if not self._busy:
            self._proceed()

    # --- called by the server -------------------------------------------------------------------------------

    def check(self, now_s: float) -> None:
        """Judge the client's speed. Called at every tick."""
        limits = self._premises.limits
        if self._half_closed is not None:
            self._half_closed.check()
        if self._ends_at_s is not None:
            if now_s >= self._ends_at_s:
                self.transport.abort()
        elif self._stalled_since_s is not None:
            if now_s - self._stalled_since_s > limits.stalled_write_s:
                self.transport.abort()
        elif not self._busy and not self._parser.ready and not self._unread:
            self._check_reading(now_s, limits)

    @property
    def held_bytes(self) -> tuple[int, int]:
        given_bytes = self._responder.request_bytes if self._responder is not None else 0
        return self._parser.reading_bytes, self._parser.ready_bytes + given_bytes

    def refuse(self, error: KvherdError) -> None:
        self._parser.refuse(error)
        self._proceed()

    def stop(self) -> None:
        """Take no further request; end now if there is none under way."""
        if self._responder is not None and not self._responder.started:
            self._responder.keep_alive = False
        if not self._busy and not self._parser.ready and not self._unread and self._ends_at_s is None:
            self._close()

    def cut_off(self) -> None:
        """End at once what is under way, telling the client so."""
        self._cut_off = True
        if self._task is not None:
            self._task.cancel()
        elif self._flight is not None and self._responder is not None:
            self._flight.cancel()
            self._flight = None
            self._tell(self._responder, GatewayStopping())
            self._close()

    # --- one request after the other ------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Wait until the client has taken enough of what was written; returns at once if it has, or has left."""
        self.release()  # or it would not be known yet that it takes no more
        while self._stalled_since_s is not None and not self._lost:
            waiter = self._premises.loop.create_future()
            self._drainers.append(partial(let_go, waiter))
            await waiter

    def when_drained(self, then: Callable[[], None]) -> None:
        self.release()
        if self._stalled_since_s is None or self._lost:
            then()
        else:
            self._drainers.append(then)

    def landed(self, responder: ConnectionResponder, outcome: Exception | Coroutine[Any, Any, None] | None) -> None:
        """A launched request's answer has ended, or is to go on in a task."""
        if responder is not self._responder or self._lost:
            if isinstance(outcome, Coroutine):
                outcome.close()
            return
        self._flight = None
        if outcome is not None and isinstance(outcome, Coroutine):
            self._task = self._premises.group.create_task(self._await(lambda: outcome, responder))
            self._task.add_done_callback(lambda _: outcome.close())  # cancelled before its first step it would linger
            return
        if outcome is not None:
            self._fail(responder, outcome)
        self._done(responder)
        if self._parser.ready or self._parser.ended or self._premises.stopping:
            self._proceed()

    def _proceed(self) -> None:
        """Begin with the next request, if there is one and the client took what came before it."""
        parser = self._parser
        while not self._busy and not self._lost and self._stalled_since_s is None and self._ends_at_s is None:
            if not parser.ready:
                if parser.ended or self._premises.stopping:
                    self._close()
                return
            item = parser.ready.popleft()
            if not self._reading and not parser.ready:
                self._reading = True
                self.transport.resume_reading()
            if isinstance(item, Refusal):
                self._refuse(item.error)
            else:
                self._begin(item)

    def _begin(self, incoming: Incoming) -> None:
        premises = self._premises
        self._responder = responder = ConnectionResponder(self, incoming)
        self._busy = True
        if premises.stopping:
            responder.keep_alive = False
        if premises.launch is not None and incoming.is_data:
            try:
                self._flight = premises.launch(incoming.request, responder, responder.landed)
            except Exception as error:  # noqa: BLE001 - the edge of the process, as for a task
                self._fail(responder, error)
                self._done(responder)
                return
            if self._flight is not None:
                return
        self._task = premises.group.create_task(self._await(partial(self._call, incoming, responder), responder))

    async def _await(self, answer: Callable[[], Awaitable[None]], responder: ConnectionResponder) -> None:
        try:
            await answer()
        except asyncio.CancelledError:
            if self._cut_off:
                self._tell(responder, GatewayStopping())
            if self._ends_at_s is None:
                self._close()
            raise
        except Exception as error:  # noqa: BLE001 - the edge of the process: whatever a handler raised is answered here
            self._fail(responder, error)
        self._task = None
        self._done(responder)
        self._proceed()

    def _fail(self, responder: ConnectionResponder, error: Exception) -> None:
        if not isinstance(error, KvherdError) and not self._lost:
            _log.error("request %s failed", responder.request, exc_info=error)
        self._tell(responder, error)

    def _done(self, responder: ConnectionResponder) -> None:
        """The answer has ended; the next request may begin."""
        if not responder.ended:
            self._fail(responder, AnswerUnfinished(f"the answer to {responder.request} has no end"))
        self._busy, self._responder = False, None
        self._stage_since_s = self._premises.now_s
        if self._parser.wants_continue:
            self._let_client_continue()
        if not responder.keep_alive and self._ends_at_s is None:
            self._close()

    async def _call(self, incoming: Incoming, responder: ConnectionResponder) -> None:
        premises, request = self._premises, incoming.request
        if incoming.is_data:
            await premises.handler(request, responder)
        else:
            self._in_app = True
            try:
                await answer_with_app(
                    premises.app,
                    request,
                    responder,
                    http10=incoming.http10,
                    secured=self._secured,
                    server=self._server,
                    gone=self._wait_until_gone,
                )
            finally:
                self._in_app = False

    def _tell(self, responder: ConnectionResponder, error: BaseException) -> None:
        if responder.started:
            responder.fail_with(error)
        elif not self._lost:
            responder.refuse(error)

    def _refuse(self, error: KvherdError) -> None:
        """Answer in place of a request that could not be read, and leave so that the client can read the answer:
        closing while its bytes arrive would reset the connection and take the answer along.
        """
        self._premises.unread(error, self._peer)
        nobody = DataRequest("GET", "/", "", [], b"", self._peer, RequestId("unread"))
        unread = Incoming(nobody, keep_alive=False, http10=False, is_data=False)
        ConnectionResponder(self, unread).refuse(error)
        self.release()
        self._ends_at_s = self._premises.now_s + self._premises.limits.linger_s
        if self.transport.can_write_eof():
            self.transport.write_eof()

    async def _wait_until_gone(self) -> None:
        if not self._lost:
            if self._gone is None:
                self._gone = self._premises.loop.create_future()
            await asyncio.shield(self._gone)

    # --- small steps ----------------------------------------------------------------------------------------

    def _let_client_continue(self) -> None:
        if not self._busy and not self._parser.ready:
            self._parser.wants_continue = False
            self.send(CONTINUE)

    def _check_reading(self, now_s: float, limits: RelayLimits) -> None:
        age_s = now_s - self._stage_since_s
        if self._stage is _IDLE:
            if age_s > limits.idle_s:
                self._close()
        elif self._stage is _HEAD:
            if age_s > limits.head_s:
                self._parser.refuse(CallerTooSlow("headers", limits.head_s))
        elif now_s - self._read_s > limits.body_idle_s:
            self._parser.refuse(CallerTooSlow("body", limits.body_idle_s))
        elif age_s > limits.body_s:
            self._parser.refuse(CallerTooSlow("body", limits.body_s))
        if self._parser.ready:
            self._proceed()

    def _leave(self) -> None:
        if self._lost:
            return
        self._lost = True
        if self._responder is not None:
            self._responder.abandon()
        if self._flight is not None:
            self._flight.cancel()
            self._flight = None
        self._release_drainers()
        if self._gone is not None and not self._gone.done():
            self._gone.set_result(None)
        if self._task is not None and not self._in_app:
            self._task.cancel()

    def _leave_for_good(self) -> None:
        self._leave()
        self.transport.abort()

    def _sound(self) -> None:
        if self._responder is not None and self._stalled_since_s is None:
            self._responder.sound()

    def _release_drainers(self) -> None:
        drainers, self._drainers = self._drainers, []
        for then in drainers:
            then()

    def _close(self) -> None:
        """Close once what was written has gone out, or by force after a while."""
        self._ends_at_s = self._premises.now_s + self._premises.limits.stalled_write_s
        self.release()
        self.transport.close()
