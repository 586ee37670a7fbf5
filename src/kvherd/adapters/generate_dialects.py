"""How tokens are asked for and told, in each engine protocol that has a `Generate`."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from smg_grpc_proto.generated import sglang_scheduler_pb2_grpc, vllm_engine_pb2_grpc

from kvherd.adapters.grpc_receivers import Reader
from kvherd.core.engine.generation import GenerationRequest
from kvherd.wire import vllm_pb, worker_pb


@dataclass(frozen=True, slots=True)
class GenerateDialect:
    """`usual_chunks`: its messages count all tokens so far and name their request, so that of most of them no more than
    the token need be read (`wire.usual_chunk`). `takes`: what of a request it can carry that not every engine can.
    """

    path: str
    stub: type
    encode: Callable[[GenerationRequest], Any]
    reader: Callable[[GenerationRequest, Iterable[int]], Reader]
    usual_chunks: bool
    takes_adapters: bool


SGLANG_GENERATE = GenerateDialect(
    "/sglang.grpc.scheduler.SglangScheduler/Generate",
    sglang_scheduler_pb2_grpc.SglangSchedulerStub,
    worker_pb.encode_request,
    lambda _, ending: worker_pb.ResponseReader(frozenset(ending)),
    usual_chunks=True,
    takes_adapters=True,
)
VLLM_GENERATE = GenerateDialect(
    "/vllm.grpc.engine.VllmEngine/Generate",
    vllm_engine_pb2_grpc.VllmEngineStub,
    vllm_pb.encode_request,
    lambda request, ending: vllm_pb.VllmReader(frozenset(ending), logprobs=request.sampling.logprobs),
    usual_chunks=False,
    takes_adapters=False,
)
