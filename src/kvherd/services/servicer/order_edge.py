"""Orders at the edge: times that can be waited, and the ranks' answers in words and as JSON."""

import json
import math

from kvherd.core.engine.reports import OrderReport
from kvherd.core.errors import FieldInvalid


def checked_timeout(timeout_s: float, limit_s: float) -> float:
    """Raises `FieldInvalid` for a time that no flush can wait."""
    if not math.isfinite(timeout_s) or not 0 <= timeout_s <= limit_s:
        raise FieldInvalid("timeout", f"is {timeout_s:g}; it must be 0 to {limit_s:g} seconds")
    return timeout_s


def message_of(report: OrderReport, *, ranks: int | None = None) -> str:
    """One sentence a rank, or one for all where the engine has only one; `ranks` says so of a report of some."""
    parts = [answer.message for answer in report.answers]
    if (ranks or len(report.answers) + len(report.silent)) > 1:
        parts = [f"rank {answer.rank}: {answer.message}" for answer in report.answers]
    parts += [f"rank {rank}: no answer" for rank in report.silent]
    return "; ".join(parts)


def ranks_json(report: OrderReport) -> str:
    """Each rank's outcome, for callers that want to know more than the protocol can say."""
    answered = [{"rank": each.rank, "done": each.done, "message": each.message} for each in report.answers]
    silent = [{"rank": rank, "done": False, "message": "no answer"} for rank in report.silent]
    return json.dumps(answered + silent)
