"""What a step computes, and which steps a profile records."""

from collections import Counter
from enum import StrEnum

from kvherd.core.engine.profile import ProfileRequest, Stage
from kvherd.core.scheduler.steps import StepPlan, StepRow


class Phase(StrEnum):
    """What the rows of a step are; one without rows only loads blocks from the host."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"
    LOAD = "load"


def phase_of(plan: StepPlan) -> Phase:
    decoding = sum(_decodes(row) for row in plan.rows)
    if not plan.rows:
        return Phase.LOAD
    if decoding == len(plan.rows):
        return Phase.DECODE
    return Phase.MIXED if decoding else Phase.PREFILL


def stage_of(phase: Phase) -> Stage:
    return Stage.DECODE if phase is Phase.DECODE else Stage.PREFILL


def _decodes(row: StepRow) -> bool:
    """Its one token was chosen by the step before; a context that is computed anew is prefill, though it has output."""
    return len(row.token_ids) == 1 and len(row.output) > 0 and row.position + 1 == len(row.prompt) + len(row.output)


class StepSelection:
    """Decides, step by step, whether a profile records it and into which of its files."""

    def __init__(self, request: ProfileRequest, *, next_step: int) -> None:
        self._request = request
        self.first_step = max(request.start_step or 0, next_step)
        self._recorded: Counter[Stage | None] = Counter()

    @property
    def recorded(self) -> int:
        return self._recorded.total()

    @property
    def complete(self) -> bool:
        """No later step would be recorded."""
        most = self._request.num_steps
        return most is not None and all(self._recorded[stage] >= most for stage in self._request.files)

    def wants(self, step: int, phase: Phase) -> bool:
        stage = stage_of(phase)
        if step < self.first_step or stage not in self._request.stages:
            return False
        most = self._request.num_steps
        return most is None or self._recorded[self.file_of(phase)] < most

    def file_of(self, phase: Phase) -> Stage | None:
        return stage_of(phase) if self._request.by_stage else None

    def record(self, phase: Phase) -> None:
        """A step that it wanted is recorded."""
        self._recorded[self.file_of(phase)] += 1
