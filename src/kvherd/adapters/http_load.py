"""An engine's load over HTTP: kvherd tells it, of vLLM and SGLang it is read off their metrics."""

import re
from collections.abc import Mapping
from typing import Any

from kvherd.adapters.http_exchange import HttpAnswer
from kvherd.core.ids import Rank
from kvherd.ports.worker import WorkerFacts, WorkerKind, WorkerLoad

METRICS = {
    WorkerKind.VLLM_HTTP: ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
    WorkerKind.SGLANG_HTTP: ("sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage"),
}
_RANK = re.compile(r'[{,](?:engine|dp_rank)="(\d+)"')
"""How the engines name a data-parallel rank: vLLM, SGLang."""


def metrics_load(metrics: HttpAnswer, facts: WorkerFacts) -> WorkerLoad:
    """Ranks are told apart where a metric has a label for them."""
    running, waiting, usage = (_by_rank(metrics, name) for name in METRICS[facts.kind])
    capacity = facts.capacity_tokens // max(facts.ranks, 1)

    def load(rank: Rank) -> WorkerLoad:
        used = int(usage.get(rank, 0.0) * capacity)
        return WorkerLoad(int(running.get(rank, 0)), int(waiting.get(rank, 0)), used, capacity)

    ranks = sorted(rank for rank in {*running, *waiting, *usage} if rank is not None)
    return WorkerLoad(
        running=int(sum(running.values())),
        waiting=int(sum(waiting.values())),
        used_tokens=int(sum(usage.values()) * facts.capacity_tokens / max(facts.ranks, 1)),
        capacity_tokens=facts.capacity_tokens,
        ranks={rank: load(rank) for rank in ranks},
    )


def kvherd_load(answer: HttpAnswer) -> WorkerLoad:
    told = answer.document().get("loads")
    loads = [load for load in told if isinstance(load, dict)] if isinstance(told, list) else []
    ranks = {Rank(int(load.get("dp_rank", number))): _told(load) for number, load in enumerate(loads)}
    return WorkerLoad(
        running=sum(load.running for load in ranks.values()),
        waiting=sum(load.waiting for load in ranks.values()),
        used_tokens=sum(load.used_tokens for load in ranks.values()),
        capacity_tokens=sum(load.capacity_tokens for load in ranks.values()),
        ranks=ranks,
    )


def _told(load: Mapping[str, Any]) -> WorkerLoad:
    def one(*names: str) -> int:
        return next((int(load[name]) for name in names if name in load), 0)

    return WorkerLoad(
        running=one("running", "num_running_reqs"),
        waiting=one("waiting", "num_waiting_reqs"),
        used_tokens=one("used_tokens", "num_used_tokens"),
        capacity_tokens=one("capacity_tokens", "max_total_num_tokens"),
    )


def _by_rank(metrics: HttpAnswer, name: str) -> dict[Rank | None, float]:
    """A metric in Prometheus' text format, summed over all labels but the rank's; None: it has none."""
    sums: dict[Rank | None, float] = {}
    for line in metrics.body.decode("utf-8", "replace").splitlines():
        if line.startswith((name + "{", name + " ")):
            labels, _, value = line.rpartition("}") if "}" in line else line.partition(" ")
            found = _RANK.search(labels)
            rank = Rank(int(found[1])) if found else None
            try:
                sums[rank] = sums.get(rank, 0.0) + float(value.split()[0])
            except (ValueError, IndexError):
                continue
    return sums
