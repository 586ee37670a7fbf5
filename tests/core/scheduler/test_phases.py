"""What a step is called, and which steps a profile takes."""

from kvherd.core.engine.generation import Sampling
from kvherd.core.engine.profile import ProfileRequest, Stage
from kvherd.core.scheduler.phases import Phase, StepSelection, phase_of
from kvherd.core.scheduler.steps import Copy, StepPlan, StepRow
from kvherd.testing.scheduler_stage import Stage as Theatre
from kvherd.testing.scheduler_stage import limits, request

PREFILL, DECODE, MIXED = Phase.PREFILL, Phase.DECODE, Phase.MIXED


def profile(
    *,
    start_step: int | None = None,
    num_steps: int | None = None,
    by_stage: bool = False,
    stages: tuple[Stage, ...] = (Stage.PREFILL, Stage.DECODE),
) -> ProfileRequest:
    return ProfileRequest(
        "profile-1", "/tmp", start_step=start_step, num_steps=num_steps, by_stage=by_stage, stages=stages
    )


def recorded(selection: StepSelection, phases: list[Phase], *, first: int = 1) -> list[int]:
    """The numbers of the steps that it takes, until it is complete."""
    taken = []
    for number, phase in enumerate(phases, start=first):
        if selection.complete:
            break
        if selection.wants(number, phase):
            selection.record(phase)
            taken.append(number)
    return taken


def test_a_request_is_prefill_first_and_decode_then() -> None:
    stage = Theatre(limits(chunk_tokens=8))
    stage.submit(request("a", list(range(12)), 3))
    phases = []
    while stage.start_step():
        assert stage.plan is not None
        phases.append(phase_of(stage.plan))
        stage.finish_step()
    assert phases == [PREFILL, PREFILL, DECODE, DECODE]


def test_a_step_of_both_is_mixed() -> None:
    stage = Theatre(limits())
    stage.submit(request("a", [1, 2, 3], 5))
    stage.step()
    stage.submit(request("b", [4, 5, 6], 5))
    assert stage.start_step()
    assert stage.plan is not None
    assert phase_of(stage.plan) is MIXED


def test_a_prompt_of_one_token_is_prefill_and_so_is_a_context_that_is_computed_anew() -> None:
    def row(token_ids: tuple[int, ...], position: int, prompt: list[int], output: list[int]) -> StepRow:
        return StepRow(1, token_ids, position, (0,), True, Sampling(), prompt, output)

    assert phase_of(StepPlan((row((5,), 0, [5], []),))) is PREFILL
    assert phase_of(StepPlan((row((5, 6, 7), 0, [5], [6, 7]),))) is PREFILL
    assert phase_of(StepPlan((row((7,), 2, [5], [6, 7]),))) is DECODE


def test_a_step_that_only_loads_says_so() -> None:
    assert phase_of(StepPlan((), (), (Copy(0, 0),))) is Phase.LOAD


def test_the_number_of_steps_is_exact() -> None:
    selection = StepSelection(profile(num_steps=3), next_step=8)
    assert recorded(selection, [PREFILL, MIXED, DECODE, DECODE], first=8) == [8, 9, 10]
    assert selection.complete
    assert selection.recorded == 3
    assert not selection.wants(11, DECODE)


def test_it_begins_with_its_first_step_or_the_next_one_if_that_is_past() -> None:
    assert recorded(StepSelection(profile(start_step=10, num_steps=2), next_step=8), [DECODE] * 9, first=8) == [10, 11]
    assert recorded(StepSelection(profile(start_step=3, num_steps=2), next_step=8), [DECODE] * 9, first=8) == [8, 9]


def test_without_a_number_it_never_ends_by_itself() -> None:
    selection = StepSelection(profile(), next_step=1)
    assert len(recorded(selection, [DECODE] * 500)) == 500
    assert not selection.complete


def test_each_stage_with_a_file_of_its_own_gets_the_number_of_steps() -> None:
    selection = StepSelection(profile(num_steps=2, by_stage=True), next_step=1)
    assert recorded(selection, [PREFILL, DECODE, DECODE, DECODE, MIXED, PREFILL]) == [1, 2, 3, 5]
    assert selection.complete
    assert [selection.file_of(phase) for phase in (PREFILL, MIXED, DECODE)] == [
        Stage.PREFILL,
        Stage.PREFILL,
        Stage.DECODE,
    ]


def test_only_the_stages_that_were_asked_for_are_recorded() -> None:
    selection = StepSelection(profile(num_steps=2, stages=(Stage.DECODE,)), next_step=1)
    assert recorded(selection, [PREFILL, DECODE, MIXED, DECODE, DECODE]) == [2, 4]
    assert selection.file_of(DECODE) is None
