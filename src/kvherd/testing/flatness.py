"""What a process holds, over time, and whether it stays flat."""

import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_TASKS = re.compile(rb"^kvherd_gateway_tasks (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Holding:
    """At one moment; `at_s` counts from the beginning of the watch."""

    at_s: float
    resident_mb: float
    descriptors: int
    tasks: int


def holding(pid: int, metrics: bytes, *, at_s: float) -> Holding:
    """Raises `OSError` if the process has gone, `ValueError` if these are no gateway's metrics."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    resident_kb = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))
    descriptors = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    found = _TASKS.search(metrics)
    if found is None:
        raise ValueError(f"no kvherd_gateway_tasks in {metrics[:200]!r}")
    return Holding(at_s, resident_kb * 1024 / 1e6, descriptors, int(float(found[1])))


@dataclass(frozen=True, slots=True)
class Allowance:
    """What the last window's median may exceed the first's by."""

    share: float
    more: float

    def of(self, first: float) -> float:
        return first * (1 + self.share) + self.more


RESIDENT = Allowance(0.08, 8.0)
"""Caches that fill, and an allocator that returns pages when it likes. A leak is more: 8 MB over 200,000 requests are
40 bytes each."""
COUNTED = Allowance(0.5, 20.0)
"""Of descriptors and tasks under load: they follow what is under way, which is a matter of chance. What leaks one a
second is over it within a minute, and what leaks less is found at rest."""
IDLE = Allowance(0.0, 4.0)
"""Of descriptors and tasks at rest: a probe under way."""


@dataclass(slots=True)
class Watch:
    """Medians of a window after the warm-up and of the last one: single samples are a matter of chance."""

    samples: list[Holding] = field(default_factory=list)

    def window(self, begin: float, end: float) -> Sequence[Holding]:
        """The samples between two shares of the whole time."""
        whole_s = self.samples[-1].at_s
        return [one for one in self.samples if begin * whole_s <= one.at_s <= end * whole_s]

    def growth(self) -> list[str]:
        """What grew by more than is allowed under a load that did not."""
        first, last = self.window(0.3, 0.5), self.window(0.8, 1.0)
        assert len(first) >= 3, f"{len(self.samples)} samples are too few"
        assert len(last) >= 3, f"{len(self.samples)} samples are too few"
        return [
            *_grown("resident MB", first, last, lambda one: one.resident_mb, RESIDENT),
            *_grown("descriptors", first, last, lambda one: one.descriptors, COUNTED),
            *_grown("tasks", first, last, lambda one: one.tasks, COUNTED),
        ]


def left_behind(before: Sequence[Holding], after: Sequence[Holding]) -> list[str]:
    """What a load left that was over, by two rests."""
    return [
        *_grown("descriptors at rest", before, after, lambda one: one.descriptors, IDLE),
        *_grown("tasks at rest", before, after, lambda one: one.tasks, IDLE),
    ]


def _grown(
    what: str,
    first: Sequence[Holding],
    last: Sequence[Holding],
    read: Callable[[Holding], float],
    allowance: Allowance,
) -> list[str]:
    then, now = (statistics.median(map(read, window)) for window in (first, last))
    most = allowance.of(then)
    return [f"{what}: {then:g} → {now:g}, and {most:g} would be flat"] if now > most else []
