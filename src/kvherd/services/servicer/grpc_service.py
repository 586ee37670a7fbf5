"""`sglang.grpc.scheduler.SglangScheduler` in front of one engine's scheduler."""

from collections.abc import Awaitable
from contextlib import aclosing
from datetime import UTC, datetime

import grpc
from google.protobuf import json_format, struct_pb2
from smg_grpc_proto.generated import common_pb2, sglang_scheduler_pb2_grpc
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from kvherd import __version__
from kvherd.core.engine.admission import room_for_answer
from kvherd.core.engine.generation import FinishReason
from kvherd.core.engine.reports import OrderReport
from kvherd.core.errors import FieldInvalid, OrderConflict, OrderRefused, OrderTimedOut, Unsupported
from kvherd.core.ids import OrderId, RequestId
from kvherd.ports.kv_stream import KvEventDoor
from kvherd.ports.scheduler import Scheduler
from kvherd.services.kv_relay.grpc_edge import Context, Handler, hand_out, refuse, rpc
from kvherd.services.servicer.answers import ChoiceAnswer
from kvherd.services.servicer.config import ServicerConfig
from kvherd.services.servicer.facts import EngineFacts
from kvherd.services.servicer.generations import Generations
from kvherd.services.servicer.order_edge import checked_timeout, message_of, ranks_json
from kvherd.services.servicer.profiles import ProfileDone, Profiles
from kvherd.wire.profile_pb import read_start_profile
from kvherd.wire.sglang_pb import (
    ABORT_REASON_KEY,
    HOLD_KEY,
    RANKS_KEY,
    decode_generate,
    encode_load,
    encode_reason,
)


class SglangService(sglang_scheduler_pb2_grpc.SglangSchedulerServicer):  # type: ignore[misc] # generated, untyped
    """Every RPC of the service; those that this engine cannot do are UNIMPLEMENTED with a sentence."""

    def __init__(
        self,
        config: ServicerConfig,
        scheduler: Scheduler,
        *,
        generations: Generations,
        events: KvEventDoor,
        facts: EngineFacts,
        profiles: Profiles,
    ) -> None:
        self._config = config
        self._scheduler = scheduler
        self._generations = generations
        self._facts = facts
        self._profiles = profiles
        self.event_streams = events

    # --- generation ------------------------------------------------------------

    @rpc
    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # noqa: N802
        room = room_for_answer(len(request.tokenized.input_ids), self._scheduler.ranks[0])
        requests = decode_generate(request, room=room)
        interval = max(1, request.sampling_params.stream_interval) if request.stream else None
        name = RequestId(request.request_id)
        answers = [ChoiceAnswer(name, index, interval=interval) for index in range(len(requests))]
        async with aclosing(self._generations.choices(name, requests)) as news:
            async for choice in news:
                for message in answers[choice.index].feed(choice.delta):
                    await context.write(message)
                if choice.delta.finish is not None and choice.delta.finish.reason is FinishReason.ABORT:
                    reason = encode_reason(choice.delta.finish.message)
                    context.set_trailing_metadata(((ABORT_REASON_KEY, reason),))

    @rpc
    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:  # noqa: N802
        reason = request.reason or "aborted by the client"
        found = await self._generations.abort(RequestId(request.request_id), reason)
        message = "aborted" if found else f"no request {request.request_id!r} is alive here"
        return pb.AbortResponse(success=found, message=message)

    # --- what it is and how it does -------------------------------------------

    @rpc
    async def HealthCheck(  # noqa: N802
        self, request: pb.HealthCheckRequest, context: Context
    ) -> pb.HealthCheckResponse:
        failure = self._facts.failure
        return pb.HealthCheckResponse(healthy=failure is None, message="ok" if failure is None else str(failure))

    @rpc
    async def GetModelInfo(  # noqa: N802
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        facts = self._scheduler.ranks[0]
        return pb.GetModelInfoResponse(
            model_path=self._config.model_name,
            tokenizer_path=self._config.model_name,
            is_generation=True,
            weight_version="default",
            served_model_name=self._config.model_name,
            max_context_length=facts.max_context_tokens,
            vocab_size=facts.vocab_size,
            model_type="llama",
            eos_token_ids=facts.eos_token_ids,
            pad_token_id=facts.eos_token_ids[0] if facts.eos_token_ids else 0,
            max_req_input_len=min(facts.max_context_tokens, facts.capacity_tokens) - 1,
            architectures=["LlamaForCausalLM"],
        )

    @rpc
    async def GetServerInfo(  # noqa: N802
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        report = _heard(await self._scheduler.state())
        live = sum(answer.load.running + answer.load.waiting for answer in report.answers if answer.load is not None)
        answer = pb.GetServerInfoResponse(
            server_args=_struct(self._facts.server_args()),
            scheduler_info=_struct(self._facts.scheduler_info(report)),
            active_requests=live,
            uptime_seconds=self._facts.uptime_s(),
            sglang_version=f"kvherd-{__version__}",
            server_type="grpc",
            max_total_num_tokens=sum(rank.capacity_tokens for rank in self._scheduler.ranks),
        )
        answer.start_time.FromDatetime(self._facts.started)
        return answer

    @rpc
    async def GetLoads(self, request: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse:  # noqa: N802
        report = _heard(await self._scheduler.state())
        wanted = request.dp_rank if request.HasField("dp_rank") else None
        if wanted is not None and wanted not in [answer.rank for answer in report.answers]:
            raise FieldInvalid("dp_rank", f"is {wanted}; this engine has ranks 0 to {len(report.answers) - 1}")
        loads = [
            encode_load(answer.rank, answer.load)
            for answer in report.answers
            if answer.load is not None and wanted in (None, answer.rank)
        ]
        return pb.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=f"kvherd-{__version__}",
            dp_rank_count=len(report.answers),
            loads=loads,
            aggregate=_aggregate(loads),
        )

    @rpc
    async def GetTokenizer(  # noqa: N802
        self, request: common_pb2.GetTokenizerRequest, context: Context
    ) -> None:
        await hand_out(self._config.tokenizer_zip, context)

    # --- orders ----------------------------------------------------------------

    @rpc
    async def FlushCache(  # noqa: N802
        self, request: common_pb2.FlushCacheRequest, context: Context
    ) -> common_pb2.FlushCacheResponse:
        timeout_s = checked_timeout(request.timeout_s, self._config.order_timeout_limit_s)
        hold = dict(context.invocation_metadata() or ()).get(HOLD_KEY) == "1"
        report = await self._scheduler.flush(timeout_s=timeout_s, hold=hold)
        context.set_trailing_metadata(((RANKS_KEY, ranks_json(report)),))
        if report.silent or any(answer.timed_out for answer in report.answers):
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, message_of(report))
        return common_pb2.FlushCacheResponse(success=report.done, message=message_of(report))

    @rpc
    async def StartProfile(  # noqa: N802
        self, request: common_pb2.StartProfileRequest, context: Context
    ) -> common_pb2.ProfileResponse:
        return await _profiled(self._profiles.start(read_start_profile(request)))

    @rpc
    async def StopProfile(  # noqa: N802
        self, request: common_pb2.StopProfileRequest, context: Context
    ) -> common_pb2.ProfileResponse:
        return await _profiled(self._profiles.stop())

    # --- KV events ---------------------------------------------------------------

    @rpc
    async def SubscribeKvEvents(  # noqa: N802
        self, request: common_pb2.SubscribeKvEventsRequest, context: Context
    ) -> None:
        await self.event_streams.serve(request.start_sequence_number, context)


_UNSUPPORTED = {
    "Embed": "Embed (this engine generates text and makes no embeddings)",
    "LoadLoRAAdapter": "LoRA",
    "UnloadLoRAAdapter": "LoRA",
    "ListLoadedLoRAAdapters": "LoRA",
}


def _unsupported(what: str) -> Handler:
    """A handler that answers UNIMPLEMENTED and says so in words."""

    async def handler(service: SglangService, request: object, context: Context) -> None:
        await refuse(context, Unsupported(what))

    return handler


for _name, _what in _UNSUPPORTED.items():
    setattr(SglangService, _name, _unsupported(_what))


async def _profiled(order: Awaitable[ProfileDone]) -> common_pb2.ProfileResponse:
    """What the ranks refuse is an answer of this protocol; what they cannot do now is FAILED_PRECONDITION."""
    try:
        done = await order
    except OrderConflict:
        raise
    except OrderRefused as refused:
        return common_pb2.ProfileResponse(success=False, message=str(refused))
    return common_pb2.ProfileResponse(success=True, message="; ".join((done.message, *done.notes)))


def _heard(report: OrderReport) -> OrderReport:
    """Raises `OrderTimedOut` unless every rank answered."""
    if report.silent:
        raise OrderTimedOut(OrderId("state"), tuple(report.silent), 5.0)
    return report


def _aggregate(loads: list[pb.SchedulerLoad]) -> pb.AggregateMetrics:
    """Sums of what adds up, means of what does not."""
    count = max(1, len(loads))
    running = sum(load.num_running_reqs for load in loads)
    waiting = sum(load.num_waiting_reqs for load in loads)
    return pb.AggregateMetrics(
        total_running_reqs=running,
        total_waiting_reqs=waiting,
        total_reqs=running + waiting,
        avg_token_usage=sum(load.token_usage for load in loads) / count,
        avg_throughput=sum(load.gen_throughput for load in loads) / count,
        avg_utilization=sum(load.utilization for load in loads) / count,
    )


def _struct(values: dict[str, object]) -> struct_pb2.Struct:
    struct: struct_pb2.Struct = json_format.ParseDict(values, struct_pb2.Struct())
    return struct
