"""What a profile of an engine is to record, and where it is to go."""

from dataclasses import dataclass
from enum import StrEnum

TRACE_SUFFIX = ".trace.json"
MERGED_SUFFIX = f"merged{TRACE_SUFFIX}"


class Activity(StrEnum):
    """CPU: what each part of a step took. MEM: what Python and numpy have allocated."""

    CPU = "CPU"
    MEM = "MEM"


class Stage(StrEnum):
    """A step that computes any prompt token is of the prefill stage, the others decode."""

    PREFILL = "prefill"
    DECODE = "decode"


BOTH_STAGES = (Stage.PREFILL, Stage.DECODE)


@dataclass(frozen=True, slots=True)
class ProfileWish:
    """What a caller asked for; None is what he left open. Activities are his words: not all can be had everywhere."""

    output_dir: str | None = None
    start_step: int | None = None
    num_steps: int | None = None
    activities: tuple[str, ...] = ()
    with_stack: bool = False
    record_shapes: bool = False
    by_stage: bool = False
    stages: tuple[Stage, ...] = BOTH_STAGES
    merge: bool = False
    prefix: str = ""
    profile_id: str | None = None


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """`output_dir` is absolute. Recording begins with step `start_step` of each rank, or its next one if that is past,
    and ends after `num_steps` recorded steps (of each stage, where stages have files of their own) or by order.

    Only steps of `stages` are recorded. `merged_ranks` is how many ranks' files become one in the end; 0: none do.
    """

    profile_id: str
    output_dir: str
    start_step: int | None = None
    num_steps: int | None = None
    activities: tuple[Activity, ...] = (Activity.CPU,)
    with_stack: bool = False
    record_shapes: bool = False
    by_stage: bool = False
    stages: tuple[Stage, ...] = BOTH_STAGES
    prefix: str = ""
    merged_ranks: int = 0

    @property
    def files(self) -> tuple[Stage | None, ...]:
        """One trace a stage, or one for all: None."""
        return self.stages if self.by_stage else (None,)

    def file_name(self, rank: int, stage: Stage | None) -> str:
        return self._name(f"rank{rank}", stage or "")

    @property
    def merged_name(self) -> str:
        return self._name("merged")

    def _name(self, *parts: str) -> str:
        return "-".join(part for part in (self.prefix, self.profile_id, *parts) if part) + TRACE_SUFFIX
