"""An engine of SGLang's gRPC protocol that does as it is told: for what speaks to engines, not for what is one."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc
import grpc.aio
from smg_grpc_proto.generated import common_pb2, sglang_scheduler_pb2_grpc
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from kvherd.wire.sglang_pb import IN_DOUBT_KEY

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
EOS = 256


@dataclass
class EngineScript:
    """What the engine does, and what was done to it. Change it while it runs.

    `answer` is said one byte a chunk; after `stops_after` of them the engine does what `then` says: stall, or end
    with that status. `flush` is done, refused, stall, in doubt (as a bridge says of its engine), or a status. `alive`
    are generations under way.
    """

    answer: str = "Paris"
    cached_tokens: int = 0
    stops_after: int | None = None
    then: str = "stall"
    flush: str = "done"
    healthy: bool = True
    version: str = "kvherd-0.1.0"
    tokenizer_zip: bytes = b""
    digest: str | None = None
    ends_with_eos: bool = False
    repeats_all: bool = False
    streams: bool = True
    logprobs: bool = False
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    alive: set[str] = field(default_factory=set)
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class ScriptedSglang(sglang_scheduler_pb2_grpc.SglangSchedulerServicer):  # type: ignore[misc] # generated, untyped
    def __init__(self, script: EngineScript) -> None:
        self._script = script

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:  # noqa: N802
        script = self._script
        script.requests.append(request)
        script.alive.add(request.request_id)
        try:
            async for response in self._responses(request, context):
                yield response
        finally:
            script.alive.discard(request.request_id)
            script.ended.set()

    async def _responses(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        script = self._script
        token_ids = list(script.answer.encode()) + [EOS] * script.ends_with_eos
        token_ids = token_ids[: request.sampling_params.max_new_tokens]
        for made, token_id in enumerate(token_ids):
            if made == script.stops_after:
                await _misbehave(script.then, context)
            if script.streams:
                yield pb.GenerateResponse(request_id=request.request_id, chunk=self._chunk(request, token_id, made + 1))
                await asyncio.sleep(0)
        repeated = token_ids if script.repeats_all or not script.streams else token_ids[-1:]
        full = len(token_ids) == request.sampling_params.max_new_tokens
        yield pb.GenerateResponse(
            request_id=request.request_id,
            complete=pb.GenerateComplete(
                output_ids=repeated,
                finish_reason="length" if full else "stop",
                prompt_tokens=len(request.tokenized.input_ids),
                completion_tokens=len(token_ids),
                cached_tokens=script.cached_tokens,
                matched_token_id=None if full else EOS,
                output_logprobs=self._logprobs(repeated),
            ),
        )

    def _chunk(self, request: pb.GenerateRequest, token_id: int, made: int) -> pb.GenerateStreamChunk:
        return pb.GenerateStreamChunk(
            token_ids=[token_id],
            prompt_tokens=len(request.tokenized.input_ids),
            completion_tokens=made,
            cached_tokens=self._script.cached_tokens,
            output_logprobs=self._logprobs([token_id]),
        )

    def _logprobs(self, token_ids: list[int]) -> pb.OutputLogProbs | None:
        if not self._script.logprobs:
            return None
        tops = [pb.TopLogProbs(values=[-0.25], token_ids=[token]) for token in token_ids]
        return pb.OutputLogProbs(token_logprobs=[-0.25] * len(token_ids), token_ids=token_ids, top_logprobs=tops)

    async def HealthCheck(self, request: pb.HealthCheckRequest, context: Context) -> pb.HealthCheckResponse:  # noqa: N802
        return pb.HealthCheckResponse(healthy=self._script.healthy, message="warming up")

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:  # noqa: N802
        return pb.GetModelInfoResponse(
            model_path="/models/herd",
            served_model_name="herd",
            is_generation=True,
            max_context_length=400,
            vocab_size=259,
            eos_token_ids=[EOS],
        )

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:  # noqa: N802
        answer = pb.GetServerInfoResponse(sglang_version=self._script.version, max_total_num_tokens=8192)
        answer.server_args.update({"page_size": 16, "dp_size": 2, "max_running_requests": 8})
        return answer

    async def GetLoads(self, request: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse:  # noqa: N802
        load = pb.SchedulerLoad(num_running_reqs=1, num_waiting_reqs=2, num_used_tokens=30, max_total_num_tokens=400)
        return pb.GetLoadsResponse(loads=[load, load])

    async def GetTokenizer(  # noqa: N802
        self, request: common_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        data = self._script.tokenizer_zip
        digest = self._script.digest or hashlib.sha256(data).hexdigest()
        half = len(data) // 2
        yield common_pb2.GetTokenizerChunk(data=data[:half])
        yield common_pb2.GetTokenizerChunk(data=data[half:], sha256=digest)

    async def FlushCache(  # noqa: N802
        self, request: common_pb2.FlushCacheRequest, context: Context
    ) -> common_pb2.FlushCacheResponse:
        done = self._script.flush == "done"
        if self._script.flush == "in doubt":
            context.set_trailing_metadata(((IN_DOUBT_KEY, "1"),))
            await _misbehave("DEADLINE_EXCEEDED", context)
        if not done and self._script.flush != "refused":
            await _misbehave(self._script.flush, context)
        message = "cleared" if done else "1 request is running"
        context.set_trailing_metadata((("kvherd-ranks", json.dumps([{"rank": 0, "done": done, "message": message}])),))
        return common_pb2.FlushCacheResponse(success=done, message=message)


async def _misbehave(how: str, context: Context) -> None:
    if how == "stall":
        await asyncio.Event().wait()
    await context.abort(grpc.StatusCode[how], f"as told: {how}")


@asynccontextmanager
async def serving(servicer: ScriptedSglang, *, credentials: grpc.ServerCredentials | None = None) -> AsyncIterator[str]:
    """The address of a server that has this service."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    sglang_scheduler_pb2_grpc.add_SglangSchedulerServicer_to_server(servicer, server)
    if credentials is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
