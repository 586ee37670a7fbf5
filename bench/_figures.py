"""From single measurements to the table, the goals, the JSON and the plot of `gateway.py`.

Every figure is the median over rounds. A ratio is taken within each round, where both sides were measured within
seconds of each other, and the median of those is shown: what else the machine does drifts, and hits both alike.
"""

import json
import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from _gateways import INTERPRETED, KVHERD, NGINX, SGLANG_ROUTER, SMG, VLLM_ROUTER

DIRECT = "direct"
ORDER = (DIRECT, KVHERD, INTERPRETED, NGINX, SMG, VLLM_ROUTER, SGLANG_ROUTER)
SATURATED = 0.9


@dataclass(frozen=True, slots=True)
class Cell:
    """One row of the table: what is asked, and how. `unit` is what CPU is counted per: a request or an event."""

    key: str
    title: str
    size: int
    connections: int
    stream: bool = False
    fresh: bool = False
    max_tokens: int | None = None

    @property
    def unit(self) -> str:
        return "event" if self.stream else "request"


@dataclass(frozen=True, slots=True)
class Measured:
    """One contender in one cell in one round. Shares are of the cores that it may use, `others` of the machine."""

    cell: str
    contender: str
    round: int
    cpu_us: float
    per_s: float
    p50_ms: float
    p99_ms: float
    busy: float
    load_busy: float
    engine_busy: float
    others: float


@dataclass(slots=True)
class Results:
    """What one run found. `absent` and `failed` say why there is no figure."""

    settings: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    cells: list[Cell] = field(default_factory=list)
    measured: list[Measured] = field(default_factory=list)
    memory_mb: dict[str, dict[str, float]] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def of(self, cell: str, contender: str) -> list[Measured]:
        return [one for one in self.measured if (one.cell, one.contender) == (cell, contender)]

    def median(self, cell: str, contender: str, name: str) -> float | None:
        found = [getattr(one, name) for one in self.of(cell, contender)]
        return statistics.median(found) if found else None

    def ratio(self, cell: str, name: str, ours: str, theirs: str) -> float | None:
        """Median over the rounds in which both were measured."""
        rounds = {one.round: getattr(one, name) for one in self.of(cell, theirs)}
        pairs = [getattr(one, name) / rounds[one.round] for one in self.of(cell, ours) if rounds.get(one.round)]
        return statistics.median(pairs) if pairs else None

    def memory_ratio(self, which: str, theirs: str) -> float | None:
        own, other = self.memory_mb.get(KVHERD, {}).get(which), self.memory_mb.get(theirs, {}).get(which)
        return own / other if own and other else None


@dataclass(frozen=True, slots=True)
class Goal:
    what: str
    seen: Callable[[Results], float | None]
    limit: float
    at_least: bool = False
    unit: str = "×"

    def line(self, results: Results) -> str:
        seen = self.seen(results)
        sign = "≥" if self.at_least else "≤"
        goal = f"{sign} {self.limit:g} {self.unit}"
        if seen is None:
            return f"{self.what:64}{'not measured':>14}{goal:>12}  –"
        met = seen >= self.limit if self.at_least else seen <= self.limit
        return f"{self.what:64}{seen:12.2f} {self.unit}{goal:>12}  {'met' if met else 'NOT MET'}"

    def verdict(self, results: Results) -> dict[str, Any]:
        seen = self.seen(results)
        met = None if seen is None else (seen >= self.limit if self.at_least else seen <= self.limit)
        return {"what": self.what, "seen": seen, "goal": self.limit, "at_least": self.at_least, "met": met}


def cpu(cell: str, peer: str) -> Callable[[Results], float | None]:
    return lambda results: results.ratio(cell, "cpu_us", KVHERD, peer)


def throughput(cell: str, peer: str) -> Callable[[Results], float | None]:
    return lambda results: results.ratio(cell, "per_s", KVHERD, peer)


def tokens_to_grpc(results: Results) -> float | None:
    """Our reader of gRPC workers by grpc.aio alone; the median over rounds."""
    taken = results.extra.get("grpc_tokens")
    if not taken:
        return None
    pairs = zip(taken["worker"]["all"], taken["alone"]["all"], strict=True)
    return float(statistics.median(own / bare for own, bare in pairs))


GRPC_TOKENS = {
    "alone": "grpc.aio alone, no text made",
    "worker": "kvherd, detokenized",
    "alone_tls": "grpc.aio alone, no text made, over TLS",
    "worker_tls": "kvherd, detokenized, over TLS",
}
GOALS = (
    Goal("CPU a request, 1 KB, 64 connections, to SMG", cpu("json-1k-64", SMG), 0.2),
    Goal("CPU a request, 1 KB, 64 connections, to nginx", cpu("json-1k-64", NGINX), 2.0),
    Goal("requests/s on two cores, 1 KB, to SMG", throughput("cores-1k-64", SMG), 2.0, at_least=True),
    Goal("requests/s on two cores, 1 KB, to vllm-router", throughput("cores-1k-64", VLLM_ROUTER), 1.4, at_least=True),
    Goal("CPU a request by cache, events, 1 KB, to SMG cache_aware", cpu("kv-1k-64", SMG), 0.4),
    Goal("CPU a request by cache, events, 16 KB, to SMG cache_aware", cpu("kv-16k-64", SMG), 0.4),
    Goal("CPU an event, 64 streams, to SMG", cpu("sse-64", SMG), 0.7),
    Goal("CPU an event, 64 streams, to nginx", cpu("sse-64", NGINX), 1.0),
    Goal(
        "memory of the idle gateway",
        lambda results: results.memory_mb.get(KVHERD, {}).get("idle"),
        60.0,
        unit="MB",
    ),
    Goal(
        "CPU a token message of gRPC workers, 64 streams, detokenized",
        lambda results: results.extra.get("grpc_tokens", {}).get("worker", {}).get("us_a_message"),
        20.0,
        unit="µs",
    ),
    # the 20 µs are of a machine where grpc.aio alone takes 57
    Goal("CPU a token message of gRPC workers, 64 streams, to grpc.aio alone", tokens_to_grpc, 0.35),
)


def table(results: Results) -> Iterable[str]:
    """The lines to print."""
    yield (
        f"{'cell':44}{'gateway':15}{'CPU µs':>9}{'to nginx':>10}{'to SMG':>8}{'per s':>9}{'p50 ms':>9}{'p99 ms':>9}"
        f"{'+p50':>8}{'+p99':>8}  busy: gateway load engine"
    )
    for cell in results.cells:
        title = f"{cell.title} (CPU an event)" if cell.stream else cell.title
        for name in ORDER:
            if results.of(cell.key, name):
                yield _row(results, cell.key, title, name)
                title = ""
    yield from _notes(results)
    if results.memory_mb:
        yield f"\n{'memory, MB':59}{'idle':>9}{'under load':>12}{'highest':>10}"
        for name, sizes in results.memory_mb.items():
            yield f"{'':44}{name:15}{sizes['idle']:9.0f}{sizes['loaded']:12.0f}{sizes['highest']:10.0f}"
    for name, found in results.extra.get("grpc_tokens", {}).items():
        yield f"gRPC worker, CPU a token message, 64 streams: {GRPC_TOKENS[name]:38}{found['us_a_message']:8.1f} µs"
    yield f"\n{'goal':64}{'seen':>14}{'goal':>12}"
    for goal in GOALS:
        yield goal.line(results)


def _row(results: Results, cell: str, title: str, name: str) -> str:
    def middle(field_name: str, contender: str = name) -> float:
        return results.median(cell, contender, field_name) or 0.0

    def against(peer: str) -> str:
        ratio = results.ratio(cell, "cpu_us", name, peer) if name not in (peer, DIRECT) else None
        return "" if ratio is None else f"{ratio:.2f}"

    added = [""] * 2
    if name != DIRECT and results.of(cell, DIRECT):
        added = [f"{middle(which) - middle(which, DIRECT):.2f}" for which in ("p50_ms", "p99_ms")]
    used = f"{middle('cpu_us'):.1f}" if name != DIRECT else ""
    mine = f"{middle('busy'):7.0%}" if name != DIRECT else f"{'':7}"
    full = " *" if max(middle("load_busy"), middle("engine_busy")) > SATURATED else ""
    behind = f"{middle('load_busy'):7.0%}{middle('engine_busy'):7.0%}{full}"
    return (
        f"{title:44}{name:15}{used:>9}{against(NGINX):>10}{against(SMG):>8}{middle('per_s'):9.0f}"
        f"{middle('p50_ms'):9.2f}{middle('p99_ms'):9.2f}{added[0]:>8}{added[1]:>8}  {mine}{behind}"
    )


def _notes(results: Results) -> Iterable[str]:
    yield "* load or engine above 90 % of a core: requests/s and latencies are theirs rather than the gateway's."
    others = statistics.median(one.others for one in results.measured) if results.measured else 0.0
    worst = max((one.others for one in results.measured), default=0.0)
    quiet = "" if others < 0.05 else ": NOT a quiet machine, trust ratios only, and those with care"
    yield f"Other work took {others:.0%} of this machine (median; worst {worst:.0%}){quiet}."
    for name, why in results.absent.items():
        yield f"absent: {name}: {why}"
    for what, why in results.failed.items():
        yield f"failed: {what}: {why}"


def write(results: Results, folder: Path) -> list[Path]:
    """The JSON, and the plot where matplotlib is installed."""
    folder.mkdir(exist_ok=True)
    path = folder / "gateway.json"
    said = {
        "settings": results.settings,
        "versions": results.versions,
        "absent": results.absent,
        "failed": results.failed,
        "goals": [goal.verdict(results) for goal in GOALS],
        "memory_mb": results.memory_mb,
        "extra": results.extra,
        "cells": [asdict(cell) for cell in results.cells],
        "measured": [asdict(one) for one in results.measured],
    }
    path.write_text(json.dumps(said, indent=1))
    try:
        import matplotlib  # noqa: PLC0415 - the only optional part
    except ImportError:
        print("no plot: matplotlib is not installed")
        return [path]
    matplotlib.use("Agg")
    return [path, _plot(results, folder / "gateway.png")]


def _plot(results: Results, path: Path) -> Path:
    from matplotlib import pyplot  # noqa: PLC0415 - the only optional part

    names = [name for name in ORDER[1:] if any(one.contender == name for one in results.measured)]
    colours = dict(zip(ORDER[1:], ("#c0392b", "#e59866", "#7f8c8d", "#2980b9", "#27ae60", "#8e44ad"), strict=True))
    parts = (
        ("CPU µs a request", [cell for cell in results.cells if not cell.stream and "cores" not in cell.key], "cpu_us"),
        ("CPU µs an event", [cell for cell in results.cells if cell.stream], "cpu_us"),
        ("requests/s on two cores", [cell for cell in results.cells if "cores" in cell.key], "per_s"),
    )
    shown = [part for part in parts if part[1]]
    widths = [max(len(cells), 1.6) for _, cells, _ in shown]
    figure, axes = pyplot.subplots(1, len(shown), figsize=(17, 5.5), width_ratios=widths, squeeze=False)
    for axis, (title, cells, name) in zip(axes[0], shown, strict=True):
        width = 0.8 / len(names)
        for place, contender in enumerate(names):
            values = [results.median(cell.key, contender, name) or 0.0 for cell in cells]
            spots = [index + (place - (len(names) - 1) / 2) * width for index in range(len(cells))]
            bars = axis.bar(spots, values, width, label=contender, color=colours[contender])
            axis.bar_label(
                bars, [f"{value:.0f}" if value else "" for value in values], fontsize=6, rotation=90, padding=2
            )
        axis.set_xticks(range(len(cells)), [cell.title.replace(", ", "\n") for cell in cells], fontsize=7)
        axis.set_title(title, fontsize=10)
        axis.margins(y=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    return path
