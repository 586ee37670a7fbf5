"""What the gateway says about its fleet, as plain JSON values."""

import json
from dataclasses import dataclass
from typing import Any

from kvherd.core.fleet.fanout import FanoutReport, WorkerResult, total_with_scheme
from kvherd.core.fleet.roster import Member
from kvherd.core.ids import Epoch
from kvherd.core.routing.candidate import Candidate
from kvherd.core.routing.policy import Explanation

Json = dict[str, Any]

_MOST_EXPLAINED = 16
_MOST_UNDER_WAY = 32


@dataclass(frozen=True, slots=True)
class KvView:
    """What is known of a worker's KV cache: the follower's state, credited blocks, the publisher's life, and how late
    its events came here: the last, and the worst of the last minute. Not `complete`: it may hold blocks nobody told of.
    """

    state: str
    blocks: int = 0
    epoch: Epoch | None = None
    reason: str = ""
    lag_s: float | None = None
    worst_lag_s: float | None = None
    complete: bool = True


def flush_report(report: FanoutReport) -> Json:
    return {
        "success": report.success,
        "message": report.message("flushed"),
        "workers_flushed": len(report.obeyed),
        "total_workers": len(report.results),
        "total_http_workers": total_with_scheme(report.results, "http", "https"),
        "total_grpc_workers": total_with_scheme(report.results, "grpc", "grpcs"),
        "workers": [_result(result) for result in report.results],
    }


def profile_report(report: FanoutReport, done: str) -> Json:
    """`done` is what became of a profile where the order was obeyed: started or stopped."""
    return {
        "success": report.success,
        "message": report.message(done),
        "files": [file for result in report.results for file in result.files],
        "workers": [{**_result(result), "files": list(result.files)} for result in report.results],
    }


def _result(result: WorkerResult) -> Json:
    return {
        "url": result.worker,
        "kind": result.kind,
        "outcome": result.outcome.value,
        "message": result.message,
        "seconds": result.seconds,
        "ranks": [{"rank": rank.rank, "outcome": rank.outcome.value, "message": rank.message} for rank in result.ranks],
    }


def worker_entry(member: Member, kv: KvView, now_s: float) -> Json:
    """One worker in `GET /workers`."""
    return {
        "id": member.slug,
        "url": member.worker,
        "kind": member.kind,
        "version": member.version,
        "models": list(member.models),
        "state": member.state.value,
        "reason": member.reason,
        "breaker": member.breaker.state(now_s).value,
        "running": member.running,
        "waiting": member.waiting,
        "labels": dict(member.labels),
        "weight": member.weight,
        "leaves_in_s": _rounded(max(0.0, member.leaves_at_s - now_s) if member.leaves_at_s is not None else None),
        "outstanding": len(member.in_flight),
        "backlog_s": round(member.backlog_s(now_s), 6),
        "slots": member.max_running,
        "slot_wait_s": round(member.slot_wait_s(), 6),
        "prefill_tokens_per_s": round(member.rate.at(now_s), 1),
        "prefill_rate_learned": member.rate.observations > 0,
        "used_tokens": member.used_tokens,
        "capacity_tokens": member.capacity_tokens,
        "block_size": member.block_size,
        "ranks": member.ranks,
        "max_context_tokens": member.max_context_tokens,
        "requests_total": member.requests_total,
        "failures_total": member.failures_total,
        "events_url": member.events_url,
        "replay_url": member.replay_url,
        "tokenizer": {"from": member.tokenizer_from, "problem": member.tokenizer_problem},
        "tokenization": {
            each.value: {"verdict": found.agreement.value, "why": found.why}
            for each, found in member.tokenization.items()
        },
        "kv": {
            "state": kv.state,
            "blocks": kv.blocks,
            "epoch": kv.epoch,
            "reason": kv.reason,
            "lag_s": _rounded(kv.lag_s),
            "worst_lag_s": _rounded(kv.worst_lag_s),
            "complete": kv.complete,
            "healings": member.healings,
        },
        "truth": _truth(member),
    }


def under_way(member: Member, now_s: float) -> list[Json]:
    """The requests that have been there longest."""
    longest = sorted(member.in_flight.items(), key=lambda item: item[1].since_s)[:_MOST_UNDER_WAY]
    return [
        {"request": request, "seconds": _rounded(now_s - each.since_s), "prompt_tokens": each.prompt_tokens}
        for request, each in longest
    ]


def _truth(member: Member) -> Json:
    truth = member.truth
    return {
        "available": truth.available,
        "decided": truth.decided,
        "wrong": truth.wrong,
        "undecided": truth.undecided,
        "undecided_by": dict(truth.undecided_by),
        "unavailable": truth.unavailable,
        "predicted_tokens": truth.predicted_tokens,
        "reported_tokens": truth.reported_tokens,
        "error_rate": round(truth.error_rate, 6),
        "rebuilds": truth.rebuilds,
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def explanation_header(explanation: Explanation, held_s: float = 0.0) -> str:
    """One line of ASCII JSON: the choice, the cheapest candidates with their costs, and who was ruled out.

    `held_s` is how long the request waited before that for a worker to have room.
    """
    cheapest = sorted(explanation.costed, key=lambda one: one.total_s)[:_MOST_EXPLAINED]
    value = {
        "policy": explanation.policy,
        "chosen": explanation.chosen.worker if explanation.chosen else None,
        "rank": explanation.chosen.rank if explanation.chosen else None,
        "held_s": round(held_s, 6),
        "candidates": [
            {
                **_candidate(one.candidate),
                "costs_s": {name: round(cost, 6) for name, cost in one.costs},
                "total_s": round(one.total_s, 6),
            }
            for one in cheapest
        ],
        "ruled_out": [
            {"worker": one.candidate.worker, "reason": one.reason} for one in explanation.ruled_out[:_MOST_EXPLAINED]
        ],
    }
    return json.dumps(value, separators=(",", ":"))


def _candidate(candidate: Candidate) -> Json:
    return {
        "worker": candidate.worker,
        **({} if candidate.rank is None else {"rank": candidate.rank}),
        "matched_tokens": candidate.matched_tokens,
        "load": candidate.load,
        "kv": candidate.kv.value,
    }
