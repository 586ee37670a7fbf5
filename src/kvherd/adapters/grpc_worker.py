"""A worker that speaks an engine protocol on gRPC: SGLang's and vLLM's in full, of others what needs no tokens."""

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

import grpc
import msgspec
from smg_grpc_proto.generated import common_pb2

from kvherd.adapters.addresses import addresses_of
from kvherd.adapters.grpc_channel import connect, open_channel, rpc_errors
from kvherd.adapters.grpc_dialects import SGLANG, find_dialect
from kvherd.adapters.grpc_generations import GrpcGenerations, ModelTraits
from kvherd.adapters.grpc_sidecar import GrpcSidecar, beside
from kvherd.adapters.grpc_tokenizer import tokenizer_over
from kvherd.adapters.grpc_url import grpc_target
from kvherd.adapters.grpc_wires import GrpcWires
from kvherd.adapters.http_url import http_address
from kvherd.adapters.tls import ClientTls, trusting_this_machine
from kvherd.core.errors import (
    FieldInvalid,
    WorkerError,
    WorkerFailed,
    WorkerRefused,
    WorkerTimedOut,
    WorkerUnreachable,
    WorkerUnsupported,
)
from kvherd.core.ids import Rank, WorkerId
from kvherd.ports.worker import (
    SGLANG_HEALTH_S,
    Call,
    Flight,
    FlushAnswer,
    InDoubt,
    Landed,
    Opened,
    ProfileAnswer,
    RankOutcome,
    Responder,
    WorkerFacts,
    WorkerKind,
    WorkerLoad,
    not_held,
)
from kvherd.wire.sglang_pb import HOLD_KEY, IN_DOUBT_KEY, RANKS_KEY
from kvherd.wire.worker_pb import struct_values

_ranks = msgspec.json.Decoder(list[RankOutcome])


class GrpcWorker:
    """Implements `ports.worker.Worker`. `target` is `host:port`; by default it is read off the worker's URL.

    `forward` also raises a `CallerError`, before the answer has started, for a request that no worker would take.
    """

    def __init__(
        self,
        worker: WorkerId,
        target: str | None = None,
        *,
        api_key: str | None = None,
        tls: ClientTls | None = None,
    ) -> None:
        self._id = worker
        self._tls = tls
        self._channel = open_channel(target or worker, tls, api_key=api_key)
        self._target = target or worker
        self._wires = _wires(self._target, tls)
        self._sidecar = GrpcSidecar(worker, beside(self._target), tls)
        self._former_sidecars: list[GrpcSidecar] = []
        self._dialect = SGLANG
        self._generations: GrpcGenerations | None = None
        self._is_ours = False
        self._lacks = ""

    @property
    def id(self) -> WorkerId:
        return self._id

    async def detect(self) -> WorkerFacts:
        """Also fetches what generations need, so that the first request does not wait for it."""
        await self._look_where()
        facts, traits = await self._facts()
        if traits is not None:
            await self._prepare(traits)
        if self._wires is not None and (traits is not None or self._wires.secured):
            with contextlib.suppress(OSError):  # a request will say so, and be tried elsewhere
                await self._wires.warm()
        return facts

    async def _prepare(self, traits: ModelTraits) -> None:
        """A vLLM that was started with a model's name instead of its directory hands out no tokenizer: it serves all
        but generations then.
        """
        dialect = self._dialect.generate
        assert dialect is not None
        self._generations, self._lacks = None, ""
        try:
            tokenizer = await tokenizer_over(self._channel, self._id)
        except (WorkerUnreachable, WorkerTimedOut):
            raise
        except WorkerError as error:
            if self._dialect is SGLANG:
                raise
            self._lacks = str(error)
            return
        self._generations = GrpcGenerations(
            self._id, self._channel, tokenizer, traits, wires=self._wires, dialect=dialect
        )

    async def _look_where(self) -> None:
        """grpc looks names up by itself: what it would reach is looked at first."""
        host, _, port = grpc_target(self._target)[0].rpartition(":")
        if not port.isdigit():
            return
        try:
            await addresses_of(asyncio.get_running_loop(), host.strip("[]"), int(port))
        except OSError as error:
            raise WorkerUnreachable(self._id, str(error.strerror or error)) from None

    async def identify(self) -> WorkerFacts:
        """As `detect`, for those who generate nothing here."""
        return (await self._facts())[0]

    async def forward(self, call: Call, responder: Responder) -> None:
        if self._generations is None and self._dialect is SGLANG:
            await self.detect()
        if self._generations is None:
            why = self._lacks or f"it speaks {self._dialect.service}"
            raise WorkerUnsupported(self._id, f"generation for us; {why}")
        await self._generations.answer(call, responder)

    def launch(self, _call: Call, _responder: Responder, _landed: Landed) -> Flight | None:
        return None  # tokens are made into text, which a task waits for

    async def probe(self) -> None:
        if self._dialect.messages is None:
            return await connect(self._channel, self._id)
        with rpc_errors(self._id, "HealthCheck"):
            answer = await self._stub().HealthCheck(self._dialect.messages.HealthCheckRequest())
        if not answer.healthy:
            raise WorkerFailed(self._id, answer.message or "it says that it is not healthy")
        return None

    async def load(self) -> WorkerLoad:
        if self._dialect.messages is None:
            raise WorkerUnsupported(self._id, "GetLoads")
        with rpc_errors(self._id, "GetLoads"):
            answer = await self._stub().GetLoads(self._dialect.messages.GetLoadsRequest(include=["core"]))
        return WorkerLoad(
            running=sum(each.num_running_reqs for each in answer.loads),
            waiting=sum(each.num_waiting_reqs for each in answer.loads),
            used_tokens=sum(each.num_used_tokens for each in answer.loads),
            capacity_tokens=sum(each.max_total_num_tokens for each in answer.loads),
            ranks={
                Rank(each.dp_rank): WorkerLoad(
                    each.num_running_reqs, each.num_waiting_reqs, each.num_used_tokens, each.max_total_num_tokens
                )
                for each in answer.loads
            },
        )

    async def tokenize(self, body: bytes) -> list[int]:
        raise WorkerUnsupported(self._id, "telling its tokens: it is given tokens")

    async def flush(
        self, *, timeout_s: float, hold: bool = False, opened: Opened | None = None, in_doubt: InDoubt | None = None
    ) -> FlushAnswer:
        """kvherd's own engine takes back the order of a caller who left, and tells its clear at once; of no other is
        that known.
        """
        if self._dialect.stub is None:
            raise WorkerUnsupported(self._id, "flushing its cache")
        await connect(self._channel, self._id)
        metadata = ((HOLD_KEY, "1"),) if hold else ()
        with rpc_errors(self._id, "flushing its cache", after_s=timeout_s):
            order = self._stub().FlushCache(common_pb2.FlushCacheRequest(timeout_s=timeout_s), metadata=metadata)
            try:
                await asyncio.sleep(0)  # the call goes out; grpc tells of nothing between that and the answer
                if opened is not None:
                    opened()
                if in_doubt is not None and not self._is_ours:
                    in_doubt(True)
                answer = await order
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise
                # the engine's own word that its wait is over, with what it waited for; our own deadline is no status
                trailers = error.trailing_metadata()
                if any(key == IN_DOUBT_KEY for key, _ in trailers):
                    raise WorkerTimedOut(self._id, timeout_s) from None
                ranks = _rank_outcomes(trailers)
                return FlushAnswer(False, error.details() or "its wait is over", ranks, timed_out=True)
            else:
                trailers = await order.trailing_metadata()
            finally:
                order.cancel()
        flushed = FlushAnswer(answer.success, answer.message, _rank_outcomes(trailers))
        return not_held(flushed) if hold and not self._is_ours else flushed

    async def start_profile(self, fields: Mapping[str, object]) -> ProfileAnswer:
        """Over the sidecar, which takes every field; without one over gRPC, which has a few of them."""
        try:
            return await self._sidecar.start_profile(fields)
        except WorkerUnreachable:
            order = _start_profile(fields, f"{self._sidecar.address.authority} (its sidecar) does not answer")
        return await self._profile("StartProfile", order)

    async def stop_profile(self) -> ProfileAnswer:
        try:
            return await self._sidecar.stop_profile()
        except WorkerUnreachable:
            return await self._profile("StopProfile", common_pb2.StopProfileRequest())

    async def metrics(self) -> bytes:
        try:
            return await self._sidecar.metrics()
        except WorkerUnreachable:
            where = self._sidecar.address.authority
            raise WorkerUnsupported(self._id, f"metrics (no sidecar answers at {where})") from None

    async def _profile(
        self, call: str, order: common_pb2.StartProfileRequest | common_pb2.StopProfileRequest
    ) -> ProfileAnswer:
        if self._dialect.stub is None:
            raise WorkerUnsupported(self._id, "profiling")
        await connect(self._channel, self._id)
        with rpc_errors(self._id, call):
            answer = await getattr(self._stub(), call)(order)
        if not answer.success:
            raise WorkerRefused(self._id, answer.message or f"{call} was not obeyed")
        return ProfileAnswer(answer.message)

    def place_sidecar(self, url: str | None) -> None:
        address = http_address(url) if url else beside(self._target)
        if address != self._sidecar.address:
            self._former_sidecars.append(self._sidecar)  # an order may be under way there
            self._sidecar = GrpcSidecar(self._id, address, self._tls)

    async def close(self) -> None:
        if self._wires is not None:
            self._wires.close()
        async with contextlib.AsyncExitStack() as closing:
            closing.push_async_callback(self._channel.close)
            for sidecar in (*self._former_sidecars, self._sidecar):
                closing.push_async_callback(sidecar.close)

    # --- what it is -----------------------------------------------------------------------------------------

    def _stub(self) -> Any:  # noqa: ANN401 - generated stubs have no types
        assert self._dialect.stub is not None
        return self._dialect.stub(self._channel)

    async def _facts(self) -> tuple[WorkerFacts, ModelTraits | None]:
        """`ModelTraits` only of an engine that we can generate with."""
        try:
            self._dialect = SGLANG
            return await self._sglang_facts()
        except WorkerUnsupported:
            self._dialect = await find_dialect(self._channel, self._id)
            return await self._foreign_facts()

    async def _sglang_facts(self) -> tuple[WorkerFacts, ModelTraits]:
        stub, messages = self._stub(), SGLANG.messages
        assert messages is not None
        with rpc_errors(self._id, "GetModelInfo"):
            model = await stub.GetModelInfo(messages.GetModelInfoRequest())
            server = await stub.GetServerInfo(messages.GetServerInfoRequest())
        if not model.is_generation:
            raise WorkerRefused(self._id, "its model does not generate text")
        args, is_ours = struct_values(server.server_args), server.sglang_version.startswith("kvherd-")
        ranks = _whole(args, "dp_size") or 1
        facts = WorkerFacts(
            kind=WorkerKind.SGLANG_GRPC,
            models=(model.served_model_name or model.model_path,),
            block_size=_whole(args, "page_size"),
            ranks=ranks,
            max_context_tokens=model.max_context_length,
            capacity_tokens=server.max_total_num_tokens,
            # Of SGLang's option each rank takes its part; our engine says what one rank has.
            max_running=_whole(args, "max_running_requests") * (ranks if is_ours else 1),
            events_url=self._id,
            version=server.sglang_version,
            addressable=True,
            health_s=0.0 if is_ours else SGLANG_HEALTH_S,
        )
        self._is_ours = is_ours
        traits = ModelTraits(
            name=facts.models[0],
            max_context_tokens=facts.max_context_tokens,
            vocab_size=model.vocab_size,
            eos_token_ids=tuple(model.eos_token_ids),
            takes_custom_params=is_ours,
        )
        return facts, traits

    async def _foreign_facts(self) -> tuple[WorkerFacts, ModelTraits | None]:
        dialect = self._dialect
        if dialect.messages is None:
            return WorkerFacts(dialect.kind, models=()), None
        with rpc_errors(self._id, "GetModelInfo"):
            model = await self._stub().GetModelInfo(dialect.messages.GetModelInfoRequest())
            server = await self._stub().GetServerInfo(dialect.messages.GetServerInfoRequest())
        facts = WorkerFacts(
            kind=dialect.kind,
            models=(model.served_model_name or model.model_path,),
            block_size=server.block_size,
            ranks=server.data_parallel_size or 1,
            max_context_tokens=model.max_context_length,
            max_running=server.max_num_seqs * (server.data_parallel_size or 1),
            events_url=self._id,
            addressable=True,
        )
        if dialect.generate is None or not model.is_generation:
            return facts, None
        return facts, ModelTraits(
            name=facts.models[0],
            max_context_tokens=facts.max_context_tokens,
            vocab_size=model.vocab_size,
            eos_token_ids=tuple(model.eos_token_ids),
            takes_custom_params=False,
        )


def _wires(target: str, tls: ClientTls | None) -> GrpcWires | None:
    """Connections for generations; none to what is no host and port, where grpc's own channel serves."""
    address, secured = grpc_target(target)
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return None
    return GrpcWires(host.strip("[]"), int(port), tls=(tls or trusting_this_machine()) if secured else None)


def _start_profile(fields: Mapping[str, object], why: str) -> common_pb2.StartProfileRequest:
    """Raises `FieldInvalid` for a field that the protocol does not have."""
    known = common_pb2.StartProfileRequest.DESCRIPTOR.fields_by_name
    for name in fields:
        if name not in known:
            raise FieldInvalid(name, f"does not reach this worker: gRPC has no such field, and {why}")
    return common_pb2.StartProfileRequest(**fields)


def _whole(values: Mapping[str, Any], name: str) -> int:
    """Numbers in a `Struct` are doubles; what is absent or no number counts as unknown."""
    value = values.get(name)
    return int(value) if isinstance(value, int | float) else 0


def _rank_outcomes(trailers: Iterable[tuple[str, str | bytes]] | None) -> tuple[RankOutcome, ...]:
    """What the protocol has no field for, from engines that tell it."""
    for key, value in trailers or ():
        if key == RANKS_KEY:
            try:
                return tuple(_ranks.decode(value))
            except msgspec.MsgspecError:
                return ()
    return ()
