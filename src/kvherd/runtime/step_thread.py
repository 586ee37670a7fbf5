"""The threads that work on the model's memory: one runs steps, one copies blocks to the host behind them, and two read
them from a store and write them there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvherd.core.scheduler.steps import Choice, FetchPlan, LookPlan, PutPlan, StepPlan, WritePlan
from kvherd.ports.block_store import BlockStore
from kvherd.runtime.batch import ForwardBatch, SamplingState, SequenceRows
from kvherd.runtime.engine_model import EngineModel
from kvherd.runtime.watch import UNWATCHED, Watch
from kvherd.runtime.work_thread import WorkThread

STORE_WITHIN_S: Final = 5.0
"""How long a store may take for one call; a flush waits for it."""


class StepThread(WorkThread[StepPlan, list[Choice]]):
    """Runs one plan at a time; the result has a choice for each row that chooses, in order."""

    def __init__(
        self, model: EngineModel, done: Callable[[], None], *, watch: Callable[[], Watch] = lambda: UNWATCHED
    ) -> None:
        """`watch` is asked at the beginning of each step, in the thread, for who watches it."""
        super().__init__("model-steps", lambda plan: run_step(model, plan, watch()), done)


class WriteThread(WorkThread[WritePlan, None]):
    """Copies the blocks of one plan at a time to the host, whatever step runs beside it."""

    def __init__(self, model: EngineModel, done: Callable[[], None]) -> None:
        super().__init__("host-writes", lambda plan: model.save(plan.copies), done)


@dataclass(frozen=True, slots=True)
class Fetched:
    """`verified` tells of each block whether it is in place."""

    verified: list[bool]


@dataclass(frozen=True, slots=True)
class Found:
    """So many blocks are there, from the first on."""

    blocks: int


class AskThread(WorkThread[LookPlan | FetchPlan, Fetched | Found]):
    """Asks the store for blocks, one plan at a time; each ends about `STORE_WITHIN_S` later at the latest."""

    def __init__(self, model: EngineModel, store: BlockStore, done: Callable[[], None]) -> None:
        super().__init__("store-reads", lambda plan: ask_store(model, store, plan), done)


class PutThread(WorkThread[PutPlan, list[bool]]):
    """Writes the blocks of one plan at a time to the store; the result tells of each whether it is there."""

    def __init__(self, model: EngineModel, store: BlockStore, done: Callable[[], None]) -> None:
        super().__init__("store-writes", lambda plan: put_to_store(model, store, plan), done)


class Threads:
    """All of them. `store` None is no store."""

    def __init__(
        self,
        model: EngineModel,
        store: BlockStore | None,
        done: Callable[[], None],
        *,
        watch: Callable[[], Watch] = lambda: UNWATCHED,
    ) -> None:
        self.steps = StepThread(model, done, watch=watch)
        self.writes = WriteThread(model, done)
        self.asks = AskThread(model, store, done) if store is not None else None
        self.puts = PutThread(model, store, done) if store is not None else None

    def stop(self, *, within_s: float) -> None:
        """Let what is under way end, if it does so in time; reads of a store are left to themselves."""
        self.steps.stop(within_s=within_s)
        self.writes.stop(within_s=within_s)
        if self.puts is not None:
            self.puts.stop(within_s=within_s)


def ask_store(model: EngineModel, store: BlockStore, plan: LookPlan | FetchPlan) -> Fetched | Found:
    if isinstance(plan, LookPlan):
        return Found(store.find(plan.names, timeout_s=STORE_WITHIN_S))
    names = [each.name for each in plan.blocks]
    into = [model.host_block(each.slot) for each in plan.blocks]
    return Fetched(store.read(names, into, timeout_s=STORE_WITHIN_S))


def put_to_store(model: EngineModel, store: BlockStore, plan: PutPlan) -> list[bool]:
    names = [each.name for each in plan.blocks]
    blocks = [model.host_block(each.slot).toreadonly() for each in plan.blocks]
    return store.put(names, blocks, timeout_s=STORE_WITHIN_S)


def run_step(model: EngineModel, plan: StepPlan, watch: Watch = UNWATCHED) -> list[Choice]:
    """Load what is to be loaded, run the plan's rows and choose a token for each row that chooses, in order."""
    if plan.loads:
        lap = watch.laps()
        model.load(plan.loads)
        lap("load", None, (len(plan.loads),))
    if not plan.rows:
        return []
    batch = ForwardBatch([SequenceRows(row.token_ids, row.position, row.blocks, row.chooses) for row in plan.rows])
    states = [
        SamplingState(row.sampling, row.position + len(row.token_ids), row.prompt, row.output, row.forbidden)
        for row in plan.rows
        if row.chooses
    ]
    return [Choice(choice.token_id, choice.logprob) for choice in model.step(batch, states, watch)]
