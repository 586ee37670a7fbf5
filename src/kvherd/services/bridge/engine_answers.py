"""What a stock engine says over HTTP, in the messages of either engine protocol.

Both protocols have messages of the same names; fields that only one of them has are set only there. What the engine
does not tell stays unset. A load that it does not tell by rank is the sum over its ranks, under rank 0.
"""

import json
from datetime import UTC, datetime
from types import ModuleType
from typing import Any

from google.protobuf import json_format, struct_pb2

from kvherd.core.errors import FieldInvalid
from kvherd.core.ids import Rank
from kvherd.ports.worker import RankOutcome, WorkerFacts, WorkerKind, WorkerLoad


def model_info(pb: ModuleType, facts: WorkerFacts) -> Any:  # noqa: ANN401 - generated, untyped
    """The first model, which is the base of any adapters. Its path is its name: HTTP tells no other."""
    name = facts.models[0] if facts.models else ""
    return pb.GetModelInfoResponse(
        model_path=name, served_model_name=name, is_generation=True, max_context_length=facts.max_context_tokens
    )


def sglang_server_info(pb: ModuleType, facts: WorkerFacts) -> Any:  # noqa: ANN401 - generated, untyped
    told = {
        "served_model_name": facts.models[0] if facts.models else "",
        "page_size": facts.block_size,
        "dp_size": facts.ranks,
        "context_length": facts.max_context_tokens,
        "max_running_requests": facts.max_running,
    }
    return pb.GetServerInfoResponse(
        server_args=_struct({name: value for name, value in told.items() if value}),
        scheduler_info=_struct({"kind": str(facts.kind), "version": facts.version}),
        sglang_version=facts.version if facts.kind is WorkerKind.SGLANG_HTTP else "",
        server_type="http",
        max_total_num_tokens=facts.capacity_tokens,
    )


def vllm_server_info(pb: ModuleType, facts: WorkerFacts) -> Any:  # noqa: ANN401 - generated, untyped
    return pb.GetServerInfoResponse(
        server_type="http",
        data_parallel_size=facts.ranks,
        block_size=facts.block_size,
        max_num_seqs=facts.max_running // max(facts.ranks, 1),  # of each rank
    )


def loads(pb: ModuleType, load: WorkerLoad, version: str, *, rank: Rank | None = None) -> Any:  # noqa: ANN401 - generated
    """Of one rank, or of all; the aggregate is of all. Raises `FieldInvalid` for a rank that the engine does not tell
    apart.
    """
    ranks = dict(load.ranks) or {Rank(0): load}
    if rank is not None and rank not in ranks:
        raise FieldInvalid("dp_rank", f"is {rank}; the engine tells of {', '.join(map(str, ranks))}")
    answer = pb.GetLoadsResponse(
        timestamp=datetime.now(UTC).isoformat(),
        version=version,
        dp_rank_count=len(ranks),
        loads=[_load(pb, each, one) for each, one in ranks.items() if rank in (None, each)],
    )
    if "aggregate" in answer.DESCRIPTOR.fields_by_name:
        answer.aggregate.total_running_reqs = load.running
        answer.aggregate.total_waiting_reqs = load.waiting
        answer.aggregate.total_reqs = load.running + load.waiting
        answer.aggregate.avg_token_usage = _usage(load)
    return answer


def _load(pb: ModuleType, rank: Rank, load: WorkerLoad) -> Any:  # noqa: ANN401 - generated, untyped
    return pb.SchedulerLoad(
        dp_rank=rank,
        num_running_reqs=load.running,
        num_waiting_reqs=load.waiting,
        num_total_reqs=load.running + load.waiting,
        num_used_tokens=load.used_tokens,
        max_total_num_tokens=load.capacity_tokens,
        token_usage=_usage(load),
    )


def _usage(load: WorkerLoad) -> float:
    return load.used_tokens / load.capacity_tokens if load.capacity_tokens else 0.0


def ranks_json(ranks: tuple[RankOutcome, ...]) -> str:
    """Each rank's outcome of a flush, for callers that want to know more than the protocol can say."""
    return json.dumps([{"rank": each.rank, "done": each.done, "message": each.message} for each in ranks])


def _struct(values: dict[str, object]) -> struct_pb2.Struct:
    struct: struct_pb2.Struct = json_format.ParseDict(values, struct_pb2.Struct())
    return struct
