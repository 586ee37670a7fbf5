"""A client made of `smg-grpc-proto` alone drives a real bridge before a real engine; kvherd starts the processes."""

import json
import signal
import threading
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2, sglang_scheduler_pb2, vllm_engine_pb2
from smg_grpc_proto.generated.sglang_scheduler_pb2_grpc import SglangSchedulerStub
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from kvherd.testing.herds import BridgeProcess, EngineProcess, begin_bridge, begin_engine
from kvherd.testing.processes import KvherdProcess, wait_until

pytestmark = pytest.mark.engine
DEADLINE_S = 20.0
PROTOCOLS = {"sglang": (sglang_scheduler_pb2, SglangSchedulerStub), "vllm": (vllm_engine_pb2, VllmEngineStub)}
FROM_ZERO = common_pb2.SubscribeKvEventsRequest()


class Pair:
    """An engine, a bridge before its HTTP door, and stubs of both protocols on the bridge."""

    def __init__(self, stack: ExitStack, *options: str, ranks: int = 1) -> None:
        self.stack = stack
        self.options = options
        self.engine: EngineProcess = begin_engine(self.start, *options)
        words = (*self.engine.events, "--ranks", str(ranks))
        self.bridge: BridgeProcess = begin_bridge(self.start, self.engine.url, *words)
        channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{self.bridge.port}"))
        self.sglang, self.vllm = SglangSchedulerStub(channel), VllmEngineStub(channel)
        self.open_engine()

    def start(self, *words: str) -> KvherdProcess:
        return self.stack.enter_context(KvherdProcess(*words))

    def open_engine(self) -> None:
        channel = self.stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{self.engine.port}"))
        self.generator = SglangSchedulerStub(channel)

    def store(self, tokens: int, *, rank: int | None = None) -> list[int]:
        """Let the engine compute a prompt that nobody sent before; its tokens."""
        prompt = list((uuid.uuid4().bytes * (tokens // 16 + 1))[:tokens])
        request = sglang_scheduler_pb2.GenerateRequest(
            request_id=uuid.uuid4().hex,
            tokenized=sglang_scheduler_pb2.TokenizedInput(input_ids=prompt),
            sampling_params=sglang_scheduler_pb2.SamplingParams(temperature=0, max_new_tokens=1, ignore_eos=True),
        )
        if rank is not None:
            request.data_parallel_rank = rank
        list(self.generator.Generate(request, timeout=DEADLINE_S))
        return prompt

    def subscribe(self, start: int = 0, *, cursors: str | None = None, stub: Any = None) -> Any:
        request = common_pb2.SubscribeKvEventsRequest(start_sequence_number=start)
        metadata = (("kvherd-cursors", cursors),) if cursors else ()
        return (stub or self.sglang).SubscribeKvEvents(request, timeout=DEADLINE_S, metadata=metadata)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """Blocks of one token, so that a few thousand of them fill several messages."""
    with ExitStack() as stack:
        yield Pair(stack, "--block-size", "1")


def tokens_until(events: Any, wanted: int) -> tuple[list[int], list[Any]]:
    """Read until so many tokens are stored: the tokens and the messages."""
    tokens: list[int] = []
    messages = []
    while len(tokens) < wanted:
        message = next(events)
        messages.append(message)
        for event in message.events:
            if event.WhichOneof("data") == "cleared":
                tokens.clear()
            tokens += [token for block in event.stored.blocks for token in block.token_ids]
    return tokens, messages


def epoch_of(events: Any) -> str:
    return str(dict(events.initial_metadata())["kvherd-epoch"])


@contextmanager
def refused(code: str, *words: str) -> Iterator[Any]:
    with pytest.raises(grpc.RpcError) as caught:
        yield caught
    error: Any = caught.value
    assert error.code() is grpc.StatusCode[code], error.details()
    for word in words:
        assert word in error.details()


# --- KV events -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", list(PROTOCOLS))
def test_all_that_is_held_comes_first_and_then_what_happens(pair: Pair, protocol: str) -> None:
    assert pair.sglang.FlushCache(common_pb2.FlushCacheRequest(timeout_s=5), timeout=DEADLINE_S).success
    held = pair.store(40)
    wait_until(lambda: held_by(pair) >= 40, within_s=10, what="the bridge knows the prompt")
    events = pair.subscribe(stub=getattr(pair, protocol))
    assert len(epoch_of(events)) == 32
    tokens, [first, *_] = tokens_until(events, 40)
    assert tokens[:40] == held
    assert first.HasField("snapshot")
    new = pair.store(24)
    tokens, [message, *_] = tokens_until(events, 24)
    assert tokens[:24] == new
    assert not message.HasField("snapshot")
    events.cancel()


def held_by(pair: Pair) -> int:
    """How many tokens a snapshot tells."""
    events = pair.subscribe()
    chunks = snapshot(events)
    events.cancel()
    return sum(len(block.token_ids) for chunk in chunks for event in chunk.events for block in event.stored.blocks)


def snapshot(events: Any) -> list[Any]:
    first = next(events)
    return [first, *(next(events) for _ in range(first.snapshot.count - 1))]


def test_a_bare_number_goes_on_after_the_batch_that_it_names(pair: Pair) -> None:
    events = pair.subscribe()
    snapshot(events)
    pair.store(16)
    _, messages = tokens_until(events, 16)
    events.cancel()
    last = messages[-1].sequence_number
    new = pair.store(16)
    events = pair.subscribe(last)
    tokens, [message, *_] = tokens_until(events, 16)
    events.cancel()
    assert tokens[:16] == new
    assert message.sequence_number == last + 1
    assert not message.HasField("snapshot")


def test_a_number_that_names_nothing_here_is_refused_before_any_header(pair: Pair) -> None:
    events = pair.subscribe()
    epoch, last = epoch_of(events), next(events).sequence_number
    events.cancel()
    for number in (last + 1000, 7):
        call = pair.subscribe(number)
        with refused("OUT_OF_RANGE", "subscribe from zero"):
            next(call)
        assert not call.initial_metadata()
        assert dict(call.trailing_metadata())["kvherd-epoch"] == epoch


def test_a_flush_is_told_in_the_stream_before_it_is_answered(pair: Pair) -> None:
    events = pair.subscribe()
    snapshot(events)
    pair.store(16)
    tokens_until(events, 16)
    answer = pair.vllm.FlushCache(common_pb2.FlushCacheRequest(timeout_s=5), timeout=DEADLINE_S)
    assert answer.success, answer.message
    assert held_by(pair) == 0
    while not [event for event in next(events).events if event.WhichOneof("data") == "cleared"]:
        pass
    new = pair.store(16)
    tokens, _ = tokens_until(events, 16)
    assert tokens[:16] == new
    events.cancel()


def test_a_large_state_comes_in_chunks_that_number_on_into_the_stream(pair: Pair) -> None:
    for _ in range(6):
        pair.store(1900)
    wait_until(lambda: held_by(pair) >= 6 * 1900, within_s=20, what="the bridge knows them all")
    events = pair.subscribe()
    chunks = snapshot(events)
    total = len(chunks)
    assert total > 1
    pair.store(16)
    chunks.append(next(events))
    events.cancel()
    assert [chunk.snapshot.index for chunk in chunks[:-1]] == list(range(total))
    numbers = [chunk.sequence_number for chunk in chunks]
    assert numbers == list(range(numbers[0], numbers[0] + total + 1))
    assert all(chunk.ByteSize() < 4 << 20 for chunk in chunks)


def is_accepted(pair: Pair) -> bool:
    call = pair.subscribe()
    told = "kvherd-epoch" in dict(call.initial_metadata())
    call.cancel()
    return told


def test_an_engine_that_is_killed_and_started_again_is_data_loss_and_then_a_fresh_snapshot(pair: Pair) -> None:
    pair.store(16)
    events = pair.subscribe()
    epoch, last = epoch_of(events), next(events).sequence_number
    pair.engine.process.signal(signal.SIGKILL)
    pair.engine.process.wait(within_s=5)
    wait_until(lambda: not pair.engine.process.family(), within_s=5, what="its scheduler ended too")
    sick = pair.sglang.HealthCheck(sglang_scheduler_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
    assert (sick.healthy, "cannot be reached" in sick.message) == (False, True)
    with refused("UNAVAILABLE", pair.engine.url):
        pair.sglang.FlushCache(common_pb2.FlushCacheRequest(), timeout=DEADLINE_S)
    pair.engine = begin_engine(pair.start, *pair.options, port=pair.engine.port)
    pair.open_engine()
    with refused("DATA_LOSS", "subscribe from zero"):
        list(events)
    wait_until(lambda: is_accepted(pair), within_s=10, what="the bridge has heard of the engine's new life")
    with refused("OUT_OF_RANGE"):
        next(pair.subscribe(last))
    fresh = pair.subscribe()
    assert epoch_of(fresh) != epoch
    assert [event.WhichOneof("data") for event in next(fresh).events] == ["cleared"]
    new = pair.store(16)
    try:
        assert tokens_until(fresh, 16)[0][:16] == new
    except grpc.RpcError as error:
        error.add_note(f"the bridge said:\n{pair.bridge.process.said}\nthe engine:\n{pair.engine.process.said}")
        raise
    fresh.cancel()


def test_two_ranks_come_in_one_stream_and_resume_by_a_cursor_each() -> None:
    with ExitStack() as stack:
        pair = Pair(stack, "--dp-size", "2", ranks=2)
        events = pair.subscribe()
        epoch = epoch_of(events)
        for rank in (0, 1):
            pair.store(32, rank=rank)
        last: dict[int, int] = {}
        stored: set[int] = set()
        while stored < {0, 1}:
            message = next(events)
            last[message.dp_rank] = message.sequence_number
            stored |= {message.dp_rank for event in message.events if event.WhichOneof("data") == "stored"}
        events.cancel()
        with refused("OUT_OF_RANGE", "several ranks"):
            next(pair.subscribe(last[0]))
        pair.store(32, rank=1)
        events = pair.subscribe(cursors=f"0={last[0]},1={last[1]}")
        assert epoch_of(events) == epoch
        message = next(events)
        assert (message.dp_rank, message.sequence_number) == (1, last[1] + 1)
        events.cancel()


# --- what passes through -------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", list(PROTOCOLS))
def test_health_model_server_and_loads_are_the_engine_s(pair: Pair, protocol: str) -> None:
    pb, _ = PROTOCOLS[protocol]
    stub = getattr(pair, protocol)
    assert stub.HealthCheck(pb.HealthCheckRequest(), timeout=DEADLINE_S).healthy
    model = stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=DEADLINE_S)
    assert (model.served_model_name, model.max_context_length, model.is_generation) == ("tiny", 2048, True)
    server = stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=DEADLINE_S)
    assert server.server_type == "http"
    loads = stub.GetLoads(pb.GetLoadsRequest(), timeout=DEADLINE_S)
    assert [load.num_running_reqs for load in loads.loads] == [0]
    assert loads.loads[0].max_total_num_tokens > 0


@pytest.mark.parametrize("protocol", list(PROTOCOLS))
def test_every_other_method_is_unimplemented_in_words(pair: Pair, protocol: str) -> None:
    driven = {"SubscribeKvEvents", "FlushCache", "HealthCheck", "GetModelInfo", "GetServerInfo", "GetLoads"}
    driven |= {"StartProfile", "StopProfile"}
    pb, _ = PROTOCOLS[protocol]
    [service] = pb.DESCRIPTOR.services_by_name.values()
    assert driven <= set(service.methods_by_name)
    for name in sorted(set(service.methods_by_name) - driven):
        request = getattr(pb, f"{name}Request", None) or getattr(common_pb2, f"{name}Request")
        with refused("UNIMPLEMENTED", "not supported"):
            answer = getattr(getattr(pair, protocol), name)(request(), timeout=DEADLINE_S)
            list(answer)


# --- profiles ------------------------------------------------------------------------------------------------


class FakeSglang(BaseHTTPRequestHandler):
    """A stock SGLang as far as profiles go; `profiles` are the bodies of those that were begun."""

    profiles: list[dict[str, Any]]

    def do_GET(self) -> None:
        match self.path:
            case "/v1/models":
                self._answer(200, {"data": [{"id": "m"}]})
            case "/server_info":
                self._answer(200, {"internal_states": [{}], "version": "0.5.23"})
            case _:
                self._answer(404, {})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        match self.path:
            case "/start_profile" if self.profiles:
                self._answer(400, {"error": {"message": "Profiling is already in progress."}})
            case "/start_profile":
                self.profiles.append(json.loads(body or b"{}"))
                self._answer(200, "Start profiling.")
            case "/stop_profile":
                self.profiles.clear()
                self._answer(200, "Stop profiling.")
            case _:
                self._answer(404, {})

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server names it
        return

    def _answer(self, status: int, document: object) -> None:
        body = document.encode() if isinstance(document, str) else json.dumps(document).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def test_a_profile_passes_with_its_fields_and_a_refusal_with_its_words() -> None:
    handler = type("Handler", (FakeSglang,), {"profiles": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, ExitStack() as stack:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        stack.callback(server.shutdown)
        url = f"http://127.0.0.1:{server.server_port}"
        bridge = begin_bridge(lambda *words: stack.enter_context(KvherdProcess(*words)), url)
        stub = SglangSchedulerStub(stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{bridge.port}")))
        request = common_pb2.StartProfileRequest(output_dir="/t", num_steps=5, activities=["CPU"], with_stack=False)
        begun = stub.StartProfile(request, timeout=DEADLINE_S)
        assert (begun.success, begun.message) == (True, "Start profiling.")
        assert handler.profiles == [  # type: ignore[attr-defined] # of the class made here
            {"output_dir": "/t", "num_steps": 5, "activities": ["CPU"], "with_stack": False}
        ]
        with refused("FAILED_PRECONDITION", "Profiling is already in progress."):
            stub.StartProfile(common_pb2.StartProfileRequest(), timeout=DEADLINE_S)
        assert stub.StopProfile(common_pb2.StopProfileRequest(), timeout=DEADLINE_S).message == "Stop profiling."
        assert stub.StartProfile(common_pb2.StartProfileRequest(), timeout=DEADLINE_S).success
