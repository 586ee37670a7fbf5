"""Core values → messages of `kvherd.gateway.v1`."""

from typing import Any

from kvherd.core.fleet.fanout import FanoutReport, Outcome, WorkerResult, total_with_scheme
from kvherd.core.fleet.roster import Member
from kvherd.wire.fleet_json import KvView
from kvherd.wire.proto import kvherd_gateway_v1_pb2 as pb

_OUTCOMES: dict[Outcome, Any] = {
    Outcome.DONE: pb.OUTCOME_DONE,
    Outcome.REFUSED: pb.OUTCOME_REFUSED,
    Outcome.UNSUPPORTED: pb.OUTCOME_UNSUPPORTED,
    Outcome.UNREACHABLE: pb.OUTCOME_UNREACHABLE,
    Outcome.TIMED_OUT: pb.OUTCOME_TIMED_OUT,
    Outcome.FAILED: pb.OUTCOME_FAILED,
}


def flush_response(report: FanoutReport) -> pb.FlushCacheResponse:
    return pb.FlushCacheResponse(
        success=report.success,
        message=report.message("flushed"),
        workers_flushed=len(report.obeyed),
        total_workers=len(report.results),
        total_http_workers=total_with_scheme(report.results, "http", "https"),
        total_grpc_workers=total_with_scheme(report.results, "grpc"),
        workers=[_result(result) for result in report.results],
    )


def _result(result: WorkerResult) -> pb.WorkerResult:
    return pb.WorkerResult(
        url=result.worker,
        kind=result.kind,
        outcome=_OUTCOMES[result.outcome],
        message=result.message,
        seconds=result.seconds,
        ranks=[
            pb.RankResult(rank=rank.rank, outcome=_OUTCOMES[rank.outcome], message=rank.message)
            for rank in result.ranks
        ],
    )


def worker_message(member: Member, kv: KvView, now_s: float) -> pb.Worker:
    return pb.Worker(
        id=member.slug,
        url=member.worker,
        kind=member.kind,
        models=member.models,
        state=member.state.value,
        reason=member.reason,
        running=member.running,
        waiting=member.waiting,
        outstanding=len(member.in_flight),
        breaker=member.breaker.state(now_s).value,
        kv=pb.KvState(state=kv.state, blocks=kv.blocks, epoch=kv.epoch or ""),
    )
