"""A client made of `smg-grpc-proto` alone drives every RPC of a real engine; kvherd only starts the process."""

import hashlib
import io
import threading
import time
import uuid
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb
from smg_grpc_proto.generated.sglang_scheduler_pb2_grpc import SglangSchedulerStub

from kvherd.testing.herds import begin_engine
from kvherd.testing.processes import KvherdProcess

pytestmark = pytest.mark.engine

BLOCK = 16
DEADLINE_S = 20.0
SERVICE = pb.DESCRIPTOR.services_by_name["SglangScheduler"]
NOT_DONE = {
    "Embed",
    "LoadLoRAAdapter",
    "UnloadLoRAAdapter",
    "ListLoadedLoRAAdapters",
}


@pytest.fixture(scope="module")
def stub() -> Iterator[Any]:
    with ExitStack() as stack:
        engine = begin_engine(lambda *words: stack.enter_context(KvherdProcess(*words)))
        channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{engine.port}"))
        yield SglangSchedulerStub(channel)


def asked(prompt: list[int], *, tokens: int = 4, name: str = "", stream: bool = False) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=name or uuid.uuid4().hex,
        tokenized=pb.TokenizedInput(input_ids=prompt),
        sampling_params=pb.SamplingParams(temperature=0, max_new_tokens=tokens, ignore_eos=True),
        stream=stream,
    )


def fresh_prompt(blocks: int = 6) -> list[int]:
    return [*(uuid.uuid4().bytes * blocks), 1]


def complete(stub: Any, prompt: list[int], *, tokens: int = 4) -> pb.GenerateComplete:
    [answer] = stub.Generate(asked(prompt, tokens=tokens), timeout=DEADLINE_S)
    return answer.complete


@contextmanager
def refused(code: str, *words: str) -> Iterator[None]:
    with pytest.raises(grpc.RpcError) as caught:
        yield
    error: Any = caught.value
    assert error.code() is grpc.StatusCode[code], error.details()
    for word in words:
        assert word in error.details()


@contextmanager
def running(stub: Any) -> Iterator[str]:
    """A request that is under way; its id. It is cancelled at the end."""
    name = uuid.uuid4().hex
    call = stub.Generate(asked(fresh_prompt(), tokens=1900, name=name, stream=True), timeout=DEADLINE_S)
    next(call)
    try:
        yield name
    finally:
        call.cancel()
        until_idle(stub)


def running_requests(stub: Any) -> int:
    loads = stub.GetLoads(pb.GetLoadsRequest(), timeout=DEADLINE_S).loads
    return sum(load.num_running_reqs + load.num_waiting_reqs for load in loads)


def until_idle(stub: Any) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while running_requests(stub):
        assert time.monotonic() < deadline_s, "the engine still runs something"
        time.sleep(0.01)


# --- what it is --------------------------------------------------------------------------------


def test_the_engine_is_healthy_and_says_what_it_is(stub: Any) -> None:
    assert stub.HealthCheck(pb.HealthCheckRequest(), timeout=DEADLINE_S).healthy
    model = stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=DEADLINE_S)
    assert (model.served_model_name, model.is_generation) == ("tiny", True)
    assert model.max_context_length > 0
    assert model.vocab_size > 256
    server = stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=DEADLINE_S)
    assert dict(server.server_args)["page_size"] == BLOCK
    loads = stub.GetLoads(pb.GetLoadsRequest(), timeout=DEADLINE_S)
    assert [load.dp_rank for load in loads.loads] == [0]
    with refused("INVALID_ARGUMENT"):
        stub.GetLoads(pb.GetLoadsRequest(dp_rank=7), timeout=DEADLINE_S)


def test_the_tokenizer_arrives_whole(stub: Any) -> None:
    chunks = list(stub.GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=DEADLINE_S))
    data = b"".join(chunk.data for chunk in chunks)
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    with zipfile.ZipFile(io.BytesIO(data)) as files:
        assert {"tokenizer.json", "tokenizer_config.json", "config.json"} <= set(files.namelist())


# --- generating --------------------------------------------------------------------------------


def test_a_stream_and_a_whole_answer_have_the_same_tokens(stub: Any) -> None:
    prompt = fresh_prompt()
    whole = complete(stub, prompt, tokens=9)
    assert (whole.finish_reason, whole.prompt_tokens, whole.completion_tokens) == ("length", len(prompt), 9)
    *chunks, last = stub.Generate(asked(prompt, tokens=9, stream=True), timeout=DEADLINE_S)
    assert [token for message in chunks for token in message.chunk.token_ids] == list(whole.output_ids)
    assert list(last.complete.output_ids) == list(whole.output_ids)
    assert last.complete.cached_tokens == (len(prompt) - 1) // BLOCK * BLOCK


@pytest.mark.parametrize(
    ("prompt", "tokens", "word"),
    [([], 4, "input_ids"), ([10**6], 4, "input_ids"), ([1] * 5000, 4, "5000"), ([1], 5000, "5000")],
    ids=["empty", "unknown token", "too long", "answer too long"],
)
def test_a_request_that_cannot_be_is_refused_by_name(stub: Any, prompt: list[int], tokens: int, word: str) -> None:
    with refused("INVALID_ARGUMENT", word):
        complete(stub, prompt, tokens=tokens)


def test_an_id_that_is_alive_cannot_be_used_again(stub: Any) -> None:
    with running(stub) as name, refused("ALREADY_EXISTS", name):
        list(stub.Generate(asked([1, 2, 3], name=name), timeout=DEADLINE_S))


def test_an_abort_ends_the_stream_and_one_of_nobody_says_so(stub: Any) -> None:
    name = uuid.uuid4().hex
    call = stub.Generate(asked(fresh_prompt(), tokens=1900, name=name, stream=True), timeout=DEADLINE_S)
    next(call)
    assert stub.Abort(pb.AbortRequest(request_id=name), timeout=DEADLINE_S).success
    assert list(call)[-1].complete.finish_reason == "abort"
    until_idle(stub)
    nobody = stub.Abort(pb.AbortRequest(request_id=name), timeout=DEADLINE_S)
    assert (nobody.success, name in nobody.message) == (False, True)


def test_a_client_that_cancels_leaves_an_idle_engine(stub: Any) -> None:
    with running(stub):
        assert running_requests(stub) == 1
    assert running_requests(stub) == 0


# --- orders ------------------------------------------------------------------------------------


def flush(stub: Any, timeout_s: float) -> common_pb2.FlushCacheResponse:
    return stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=timeout_s), timeout=DEADLINE_S)


def test_an_idle_engine_flushes_and_a_busy_one_refuses_or_exceeds_its_time(stub: Any) -> None:
    prompt = fresh_prompt()
    complete(stub, prompt)
    assert complete(stub, prompt).cached_tokens > 0
    assert flush(stub, 0).success
    assert complete(stub, prompt).cached_tokens == 0
    with running(stub):
        answer = flush(stub, 0)
        assert (answer.success, "running" in answer.message) == (False, True)
        with refused("DEADLINE_EXCEEDED"):
            flush(stub, 0.1)
    with refused("INVALID_ARGUMENT", "timeout"):
        flush(stub, -1)


def test_a_profile_starts_once_and_stops_once(stub: Any, tmp_path: Path) -> None:
    wanted = common_pb2.StartProfileRequest(output_dir=str(tmp_path), activities=["CPU", "GPU"])
    begun = stub.StartProfile(wanted, timeout=DEADLINE_S)
    assert (begun.success, "GPU records nothing" in begun.message) == (True, True)
    with refused("FAILED_PRECONDITION", "is on; stop it first"):
        stub.StartProfile(wanted, timeout=DEADLINE_S)
    complete(stub, fresh_prompt())
    ended = stub.StopProfile(common_pb2.StopProfileRequest(), timeout=DEADLINE_S)
    assert (ended.success, "recorded 4 steps" in ended.message) == (True, True)
    assert [path.name in ended.message for path in tmp_path.iterdir()] == [True]
    with refused("FAILED_PRECONDITION", "no profile is on"):
        stub.StopProfile(common_pb2.StopProfileRequest(), timeout=DEADLINE_S)
    (tmp_path / "file").write_text("")
    nowhere = common_pb2.StartProfileRequest(output_dir=str(tmp_path / "file"))
    answer = stub.StartProfile(nowhere, timeout=DEADLINE_S)
    assert (answer.success, "cannot write into" in answer.message) == (False, True)


@pytest.mark.parametrize("name", sorted(NOT_DONE))
def test_what_the_engine_does_not_do_is_unimplemented(stub: Any, name: str) -> None:
    request = getattr(pb, f"{name}Request", None) or getattr(common_pb2, f"{name}Request")
    with refused("UNIMPLEMENTED", "not supported"):
        getattr(stub, name)(request(), timeout=DEADLINE_S)


def test_every_method_of_the_service_is_driven_here() -> None:
    driven = {"Generate", "Abort", "HealthCheck", "GetModelInfo", "GetServerInfo", "GetLoads", "GetTokenizer"}
    assert driven | {"FlushCache", "StartProfile", "StopProfile", "SubscribeKvEvents"} | NOT_DONE == set(
        SERVICE.methods_by_name
    )


# --- KV events ---------------------------------------------------------------------------------


def next_event(events: Any, kind: str) -> tuple[common_pb2.KvEventBatch, Any]:
    for batch in events:
        for event in batch.events:
            if event.WhichOneof("data") == kind:
                return batch, getattr(event, kind)
    raise AssertionError(f"the stream ended without {kind}")


def test_events_tell_what_is_stored_and_cleared_and_go_on_after_the_last_that_was_read(stub: Any) -> None:
    flush(stub, 5)
    events = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(), timeout=DEADLINE_S)
    assert dict(events.initial_metadata())["kvherd-epoch"]
    prompt = fresh_prompt()
    complete(stub, prompt)
    batch, stored = next_event(events, "stored")
    assert [token for block in stored.blocks for token in block.token_ids][:BLOCK] == prompt[:BLOCK]
    assert {block.block_size for block in stored.blocks} == {BLOCK}
    events.cancel()

    assert flush(stub, 5).success
    complete(stub, fresh_prompt())
    resume = common_pb2.SubscribeKvEventsRequest(start_sequence_number=batch.sequence_number)
    events = stub.SubscribeKvEvents(resume, timeout=DEADLINE_S)
    first = next(events)
    assert first.sequence_number == batch.sequence_number + 1
    events.cancel()

    future = common_pb2.SubscribeKvEventsRequest(start_sequence_number=batch.sequence_number + 10_000)
    with refused("OUT_OF_RANGE"):
        next(stub.SubscribeKvEvents(future, timeout=DEADLINE_S))


def test_many_callers_at_once_are_all_answered(stub: Any) -> None:
    answers: list[int] = []
    callers = [
        threading.Thread(target=lambda: answers.append(complete(stub, fresh_prompt()).completion_tokens))
        for _ in range(16)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(DEADLINE_S)
    assert answers == [4] * 16
