"""What an engine promises of generations, to a client that has its wire format and nothing else."""

import hashlib
import io
import socket
import time
import uuid
import zipfile
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from kvherd.testing.engine_client import EngineClient, fresh_prompt, refused

DRIVEN = {"Generate", "Abort", "HealthCheck", "GetModelInfo", "GetServerInfo", "GetLoads", "GetTokenizer"}
DRIVEN |= {"FlushCache", "StartProfile", "StopProfile", "SubscribeKvEvents"}
SERVICE = pb.DESCRIPTOR.services_by_name["SglangScheduler"]
UNIMPLEMENTED = ("Embed", "LoadLoRAAdapter", "UnloadLoRAAdapter", "ListLoadedLoRAAdapters")


# --- the service -----------------------------------------------------------------------------------


def test_reflection_names_the_service(engine: EngineClient) -> None:
    question = reflection_pb2.ServerReflectionRequest(list_services="")
    [answer] = ServerReflectionStub(engine.channel).ServerReflectionInfo(iter([question]), timeout=engine.patience_s)
    assert SERVICE.full_name in [service.name for service in answer.list_services_response.service]


def test_its_standard_health_is_that_of_the_service(engine: EngineClient) -> None:
    health = HealthStub(engine.channel)
    for name in ("", SERVICE.full_name):
        answer = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=engine.patience_s)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    with refused("NOT_FOUND"):
        health.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=engine.patience_s)


@pytest.mark.parametrize("name", UNIMPLEMENTED)
def test_what_it_does_not_do_is_unimplemented_in_words(engine: EngineClient, name: str) -> None:
    request = getattr(pb, f"{name}Request", None) or getattr(common_pb2, f"{name}Request")
    answer = engine.call(name, request())
    assert answer.code is grpc.StatusCode.UNIMPLEMENTED
    assert len(answer.details.split()) > 2


def test_every_method_of_the_service_is_driven_by_this_suite() -> None:
    assert DRIVEN | set(UNIMPLEMENTED) == set(SERVICE.methods_by_name)


def test_it_is_healthy_and_tells_its_model(engine: EngineClient) -> None:
    assert engine.call("HealthCheck", pb.HealthCheckRequest()).answer.healthy
    model = engine.call("GetModelInfo", pb.GetModelInfoRequest()).answer
    assert model.is_generation
    assert model.served_model_name
    assert model.model_path
    assert model.vocab_size > 256
    assert model.max_context_length > engine.address.long_tokens


def test_the_tokenizer_comes_whole_with_its_digest_on_the_last_piece(engine: EngineClient) -> None:
    pieces = list(engine.stub.GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=engine.patience_s))
    data = b"".join(piece.data for piece in pieces)
    assert [bool(piece.sha256) for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1].sha256 == hashlib.sha256(data).hexdigest()
    with zipfile.ZipFile(io.BytesIO(data)) as files:
        assert {"tokenizer.json", "tokenizer_config.json"} <= set(files.namelist())


# --- generating -----------------------------------------------------------------------------------


def test_a_stream_and_a_whole_answer_have_the_same_tokens(engine: EngineClient) -> None:
    prompt = fresh_prompt()
    whole = engine.complete(prompt, tokens=9)
    assert (whole.finish_reason, whole.prompt_tokens, whole.completion_tokens) == ("length", len(prompt), 9)
    *chunks, last = engine.generate(prompt, tokens=9, stream=True)
    assert {message.WhichOneof("response") for message in chunks} == {"chunk"}
    assert len(chunks) > 1
    assert [token for message in chunks for token in message.chunk.token_ids] == list(whole.output_ids)
    assert list(last.complete.output_ids) == list(whole.output_ids)


def test_a_prompt_that_comes_again_says_how_much_was_cached(engine: EngineClient) -> None:
    prompt = fresh_prompt()
    assert engine.complete(prompt, rank=0).cached_tokens == 0
    assert len(prompt) > engine.complete(prompt, rank=0).cached_tokens >= len(prompt) // 2


def test_an_empty_prompt_is_an_invalid_argument_and_costs_the_engine_nothing(engine: EngineClient) -> None:
    with refused("INVALID_ARGUMENT", "input_ids"):
        list(engine.generate([], within_s=engine.patience_s))
    assert engine.complete([1, 2, 3]).completion_tokens == 4


@pytest.mark.parametrize("beyond", ["one", "the most"])
def test_a_token_that_is_not_in_the_vocabulary_is_an_invalid_argument(engine: EngineClient, beyond: str) -> None:
    size = engine.call("GetModelInfo", pb.GetModelInfoRequest()).answer.vocab_size
    token = size if beyond == "one" else 2**32 - 1
    with refused("INVALID_ARGUMENT", str(token)):
        list(engine.generate([1, token, 2], within_s=engine.patience_s))
    assert engine.complete([1, 2, 3]).completion_tokens == 4


def test_a_prompt_that_is_too_long_is_an_invalid_argument(engine: EngineClient) -> None:
    most = engine.call("GetModelInfo", pb.GetModelInfoRequest()).answer.max_context_length
    with refused("INVALID_ARGUMENT", str(most + 1)):
        list(engine.generate([1] * (most + 1), within_s=engine.patience_s))


# --- ids and aborts -----------------------------------------------------------------------------------


def test_an_id_that_is_alive_already_exists_and_its_stream_goes_on(engine: EngineClient) -> None:
    name = uuid.uuid4().hex
    with engine.running(name=name) as first:
        with refused("ALREADY_EXISTS", name):
            list(engine.generate([1, 2, 3], name=name, within_s=engine.patience_s))
        assert next(first).chunk.token_ids


def test_an_id_may_be_used_again_as_soon_as_its_stream_ended(engine: EngineClient) -> None:
    name = uuid.uuid4().hex
    for _ in range(20):
        *_, last = engine.generate([1, 2, 3], tokens=2, name=name, stream=True, within_s=engine.patience_s)
        assert last.complete.completion_tokens == 2


def abort(engine: EngineClient, name: str) -> pb.AbortResponse:
    answer: pb.AbortResponse = engine.call("Abort", pb.AbortRequest(request_id=name, reason="nobody wants it")).answer
    return answer


@pytest.mark.parametrize("stream", [True, False])
def test_an_abort_ends_a_running_answer_at_once(engine: EngineClient, stream: bool) -> None:
    name = uuid.uuid4().hex
    call = engine.generate(fresh_prompt(), tokens=engine.address.long_tokens, name=name, stream=stream)
    engine.until(lambda: engine.requests() == 1, "it runs")
    assert abort(engine, name).success
    *_, last = call
    assert last.complete.finish_reason == "abort"
    assert last.complete.completion_tokens < engine.address.long_tokens
    engine.until_idle()


def test_the_reason_of_an_abort_comes_with_the_end_of_the_stream(engine: EngineClient) -> None:
    name = uuid.uuid4().hex
    with engine.running(name=name) as call:
        assert abort(engine, name).success
        *_, last = call
        told = [str(value) for _, value in call.trailing_metadata()]
        assert "nobody wants it" in " ".join([*told, str(last.complete), call.details() or ""])


@pytest.mark.parametrize("when", ["never used", "ended"])
def test_an_abort_of_an_id_that_nobody_has_says_so(engine: EngineClient, when: str) -> None:
    name = uuid.uuid4().hex
    if when == "ended":
        list(engine.generate([1, 2, 3], name=name))
    answer = abort(engine, name)
    assert not answer.success
    assert name in answer.message


def test_an_abort_reaches_a_request_at_every_stage_of_its_life(engine: EngineClient) -> None:
    """Sent as soon as the request is, then later and later: on its way, queued, in its prefill, running, ended."""
    for step in range(12):
        name = uuid.uuid4().hex
        call = engine.generate(fresh_prompt(400), tokens=8, name=name, stream=True)
        time.sleep(step * 0.004)  # wherever this lands is right: the stages are passed through one after another
        found = abort(engine, name).success
        *_, last = call
        assert last.complete.finish_reason == "abort" if found else last.complete.finish_reason in {"abort", "length"}
        assert not abort(engine, name).success
    engine.until_idle()


def test_an_abort_ends_a_request_that_is_queued(engine: EngineClient) -> None:
    most, length = engine.loads()[0].max_running_requests, engine.address.long_tokens
    begun = [engine.generate(fresh_prompt(20), tokens=length, rank=0, stream=True) for _ in range(most)]
    try:
        engine.until(lambda: engine.requests() == most, "no more can run")
        name = uuid.uuid4().hex
        queued = engine.generate(fresh_prompt(20), name=name, rank=0, stream=True)
        engine.until(lambda: engine.requests() == most + 1, "one is queued")
        assert abort(engine, name).success
        *_, last = queued
        assert (last.complete.finish_reason, last.complete.completion_tokens) == ("abort", 0)
    finally:
        for call in begun:
            call.cancel()
    engine.until_idle()


# --- who leaves, who is slow -----------------------------------------------------------------------------------


def test_a_client_that_cancels_ends_its_request(engine: EngineClient) -> None:
    with engine.running() as call:
        engine.until(lambda: engine.requests() == 1, "it runs")
        call.cancel()
        engine.until_idle()


def test_a_deadline_that_passes_ends_its_request(engine: EngineClient) -> None:
    with refused("DEADLINE_EXCEEDED"):
        list(engine.generate(fresh_prompt(), tokens=engine.address.long_tokens, within_s=0.3))
    engine.until_idle()


def test_a_client_that_reads_nothing_holds_nobody_up_and_misses_nothing(engine: EngineClient) -> None:
    slow = engine.generate(fresh_prompt(), tokens=600, stream=True, within_s=12 * engine.patience_s)
    for _ in range(3):
        assert engine.complete(fresh_prompt()).completion_tokens == 4
    *chunks, last = slow
    assert [token for each in chunks for token in each.chunk.token_ids] == list(last.complete.output_ids)
    assert last.complete.completion_tokens == 600


def test_many_callers_at_once_are_all_answered(engine: EngineClient) -> None:
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: engine.complete(fresh_prompt(20)).completion_tokens, range(16)))
    assert answers == [4] * 16


def test_nobody_can_share_its_port(engine: EngineClient) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        with pytest.raises(OSError, match="in use"):
            other.bind((engine.address.host, engine.address.port))


# --- the truth of the moment -----------------------------------------------------------------------------------


def test_its_loads_tell_what_each_rank_does_at_this_moment(engine: EngineClient) -> None:
    ranks = list(range(engine.address.ranks))
    assert [load.dp_rank for load in engine.loads()] == ranks
    for rank in ranks:
        with engine.running(rank=rank):
            engine.until(lambda: engine.requests() == 1, "it is told that one runs")
            assert [load.num_running_reqs for load in engine.loads()] == [int(rank == each) for each in ranks]
            assert engine.loads()[rank].num_used_tokens > 0
        assert [load.num_running_reqs for load in engine.loads()] == [0] * len(ranks)


def test_the_load_of_one_rank_can_be_asked_for_and_of_none_is_refused(engine: EngineClient) -> None:
    last = engine.address.ranks - 1
    loads = engine.call("GetLoads", pb.GetLoadsRequest(dp_rank=last)).answer.loads
    assert [load.dp_rank for load in loads] == [last]
    assert engine.call("GetLoads", pb.GetLoadsRequest(dp_rank=7)).code is grpc.StatusCode.INVALID_ARGUMENT


def test_its_server_information_tells_the_moment_too(engine: EngineClient) -> None:
    def server() -> pb.GetServerInfoResponse:
        answer: pb.GetServerInfoResponse = engine.call("GetServerInfo", pb.GetServerInfoRequest()).answer
        return answer

    assert dict(server().server_args)
    assert server().active_requests == 0
    with engine.running():
        engine.until(lambda: server().active_requests == 1, "it tells of the request")
    assert server().active_requests == 0
    assert server().max_total_num_tokens > 0
    times = [server().uptime_seconds for _ in range(3)]
    assert all(before <= after for before, after in pairwise(times))
