"""What an operator may set of a gateway, and what holds otherwise. A command line needs it before all the rest."""

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Bounds:
    """`first_byte_s` is how long a worker may take to begin its answer, `down_s` how long if it is found to be down
    meanwhile: one that is stopped accepts connections as before.
    """

    first_byte_s: float = 600.0
    down_s: float = 15.0

    @property
    def first_look_s(self) -> float:
        return min(self.down_s, self.first_byte_s)


@dataclass(frozen=True, slots=True)
class ProbeBounds:
    """`period_s` is how long after a worker's answer it is asked again whether it is well, `deadline_s` how much
    silence counts as one failure; None: what the worker's kind needs.
    """

    period_s: float = 2.0
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class AdmissionBounds:
    running: int = 4096
    waiting: int = 1024
    longest_s: float = 30.0


class HealMode(StrEnum):
    REPORT = "report"
    FLUSH = "flush"
    OFF = "off"
