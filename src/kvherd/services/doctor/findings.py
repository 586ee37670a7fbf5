"""What the doctor finds: one verdict a check, with what was seen and what to do about it."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    OK = "ok"
    WARNING = "warning"  # works, and could do better
    PROBLEM = "problem"  # stands in the way of right routing
    UNKNOWN = "unknown"  # could not be seen


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    verdict: Verdict
    seen: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    url: str
    findings: tuple[Finding, ...]
    reachable: bool = True

    @property
    def fine(self) -> bool:
        """Nothing that was seen stands in the way."""
        return self.reachable and not any(one.verdict is Verdict.PROBLEM for one in self.findings)

    def as_json(self) -> dict[str, Any]:
        checks = [
            {"check": one.check, "verdict": one.verdict.value, "seen": one.seen, "do": one.advice}
            for one in self.findings
        ]
        return {"url": self.url, "reachable": self.reachable, "fine": self.fine, "checks": checks}


def ok(check: str, seen: str) -> Finding:
    return Finding(check, Verdict.OK, seen)


def warning(check: str, seen: str, advice: str) -> Finding:
    return Finding(check, Verdict.WARNING, seen, advice)


def problem(check: str, seen: str, advice: str) -> Finding:
    return Finding(check, Verdict.PROBLEM, seen, advice)


def unknown(check: str, seen: str, advice: str = "") -> Finding:
    return Finding(check, Verdict.UNKNOWN, seen, advice)
