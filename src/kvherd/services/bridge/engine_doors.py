"""The field's two engine protocols in front of one stock engine: its KV events, and what it can be asked over HTTP."""

import asyncio
import math
from collections.abc import Awaitable
from types import ModuleType
from typing import Any, ClassVar, TypeAlias, TypeVar

import grpc
from google.protobuf import json_format
from smg_grpc_proto.generated import (
    common_pb2,
    sglang_scheduler_pb2,
    sglang_scheduler_pb2_grpc,
    vllm_engine_pb2,
    vllm_engine_pb2_grpc,
)

from kvherd import __version__
from kvherd.core.errors import FieldInvalid, Unsupported, WorkerError, WorkerTimedOut
from kvherd.core.ids import Rank
from kvherd.ports.kv_stream import KvEventDoor
from kvherd.ports.worker import SGLANG_HEALTH_S, Worker
from kvherd.services.bridge import engine_answers
from kvherd.services.bridge.flushes import Flushes
from kvherd.services.kv_relay.grpc_edge import Context, Handler, hand_out, rpc
from kvherd.wire.sglang_pb import HOLD_KEY, IN_DOUBT_KEY, RANKS_KEY

Message: TypeAlias = Any
"""A message of either protocol: generated, untyped."""

T = TypeVar("T")

ANSWER_S = 5.0
"""How long the engine may take to answer, beside what it may wait until it is idle."""
HEALTH_S = SGLANG_HEALTH_S + 1.0
"""How long it may take to say whether it is well."""
LONGEST_FLUSH_S = 3600.0
PROFILE_S = 600.0
"""How long the engine may take to begin or to end a profile: traces are large."""


class _Door:
    """The calls that mean the same in both protocols; all that is not here is UNIMPLEMENTED, with a sentence."""

    pb: ClassVar[ModuleType]

    def __init__(
        self, engine: Worker, events: KvEventDoor, flushes: Flushes, *, tokenizer_zip: bytes | None = None
    ) -> None:
        self._engine = engine
        self._events = events
        self._flushes = flushes
        self._tokenizer_zip = tokenizer_zip

    @rpc
    async def SubscribeKvEvents(  # noqa: N802 - the protocol names it
        self, request: common_pb2.SubscribeKvEventsRequest, context: Context
    ) -> None:
        await self._events.serve(request.start_sequence_number, context)

    @rpc
    async def FlushCache(  # noqa: N802 - the protocol names it
        self, request: common_pb2.FlushCacheRequest, context: Context
    ) -> common_pb2.FlushCacheResponse:
        """Success is the engine's own word for it; no answer in time is none."""
        timeout_s = _flush_timeout(request.timeout_s)
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        hold = dict(context.invocation_metadata() or ()).get(HOLD_KEY) == "1"
        try:
            answer = await self._flushes.flush(timeout_s=timeout_s, hold=hold, within_s=timeout_s + ANSWER_S)
        except WorkerTimedOut:
            context.set_trailing_metadata(((IN_DOUBT_KEY, "1"),))
            raise
        if answer.ranks:
            context.set_trailing_metadata(((RANKS_KEY, engine_answers.ranks_json(answer.ranks)),))
        if not answer.done and 0 < timeout_s <= loop.time() - asked_s:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, answer.message)
        return common_pb2.FlushCacheResponse(success=answer.done, message=answer.message)

    @rpc
    async def HealthCheck(self, request: Message, context: Context) -> Message:  # noqa: N802 - the protocol names it
        """The engine's health, not the bridge's: that is `grpc.health.v1`."""
        try:
            await self._asked(self._engine.probe(), within_s=HEALTH_S)
        except WorkerError as error:
            return self.pb.HealthCheckResponse(healthy=False, message=str(error))
        return self.pb.HealthCheckResponse(healthy=True, message="ok")

    @rpc
    async def GetModelInfo(self, request: Message, context: Context) -> Message:  # noqa: N802 - the protocol names it
        return engine_answers.model_info(self.pb, await self._asked(self._engine.detect()))

    @rpc
    async def GetLoads(self, request: Message, context: Context) -> Message:  # noqa: N802 - the protocol names it
        load = await self._asked(self._engine.load())
        rank = Rank(request.dp_rank) if request.HasField("dp_rank") else None
        return engine_answers.loads(self.pb, load, f"kvherd-bridge-{__version__}", rank=rank)

    @rpc
    async def GetTokenizer(  # noqa: N802 - the protocol names it
        self, request: common_pb2.GetTokenizerRequest, context: Context
    ) -> None:
        """What the operator named: an engine on HTTP hands out none."""
        data = self._tokenizer_zip
        if data is None:
            raise Unsupported("GetTokenizer (the bridge was started without --tokenizer)")
        await hand_out(data, context)

    @rpc
    async def StartProfile(  # noqa: N802 - the protocol names it
        self, request: common_pb2.StartProfileRequest, context: Context
    ) -> common_pb2.ProfileResponse:
        fields = json_format.MessageToDict(request, preserving_proto_field_name=True)
        answer = await self._asked(self._engine.start_profile(fields), within_s=PROFILE_S)
        return common_pb2.ProfileResponse(success=True, message=answer.message)

    @rpc
    async def StopProfile(  # noqa: N802 - the protocol names it
        self, request: common_pb2.StopProfileRequest, context: Context
    ) -> common_pb2.ProfileResponse:
        answer = await self._asked(self._engine.stop_profile(), within_s=PROFILE_S)
        return common_pb2.ProfileResponse(success=True, message=answer.message)

    async def _asked(self, answer: Awaitable[T], *, within_s: float = ANSWER_S) -> T:
        try:
            async with asyncio.timeout(within_s):
                return await answer
        except TimeoutError:
            raise WorkerTimedOut(self._engine.id, within_s) from None


class SglangDoor(_Door, sglang_scheduler_pb2_grpc.SglangSchedulerServicer):  # type: ignore[misc] # generated, untyped
    """`sglang.grpc.scheduler.SglangScheduler`."""

    pb = sglang_scheduler_pb2

    @rpc
    async def GetServerInfo(self, request: Message, context: Context) -> Message:  # noqa: N802 - the protocol names it
        return engine_answers.sglang_server_info(self.pb, await self._asked(self._engine.detect()))


class VllmDoor(_Door, vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc] # generated, untyped
    """`vllm.grpc.engine.VllmEngine`."""

    pb = vllm_engine_pb2

    @rpc
    async def GetServerInfo(self, request: Message, context: Context) -> Message:  # noqa: N802 - the protocol names it
        return engine_answers.vllm_server_info(self.pb, await self._asked(self._engine.detect()))


SGLANG_SERVICE = sglang_scheduler_pb2.DESCRIPTOR.services_by_name["SglangScheduler"]
VLLM_SERVICE = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"]


def _unsupported(call: str) -> Handler:
    @rpc
    async def handler(door: _Door, request: object, context: Context) -> None:
        raise Unsupported(f"{call} (a bridge passes on KV events, flushes, profiles, health and load)")

    return handler


for _door, _service in ((SglangDoor, SGLANG_SERVICE), (VllmDoor, VLLM_SERVICE)):
    for _method in _service.methods:
        if _method.name not in vars(_Door) and _method.name not in vars(_door):
            setattr(_door, _method.name, _unsupported(_method.name))


def _flush_timeout(timeout_s: float) -> float:
    if not math.isfinite(timeout_s) or not 0 <= timeout_s <= LONGEST_FLUSH_S:
        raise FieldInvalid("timeout_s", f"is {timeout_s:g}; it must be 0 to {LONGEST_FLUSH_S:g} seconds")
    return timeout_s
