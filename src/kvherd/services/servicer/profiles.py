"""Profiles by order: what was left open is filled in, what cannot be had is refused by name, ranks answer as one."""

import tempfile
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from kvherd.core.engine.profile import MERGED_SUFFIX, Activity, ProfileRequest, ProfileWish
from kvherd.core.engine.reports import OrderReport
from kvherd.core.errors import FieldInvalid, OrderConflict, OrderRefused, OrderTimedOut
from kvherd.core.ids import OrderId
from kvherd.ports.scheduler import Scheduler
from kvherd.services.servicer.order_edge import message_of

DIRECTORY_VARIABLES = ("KVHERD_PROFILE_DIR", "SGLANG_TORCH_PROFILER_DIR")
_OFF = {"0", "false", "no", "off", "n", "f"}
_GPU = "GPU"


@dataclass(frozen=True, slots=True)
class ProfileDone:
    """A profile is on everywhere, or ended everywhere. `notes` tell what of the wish could have no effect, `ranks` what
    each said.
    """

    profile_id: str
    message: str
    files: tuple[str, ...]
    notes: tuple[str, ...] = ()
    ranks: tuple[tuple[int, bool, str], ...] = ()


class Profiles:
    """`environment` may turn fields off, and names the directory of those who name none."""

    def __init__(self, scheduler: Scheduler, environment: Mapping[str, str], *, timeout_s: float) -> None:
        self._scheduler = scheduler
        self._environment = environment
        self._timeout_s = timeout_s

    async def start(self, wish: ProfileWish) -> ProfileDone:
        """Raises `FieldInvalid`, `OrderConflict` if one is on, `OrderRefused`, `OrderTimedOut` or `SchedulerDied`."""
        notes: list[str] = []
        request = ProfileRequest(
            profile_id=wish.profile_id or f"profile-{uuid.uuid4().hex}",
            output_dir=self._directory(wish.output_dir),
            start_step=wish.start_step,
            num_steps=wish.num_steps,
            activities=_activities(wish.activities, notes),
            with_stack=self._allowed("with_stack", notes, wanted=wish.with_stack),
            record_shapes=self._allowed("record_shapes", notes, wanted=wish.record_shapes),
            by_stage=wish.by_stage,
            stages=tuple(dict.fromkeys(wish.stages)),
            prefix=wish.prefix,
            merged_ranks=len(self._scheduler.ranks) if wish.merge else 0,
        )
        report = await self._scheduler.start_profile(request, timeout_s=self._timeout_s)
        done = self._done(report, request.profile_id)
        return replace(done, notes=tuple(notes))

    async def stop(self) -> ProfileDone:
        """The files are whole when this returns. Raises as `start` does; `OrderConflict` if none is on."""
        return self._done(await self._scheduler.stop_profile(timeout_s=self._timeout_s), "")

    def _done(self, report: OrderReport, profile_id: str) -> ProfileDone:
        if report.silent:
            raise OrderTimedOut(OrderId("profile"), tuple(report.silent), self._timeout_s)
        ranks = tuple((answer.rank, answer.done, answer.message) for answer in report.answers)
        if not report.done:
            refusals = [answer for answer in report.answers if not answer.done]
            kind = OrderConflict if all(answer.conflict for answer in refusals) else OrderRefused
            raise kind(message_of(OrderReport(tuple(refusals)), ranks=len(report.answers)), ranks)
        # Ranks that end in one moment each find all files there, and each merges them, into the same one.
        told = dict.fromkeys(file for answer in report.answers for file in answer.files)
        files = tuple(sorted(told, key=lambda file: file.endswith(MERGED_SUFFIX)))
        return ProfileDone(profile_id or report.answers[0].profile_id, message_of(report), files, ranks=ranks)

    def _directory(self, wanted: str | None) -> str:
        """Whole, since a rank need not have our working directory."""
        named = next((self._environment[name] for name in DIRECTORY_VARIABLES if self._environment.get(name)), None)
        return str(Path(wanted or named or Path(tempfile.gettempdir()) / "kvherd-profiles").absolute())

    def _allowed(self, field: str, notes: list[str], *, wanted: bool) -> bool:
        for prefix in ("KVHERD", "SGLANG"):
            name = f"{prefix}_PROFILE_{field.upper()}"
            if wanted and self._environment.get(name, "").strip().lower() in _OFF:
                notes.append(f"{field} is turned off by {name} in the engine's environment")
                return False
        return wanted


def _activities(wanted: tuple[str, ...], notes: list[str]) -> tuple[Activity, ...]:
    """Clients ask for CPU and GPU by default, so a GPU that is not there is no error beside what can be recorded."""
    known = {activity.value: activity for activity in Activity}
    words = [word.upper() for word in wanted]
    for index, word in enumerate(words):
        if word not in known and not (word == _GPU and len(set(words)) > 1):
            problem = f"{wanted[index][:40]!r} cannot be recorded here; this engine records {' and '.join(known)}"
            raise FieldInvalid(f"activities[{index}]", problem)
    if _GPU in words:
        notes.append("activities: GPU records nothing, as this engine computes on the processor")
    return tuple(dict.fromkeys(known[word] for word in words if word in known)) or (Activity.CPU,)
