"""The threads that work on the model's memory: one runs steps, one copies blocks to the host behind them."""

from collections.abc import Callable

from kvherd.core.scheduler.steps import Choice, StepPlan, WritePlan
from kvherd.runtime.batch import ForwardBatch, SamplingState, SequenceRows
from kvherd.runtime.engine_model import EngineModel
from kvherd.runtime.watch import UNWATCHED, Watch
from kvherd.runtime.work_thread import WorkThread


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
