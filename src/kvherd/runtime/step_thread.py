"""The one thread that runs the model, beside the loop that takes orders."""

import threading
from collections.abc import Callable
from queue import SimpleQueue

from kvherd.core.scheduler.steps import Choice, StepPlan
from kvherd.runtime.batch import ForwardBatch, SamplingState, SequenceRows
from kvherd.runtime.engine_model import EngineModel


class StepThread:
    """Runs one plan at a time. `done` is called in the thread when its result can be taken."""

    def __init__(self, model: EngineModel, done: Callable[[], None]) -> None:
        self._model = model
        self._done = done
        self._plans: SimpleQueue[StepPlan | None] = SimpleQueue()
        self._results: SimpleQueue[list[Choice] | Exception] = SimpleQueue()
        # A daemon: a step that hangs must not keep a stopping process alive.
        self._thread = threading.Thread(target=self._run, name="model-steps", daemon=True)
        self._thread.start()

    @property
    def finished(self) -> bool:
        """A result waits to be taken."""
        return not self._results.empty()

    def start(self, plan: StepPlan) -> None:
        self._plans.put(plan)

    def result(self) -> list[Choice]:
        """The choices of the finished step. Raises whatever the model raised."""
        result = self._results.get_nowait()
        if isinstance(result, Exception):
            raise result
        return result

    def stop(self, *, within_s: float) -> None:
        """Let a step under way end, if it does so in time."""
        self._plans.put(None)
        self._thread.join(within_s)

    def _run(self) -> None:
        while (plan := self._plans.get()) is not None:
            result: list[Choice] | Exception
            try:
                result = run_step(self._model, plan)
            except Exception as error:  # noqa: BLE001 - it crosses to the order loop, which raises it there
                result = error
            self._results.put(result)
            self._done()


def run_step(model: EngineModel, plan: StepPlan) -> list[Choice]:
    """Run the plan's rows and choose a token for each row that chooses, in order."""
    batch = ForwardBatch([SequenceRows(row.token_ids, row.position, row.blocks, row.chooses) for row in plan.rows])
    states = [
        SamplingState(row.sampling, row.position + len(row.token_ids), row.prompt, row.output, row.forbidden)
        for row in plan.rows
        if row.chooses
    ]
    return [Choice(choice.token_id, choice.logprob) for choice in model.step(batch, states)]
