"""A client of an engine's gRPC and sidecar, made of their wire formats: it does not know how an engine is made."""

import hashlib
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc
import httpx
import pytest
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb
from smg_grpc_proto.generated.sglang_scheduler_pb2_grpc import SglangSchedulerStub

from kvherd.testing.processes import wait_until

EMPTY = common_pb2.StopProfileRequest()


@dataclass(frozen=True, slots=True)
class Address:
    """Where an engine is, and how much may be asked of it: what `EngineClient` has to know.

    `sidecar_port` None: it has none. `long_tokens` is an answer that fits, and takes it longer than any test.
    `patience_s` is for anything that it does at once, on a machine that has other things to do.
    """

    host: str
    port: int
    sidecar_port: int | None
    ranks: int = 1
    long_tokens: int = 50_000
    patience_s: float = 20.0


@dataclass(frozen=True, slots=True)
class Answered:
    """What became of a call: its status, what it answered if that is OK, and the status's words if it is not."""

    code: grpc.StatusCode
    answer: Any
    details: str
    trailers: dict[str, Any]


class EngineClient:
    """A context manager. Calls have a deadline of `patience_s`, over what the call itself may take."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.patience_s = address.patience_s
        self.channel = grpc.insecure_channel(
            f"{address.host}:{address.port}", options=[("grpc.use_local_subchannel_pool", 1)]
        )
        self.stub: Any = SglangSchedulerStub(self.channel)
        self.http = httpx.Client(base_url=self.sidecar_url, timeout=self.patience_s, verify=False, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.http.close()
        self.channel.close()

    # --- any call -----------------------------------------------------------------------------------

    def call(self, name: str, request: object, *, within_s: float | None = None) -> Answered:
        """Make a call with one answer."""
        try:
            answer, call = getattr(self.stub, name).with_call(request, timeout=within_s or self.patience_s)
        except grpc.RpcError as error:
            failed: Any = error
            return Answered(failed.code(), None, failed.details() or "", _told(failed.trailing_metadata()))
        return Answered(call.code(), answer, "", _told(call.trailing_metadata()))

    # --- generating -----------------------------------------------------------------------------------

    def generate(
        self,
        prompt: Sequence[int],
        *,
        tokens: int = 4,
        name: str = "",
        stream: bool = False,
        rank: int | None = None,
        within_s: float | None = None,
    ) -> Any:  # noqa: ANN401 - grpc has no types
        """The call, as gRPC has it: an iterator of messages."""
        request = pb.GenerateRequest(
            request_id=name or uuid.uuid4().hex,
            tokenized=pb.TokenizedInput(input_ids=prompt),
            sampling_params=pb.SamplingParams(temperature=0, max_new_tokens=tokens, ignore_eos=True),
            stream=stream,
        )
        if rank is not None and self.address.ranks > 1:
            request.data_parallel_rank = rank
        return self.stub.Generate(request, timeout=within_s or 3 * self.patience_s)

    def complete(self, prompt: Sequence[int], *, tokens: int = 4, rank: int | None = None) -> pb.GenerateComplete:
        *_, last = self.generate(prompt, tokens=tokens, rank=rank)
        return last.complete

    @contextmanager
    def running(self, *, rank: int | None = None, name: str = "", tokens: int | None = None) -> Iterator[Any]:
        """A long answer that has begun, as its call; it is cancelled in the end, and the engine idle."""
        length = tokens or self.address.long_tokens
        call = self.generate(fresh_prompt(), tokens=length, name=name, stream=True, rank=rank)
        try:
            next(call)
            yield call
        finally:
            call.cancel()
            self.until_idle()

    @contextmanager
    def busy(self, *ranks: int) -> Iterator[None]:
        """These ranks, or all, always have something to run: two long answers each, that never end together."""
        done = threading.Event()
        calls: dict[tuple[int, int], Any] = {}
        half = self.address.long_tokens // 2
        wanted = [(rank, half * part) for rank in ranks or range(self.address.ranks) for part in (1, 2)]

        def ask(rank: int, first: int) -> None:
            tokens = first
            while not done.is_set():
                calls[rank, first] = call = self.generate(fresh_prompt(), tokens=tokens, rank=rank)
                with suppress(grpc.RpcError):  # cancelled, when this is left
                    list(call)
                tokens = 2 * half

        with ThreadPoolExecutor(len(wanted)) as pool:
            asking: list[Future[None]] = [pool.submit(ask, *each) for each in wanted]
            try:
                self.until(lambda: self.requests() == len(wanted), "it is busy")
                yield
            finally:
                done.set()

                def ended() -> bool:
                    for call in list(calls.values()):
                        call.cancel()
                    return all(each.done() for each in asking)

                self.until(ended, "the requests have ended")
        self.until_idle()

    # --- what it says of itself -----------------------------------------------------------------------------------

    def loads(self) -> list[pb.SchedulerLoad]:
        return list(self.stub.GetLoads(pb.GetLoadsRequest(), timeout=self.patience_s).loads)

    def requests(self, rank: int | None = None) -> int:
        """How many it runs or has queued."""
        loads = [load for load in self.loads() if rank in (None, load.dp_rank)]
        return sum(load.num_running_reqs + load.num_waiting_reqs for load in loads)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        wait_until(condition, within_s=self.patience_s, what=what)

    def until_idle(self) -> None:
        self.until(lambda: self.requests() == 0, "the engine runs nothing")

    # --- orders -----------------------------------------------------------------------------------

    def flush(self, timeout_s: float) -> Answered:
        waits_s = timeout_s if 0 < timeout_s < 3600 else 0
        return self.call(
            "FlushCache", common_pb2.FlushCacheRequest(timeout_s=timeout_s), within_s=waits_s + self.patience_s
        )

    def start_profile(self, **fields: object) -> Answered:
        return self.call("StartProfile", common_pb2.StartProfileRequest(**fields))

    def stop_profile(self) -> Answered:
        return self.call("StopProfile", EMPTY)

    # --- the sidecar -----------------------------------------------------------------------------------

    @property
    def sidecar_url(self) -> str:
        return f"http://{self.address.host}:{self.address.sidecar_port or 0}"

    def get(self, path: str) -> httpx.Response:
        return self.http.get(path)

    def post(self, path: str, body: object = None, *, content: bytes | None = None) -> httpx.Response:
        """With no body at all if there is neither `body`, as JSON, nor `content`."""
        if content is not None:
            return self.http.post(path, content=content, headers={"content-type": "application/json"})
        return self.http.post(path, json=body)

    def until_under_way(self, orders: int) -> None:
        """So many orders have been given to the ranks, as far as the engine tells that; else most likely."""
        if not self._orders_open():
            time.sleep(1.0)
            return
        self.until(lambda: self._orders_open() == [float(orders)], f"{orders} orders are under way")

    def _orders_open(self) -> list[float]:
        """The metric, or nothing where there is none."""
        if self.address.sidecar_port is None:
            return []
        lines = self.get("/metrics").text.splitlines()
        return [float(line.rpartition(" ")[2]) for line in lines if line.startswith("kvherd_orders_open{")]


@contextmanager
def refused(code: str, *words: str) -> Iterator[None]:
    """What is done inside ends with this status, whose words have these."""
    with pytest.raises(grpc.RpcError) as caught:
        yield
    error: Any = caught.value
    assert error.code() is grpc.StatusCode[code], error.details()
    for word in words:
        assert word in error.details()


def fresh_prompt(tokens: int = 97) -> list[int]:
    """A prompt that nobody sent before."""
    seed = uuid.uuid4().bytes
    pieces = (hashlib.sha256(seed + index.to_bytes(4)).digest() for index in range(tokens // 32 + 1))
    return list(b"".join(pieces))[:tokens]


def _told(metadata: Iterable[tuple[str, Any]] | None) -> dict[str, Any]:
    return dict(metadata or ())
