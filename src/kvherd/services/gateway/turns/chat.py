"""The data path: one request from its body to a worker's answer.

    read what routing needs → who may serve it → what each of them holds → choose → forward → remember what was seen

A worker that fails before its first byte is replaced by another, within a budget; after it, the answer ends with an
error event. What was forwarded is what the client sent.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

from kvherd.core.errors import (
    FieldInvalid,
    KvherdError,
    ModelUnknown,
    NoWorker,
    WorkerError,
    WorkerUnsupported,
)
from kvherd.core.fleet.retry_budget import RetryBudget
from kvherd.core.ids import RequestId, WorkerId
from kvherd.core.routing.policy import Policy
from kvherd.ports.completions import Tokenizer
from kvherd.ports.loop_turn import LoopTurn
from kvherd.ports.worker import Call, Flight, Landed, Responder, Worker
from kvherd.services.gateway.fleet.fleet import Fleet
from kvherd.services.gateway.metrics import GatewayMetrics
from kvherd.services.gateway.reading.conversations import Conversations
from kvherd.services.gateway.reading.encodings import EncodingCache
from kvherd.services.gateway.reading.prompts import LONG_BODY_BYTES, Prompt, is_long, read_prompt, read_prompt_now
from kvherd.services.gateway.relay.edge import STORED, DataRequest
from kvherd.services.gateway.settings import Bounds, HealMode
from kvherd.services.gateway.turns.access import AccessLog
from kvherd.services.gateway.turns.audit import Audit
from kvherd.services.gateway.turns.choosing import Choice, Chooser
from kvherd.services.gateway.turns.credit import Credit
from kvherd.services.gateway.turns.heal import FullReports, Incomplete
from kvherd.services.gateway.turns.heeding import heed
from kvherd.services.gateway.turns.late_binding import LateBinding
from kvherd.services.gateway.turns.launching import Launched, Path
from kvherd.services.gateway.turns.long_bodies import LongBodies
from kvherd.services.gateway.turns.tries import Tries
from kvherd.services.gateway.turns.turn import Turn
from kvherd.services.gateway.turns.usage_samples import UsageSamples
from kvherd.services.gateway.turns.witness import Witness
from kvherd.services.gateway.waiting.patience import GivesUp, Patience, Wait
from kvherd.wire.openai.edits import with_model
from kvherd.wire.openai.routing import Peek, peek

log: Final = logging.getLogger(__name__)

UNTOLD: Final = Peek()

CHAT: Final = "/v1/chat/completions"
NAMING_PATHS: Final = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"})
"""Where engines are told the model, also if the client left out what nobody could mistake."""


@dataclass(frozen=True, slots=True)
class PathConfig:
    """`tries` counts the first. `usage_sample` is the share of streams that are asked for their usage though their
    client did not. `heal`: what brings credit back to workers that may hold blocks nobody told of.
    """

    tries: int = 3
    bounds: Bounds = field(default_factory=Bounds)
    usage_sample: float = 0.05
    heal: HealMode = HealMode.REPORT


class DataPath(Path):
    """Answers the requests of the data path; the relay's `DataHandler` and `Launch`."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        policy: Policy,
        credit: Credit,
        metrics: GatewayMetrics,
        audit: Audit,
        incomplete: Incomplete = lambda _: False,
        config: PathConfig | None = None,
        access: AccessLog | None = None,
        late: LateBinding | None = None,
        dice: Callable[[], float] = random.random,
        together: LoopTurn | None = None,
    ) -> None:
        self._config = config = config or PathConfig()
        self._fleet = fleet
        self._policy = policy
        self._late = late if policy.remembers_prompts else None
        self._metrics = metrics
        self._chooser = Chooser(fleet.roster, policy, credit, dice)
        self.tries = Tries(
            fleet=fleet,
            credit=credit if policy.remembers_prompts else None,
            audit=audit,
            metrics=metrics,
            reports=FullReports(config.heal, incomplete, metrics),
            samples=UsageSamples(config.usage_sample, metrics, dice=dice),
            late=self._late,
            dice=dice,
        )
        self._patience = Patience(config.bounds)
        self._encodings = EncodingCache()
        self._conversations = Conversations(self._encodings)
        self._credit = credit
        self._long = LongBodies()
        self._access = access or AccessLog(metrics)
        self._budget = RetryBudget()
        self._alive: dict[RequestId, int] = {}
        """Under way, each with how many were named after it."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._together = together or LoopTurn()

    async def __call__(self, incoming: DataRequest, responder: Responder, keeper: WorkerId | None = None) -> None:
        """`keeper` is the one worker that can answer, for it keeps what is asked for."""
        try:
            if is_long(incoming.path, incoming.body):
                turn = await self._read_long(incoming, responder, keeper)
            else:
                turn = self._read(incoming, responder, keeper)
                if self._policy.remembers_prompts:
                    turn.prompt = await read_prompt(*self._to_read(turn), conversations=self._conversations)
        except KvherdError as error:
            self._access.refused(incoming, error)
            raise
        self._begin(turn)
        await self.finish(turn)

    def launch(self, incoming: DataRequest, responder: Responder, landed: Landed) -> Flight | None:
        """The same for a request of which nothing has to be awaited but the worker's answer."""
        if incoming.path.startswith(STORED) or len(incoming.body) >= LONG_BODY_BYTES:  # most would be read once more
            return None
        try:
            turn = self._read(incoming, responder, None)
        except KvherdError as error:
            self._access.refused(incoming, error)
            raise
        self._begin(turn)
        launched = Launched(self, turn, landed)
        if self._policy.remembers_prompts:
            self._together.stage(launched)
            return launched
        return launched.launch(self._chooser.choose(turn, turn.began_s), turn.began_s)

    def read_now(self, turn: Turn) -> bool:
        recalled, turn.recalled = turn.recalled, None
        prompt = read_prompt_now(*self._to_read(turn), conversations=self._conversations, recalled=recalled)
        if prompt is None:
            return False
        turn.prompt = prompt
        return True

    async def read_and_finish(self, turn: Turn) -> None:
        try:
            turn.prompt = await read_prompt(*self._to_read(turn), conversations=self._conversations)
        except BaseException as error:
            self.close(turn, error, self.now_s())
            raise
        await self.finish(turn)

    def choose_now(self, turn: Turn, now_s: float) -> Choice | None:
        choice = self._chooser.choose(turn, now_s)
        if self._late is not None and choice.explanation and self._late.must_wait(turn, choice.explanation):
            return None
        return choice

    def _read(self, incoming: DataRequest, responder: Responder, keeper: WorkerId | None) -> Turn:
        """What routing needs of a request, but for its prompt's tokens. Raises a `CallerError` or `NoWorker`."""
        began_s = self._clock.time()
        known = self._conversations.recall(incoming.body) if incoming.path == CHAT else None
        if known is not None:
            asked = known[0]
        else:
            asked = UNTOLD if not incoming.body and incoming.path.startswith(STORED) else peek(incoming.body)
        model = self._model(asked.model, keeper)
        if _needs_name(incoming, asked, model):
            incoming = incoming.changed(body=with_model(incoming.body, model))
            asked, known = peek(incoming.body), None
        turn = self._turn(incoming, responder, keeper, asked, model, began_s)
        if known is not None:
            turn.recalled = known[1]
        return turn

    async def _read_long(self, incoming: DataRequest, responder: Responder, keeper: WorkerId | None) -> Turn:
        """The same, and its prompt, of a body for which the loop does not wait."""
        began_s, long = self._clock.time(), self._long
        asked, cut = await long.peek(incoming.body)
        model = self._model(asked.model, keeper)
        if _needs_name(incoming, asked, model):
            incoming = incoming.changed(body=await long.with_model(incoming.body, model, cut))
            asked, cut = await long.peek(incoming.body)
        turn = self._turn(incoming, responder, keeper, asked, model, began_s)
        if self._policy.remembers_prompts:
            tokenizer = self._fleet.tokenizer(turn.model) if self._policy.needs_tokens else None
            turn.prompt = await long.prompt(incoming.path, incoming.body, asked, cut, tokenizer)
            await long.name(turn.prompt, self._credit.hasher, self._credit.naming(turn.prompt, self._fleet.roster))
        return turn

    def _turn(  # noqa: PLR0917 - what is known of every request
        self,
        incoming: DataRequest,
        responder: Responder,
        keeper: WorkerId | None,
        asked: Peek,
        model: str,
        began_s: float,
    ) -> Turn:
        prompt = Prompt(incoming.body)
        turn = Turn(incoming, incoming.request, asked, model, prompt, Witness(responder), began_s)
        turn.keeper = keeper
        heed(turn, incoming.headers)
        return turn

    def _to_read(self, turn: Turn) -> tuple[str, bytes, Peek, Tokenizer | None, EncodingCache]:
        """What its prompt is read from, and with."""
        tokenizer = self._fleet.tokenizer(turn.model) if self._policy.needs_tokens else None
        return turn.incoming.path, turn.incoming.body, turn.asked, tokenizer, self._encodings

    def _begin(self, turn: Turn) -> None:
        turn.request = self._unique(turn.request)  # named and noted in one step: another may have come meanwhile
        self._alive[turn.request] = 1
        self._budget.earn(turn.began_s)

    async def finish(self, turn: Turn, answer: Awaitable[None] | None = None) -> None:
        """See it through; `answer` is of a try that has begun."""
        try:
            await self._serve(turn, answer)
        except BaseException as error:
            self.close(turn, error, self.now_s())
            raise
        self.close(turn, None, self.now_s())

    async def _serve(self, turn: Turn, answer: Awaitable[None] | None) -> None:
        """Choose and forward until a worker begins an answer. Raises a `KvherdError` if none does."""
        while True:
            if answer is None:
                choice = self._chooser.choose(turn, self._clock.time())
                if self._late is not None and choice.explanation and self._late.must_wait(turn, choice.explanation):
                    await self._late.wait(turn, choice.explanation)
                    choice = self._chooser.choose(turn, self._clock.time())
                worker, call, responder = self.begin_try(turn, choice, self.now_s())
                answer = worker.forward(call, responder)
            try:
                await self._forward(turn, answer)
            except WorkerError as error:
                if self.may_try_again(turn, error):
                    answer = None
                    continue
            return

    def begin_try(self, turn: Turn, choice: Choice, now_s: float) -> tuple[Worker, Call, Responder]:
        """Begin one try at one worker; `Tries.end` must follow. Raises a `KvherdError` if none may be made."""
        if choice.member is None:
            raise self._chooser.nobody(turn, choice)
        if turn.last_error is not None:
            self._admit_retry(turn, turn.last_error, now_s)
        self._chooser.name(turn, choice.member, choice)
        call, responder = self.tries.begin(turn, choice.member, now_s)
        return self._fleet.worker(choice.member.worker), call, responder

    def end_try(self, turn: Turn, error: BaseException | None, now_s: float) -> None:
        self.tries.end(turn, error, now_s)

    def wait(self, turn: Turn, who: GivesUp) -> Wait:
        """For the answer to begin, from when it was sent."""
        wait = self._patience.wait(turn.served_by, turn.sent_at_s, who, turn.ends)
        turn.witness.wait = wait
        return wait

    async def _forward(self, turn: Turn, answer: Awaitable[None]) -> None:
        """Await one try at one worker. Raises its `WorkerError`."""
        task = asyncio.current_task()
        wait = self.wait(turn, _Awaited(turn, task))
        ended: BaseException | None = None
        try:
            await answer
        except asyncio.CancelledError as left:
            ended = turn.gave_up or left
            if turn.gave_up is None or (task is not None and task.cancelling() > 1):  # its client has left, or that too
                raise
            raise turn.gave_up from None
        except BaseException as error:
            ended = error
            raise
        finally:
            wait.over()
            if turn.gave_up is not None and task is not None:
                task.uncancel()
            self.tries.end(turn, ended, self.now_s())

    def may_try_again(self, turn: Turn, error: WorkerError) -> bool:
        """A worker failed: before its answer began another may serve; after that the client is told."""
        if not turn.witness.started:
            turn.tried = {**turn.tried, error.worker: error}
            turn.last_error = error
            return True
        log.warning("request %s broke off: %s", turn.request, error)
        if not turn.witness.over:
            turn.witness.fail(str(error))
        return False

    def _admit_retry(self, turn: Turn, error: WorkerError, now_s: float) -> None:
        """Raises `error` if the request may not be tried once more. Looking for one that can do it is no retry."""
        if isinstance(error, WorkerUnsupported):
            return
        failed = sum(not isinstance(each, WorkerUnsupported) for each in turn.tried.values())
        stateful = turn.incoming.path.startswith(STORED)  # a second try could store a conversation twice
        if stateful or failed >= self._config.tries:
            raise error
        if not self._budget.spend(now_s, len(self._alive)):
            self._metrics.retry_refused(error.worker)
            raise error
        self._metrics.retried(error.worker)

    def _model(self, asked: str | None, keeper: WorkerId | None) -> str:
        """The model that is meant. Raises `ModelUnknown`, `FieldInvalid` or `NoWorker`."""
        roster = self._fleet.roster
        if not asked and keeper is not None and (member := roster.get(keeper)) is not None and member.models:
            return member.models[0]
        meant = roster.meant(asked or "")
        if roster.serves(meant):
            return meant
        served = roster.models()
        if not served or meant in roster.expected():
            reasons = tuple(f"{one.worker} {one.unavailable(self._clock.time())}" for one in roster)
            raise NoWorker(meant, reasons)
        if asked:
            raise ModelUnknown(asked, roster.names())
        if len(served) > 1:
            raise FieldInvalid("model", f"is missing; name one of {', '.join(roster.names())}")
        return served[0]

    def _unique(self, request: RequestId) -> RequestId:
        """A client may use one id for several requests; a worker may not be given one twice at a time."""
        alive = self._alive
        if request not in alive:
            return request
        number, unique = alive[request], request
        while unique in alive:
            number += 1
            unique = RequestId(f"{request}-{number}")
        alive[request] = number
        return unique

    def close(self, turn: Turn, error: BaseException | None, now_s: float) -> None:
        """Learn from what was seen, and write one line about it; never a prompt."""
        if error is None:
            turn.outcome = "broken" if turn.witness.failure else "answered"
        elif isinstance(error, asyncio.CancelledError):
            turn.outcome = "left"
        elif isinstance(error, KvherdError):
            turn.outcome = type(error).__name__
        self._alive.pop(turn.request, None)
        if turn.outcome == "answered" and turn.member is not None and turn.witness.status == 200:
            self.tries.learn(turn, turn.member, now_s)
        self._access.ended(turn, now_s=now_s, error=error)

    def now_s(self) -> float:
        return self._clock.time()

    @property
    def _clock(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:  # asked for once: each time costs a system call in 3.11
            self._loop = asyncio.get_running_loop()
        return self._loop


def _needs_name(incoming: DataRequest, asked: Peek, model: str) -> bool:
    """Whether its body is to name the model otherwise than it does."""
    named = asked.model
    return named != model and (bool(named) or incoming.path in NAMING_PATHS)


class _Awaited:
    """A try for which a task waits."""

    __slots__ = ("_task", "_turn")

    def __init__(self, turn: Turn, task: asyncio.Task[Any] | None) -> None:
        self._turn = turn
        self._task = task

    def give_up(self, why: KvherdError) -> None:
        self._turn.gave_up = why
        if self._task is not None:
            self._task.cancel()
