"""One engine of two ranks: every order reaches both, and each answers for itself."""

import json
import os
import signal
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import httpx
import pytest
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb
from smg_grpc_proto.generated.sglang_scheduler_pb2_grpc import SglangSchedulerStub

from kvherd.testing.herds import EngineProcess, GatewayProcess, Start, begin_engine, begin_gateway
from kvherd.testing.processes import free_ports, wait_until

pytestmark = pytest.mark.engine
OFFSETS = (0, 1, 2, 10, 11, 30, 31)


@contextmanager
def connected(engine: EngineProcess) -> Iterator[Any]:
    with grpc.insecure_channel(f"127.0.0.1:{engine.port}") as channel:
        yield SglangSchedulerStub(channel)


def asked(rank: int, *, tokens: int, prompt: bytes = b"a prompt of several blocks, for one rank only") -> Any:
    return pb.GenerateRequest(
        request_id=uuid.uuid4().hex,
        tokenized=pb.TokenizedInput(input_ids=list(prompt)),
        sampling_params=pb.SamplingParams(temperature=0, max_new_tokens=tokens, ignore_eos=True),
        stream=True,
        data_parallel_rank=rank,
    )


def known_blocks(gateway: GatewayProcess) -> int:
    kv: Any = gateway.workers()[0]["kv"]
    return int(kv["blocks"])


def cached(stub: Any, rank: int) -> int:
    *_, last = stub.Generate(asked(rank, tokens=2), timeout=20)
    return int(last.complete.cached_tokens)


def flush(stub: Any, timeout_s: float) -> tuple[grpc.StatusCode, dict[int, tuple[bool, str]]]:
    """The status, and what each rank said."""
    answer, call = None, None
    try:
        answer, call = stub.FlushCache.with_call(common_pb2.FlushCacheRequest(timeout_s=timeout_s), timeout=20)
        code = grpc.StatusCode.OK if answer.success else grpc.StatusCode.ABORTED
    except grpc.RpcError as error:
        refusal: Any = error
        call, code = refusal, refusal.code()
    told = dict(call.trailing_metadata() or ())
    ranks = json.loads(told.get("kvherd-ranks", "[]"))
    return code, {one["rank"]: (one["done"], one["message"]) for one in ranks}


@pytest.fixture
def engine(start: Start) -> EngineProcess:
    return begin_engine(start, "--dp-size", "2", port=free_ports(OFFSETS))


def test_each_rank_has_a_cache_of_its_own_and_a_flush_clears_both(engine: EngineProcess) -> None:
    with connected(engine) as stub:
        assert [cached(stub, rank) for rank in (0, 0, 1, 1)] == [0, 32, 0, 32]
        code, ranks = flush(stub, 5.0)
        assert code is grpc.StatusCode.OK
        assert {rank: done for rank, (done, _) in ranks.items()} == {0: True, 1: True}
        assert [cached(stub, rank) for rank in (0, 1)] == [0, 0]


@pytest.mark.parametrize("over", ["grpc", "http"])
def test_a_gateway_knows_each_rank_s_cache_and_names_the_rank(start: Start, engine: EngineProcess, over: str) -> None:
    """
    1. Two prompts go to two ranks, as the client says. 2. Each is asked for again, with no rank named: it goes where it
    is cached, and what was predicted is what was cached.
    """
    gateway = begin_gateway(start, engine.grpc_url if over == "grpc" else engine.http_worker, up=1)

    def ask(letter: str, **more: int) -> httpx.Response:
        body = {"model": "tiny", "prompt": letter * 100, "max_tokens": 2, **more}
        answer = httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=20)
        assert answer.status_code == 200, answer.text
        return answer

    for rank, letter in enumerate("ab"):
        assert ask(letter, data_parallel_rank=rank).headers["x-kvherd-rank"] == str(rank)
    wait_until(lambda: known_blocks(gateway) >= 12, within_s=10, what="both ranks' blocks are known")
    for rank, letter in enumerate("ab"):
        answer = ask(letter)
        usage = answer.json()["usage"]
        assert answer.headers["x-kvherd-rank"] == str(rank)
        assert usage["prompt_tokens_details"]["cached_tokens"] == 96
        assert answer.headers["x-kvherd-predicted-cached-tokens"] == "96"


def test_an_engine_puts_a_prefix_where_it_went_before(engine: EngineProcess) -> None:
    with connected(engine) as stub:
        for prompt in (b"one prompt of several blocks, twice", b"and another one, of as many blocks!"):
            first, again = (asked(0, tokens=2, prompt=prompt) for _ in range(2))
            for request in (first, again):
                request.ClearField("data_parallel_rank")
            *_, cold = stub.Generate(first, timeout=20)
            *_, warm = stub.Generate(again, timeout=20)
            assert (cold.complete.cached_tokens, warm.complete.cached_tokens) == (0, 32)


def test_one_busy_rank_makes_the_whole_flush_not_done_and_is_named(engine: EngineProcess) -> None:
    with connected(engine) as stub:
        busy = stub.Generate(asked(1, tokens=1500))
        next(busy)
        code, ranks = flush(stub, 0)
        assert code is not grpc.StatusCode.OK
        assert ranks[0][0]
        assert ranks[1] == (False, "the engine is busy: 1 running")
        code, ranks = flush(stub, 0.2)
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert not ranks[1][0]
        busy.cancel()
        code, ranks = flush(stub, 10)
        assert code is grpc.StatusCode.OK


def test_a_rank_that_stands_still_is_silent_and_the_other_says_what_it_did(engine: EngineProcess) -> None:
    stopped = engine.process.member("rank=1")
    with connected(engine) as stub:
        os.kill(stopped, signal.SIGSTOP)
        try:
            code, ranks = flush(stub, 0.3)
        finally:
            os.kill(stopped, signal.SIGCONT)
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert [rank for rank, (done, _) in ranks.items() if done] == [0]
        wait_until(
            lambda: flush(stub, 1.0)[0] is grpc.StatusCode.OK, within_s=10, what="both ranks answer for the new order"
        )


def test_a_rank_that_dies_ends_the_engine_and_leaves_nothing(engine: EngineProcess) -> None:
    engine.process.kill_member("rank=1")
    assert engine.process.wait(within_s=15) == 1
    assert "the scheduler of rank 1 died: killed by SIGKILL" in engine.process.said
    engine.process.assert_nothing_left(ports=[engine.port + offset for offset in OFFSETS])
