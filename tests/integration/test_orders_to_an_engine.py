"""Orders to a real engine, whose caller leaves or whose rank does."""

import json
import os
import signal
import socket
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb
from smg_grpc_proto.generated.sglang_scheduler_pb2_grpc import SglangSchedulerStub

from kvherd.testing.herds import EngineProcess, Start, begin_engine, get
from kvherd.testing.processes import command_line, wait_until

pytestmark = pytest.mark.engine

SHORT = {"model": "smollm2", "prompt": "other", "max_tokens": 3, "ignore_eos": True}


@pytest.fixture
def slow_engine(start: Start) -> EngineProcess:
    """The real model: a request takes many seconds, however fast the machine is, and tells of few steps."""
    return begin_engine(start, "--dp-size", "2", "--model", "smollm2")


def metric(engine: EngineProcess, name: str) -> float:
    lines = get(f"{engine.url}/metrics")[1].decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{"))


@pytest.fixture
def engine(start: Start) -> EngineProcess:
    return begin_engine(start, "--dp-size", "2")


@contextmanager
def busy(engine: EngineProcess) -> Iterator[None]:
    """Each rank always has something to run, until this is left: two long requests, that do not end together."""
    done = threading.Event()
    calls: dict[tuple[int, int], Any] = {}
    with grpc.insecure_channel(f"127.0.0.1:{engine.port}") as channel, ThreadPoolExecutor(4) as pool:
        stub = SglangSchedulerStub(channel)

        def ask(rank: int, tokens: int) -> None:
            key = rank, tokens
            while not done.is_set():
                calls[key] = stub.Generate(generate(rank, tokens), timeout=60)
                with suppress(grpc.RpcError):  # cancelled, when this is left
                    list(calls[key])
                tokens = 1000

        asking = [pool.submit(ask, rank, 600 + 400 * index) for rank in (0, 1) for index in range(2)]
        try:
            wait_until(lambda: metric(engine, "sglang:num_running_reqs") == 4, within_s=10, what="it is busy")
            yield
        finally:
            done.set()

            def ended() -> bool:
                for call in list(calls.values()):
                    call.cancel()
                return all(each.done() for each in asking)

            wait_until(ended, within_s=10, what="the requests have ended")
            for each in asking:
                each.result()


def generate(rank: int, tokens: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=uuid.uuid4().hex,
        tokenized=pb.TokenizedInput(input_ids=list(uuid.uuid4().bytes)),
        sampling_params=pb.SamplingParams(temperature=0, max_new_tokens=tokens, ignore_eos=True),
        data_parallel_rank=rank,
    )


def test_a_flush_that_holds_lets_go_when_its_caller_hangs_up(slow_engine: EngineProcess) -> None:
    with busy(slow_engine):
        with socket.create_connection(("127.0.0.1", slow_engine.port + 2)) as caller:
            caller.sendall(
                b"POST /flush_cache?timeout=60&hold=true HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n"
            )
            wait_until(lambda: metric(slow_engine, "kvherd_orders_open") == 1, within_s=10, what="the flush waits")
        wait_until(lambda: metric(slow_engine, "kvherd_orders_open") == 0, within_s=10, what="the flush is withdrawn")
        answer = httpx.post(f"{slow_engine.url}/v1/completions", json=SHORT, timeout=5)
        assert json.loads(answer.text)["usage"]["completion_tokens"] == 3
    assert metric(slow_engine, "kvherd_flushes_total") == 0


def rank_pids(engine: EngineProcess) -> list[int]:
    """In the order of the ranks."""
    words = {pid: command_line(pid) for pid in engine.process.family()}
    return [pid for rank in range(2) for pid, word in words.items() if f"runtime.process rank={rank}" in word]


def flush(engine: EngineProcess, timeout_s: float) -> httpx.Response:
    return httpx.post(f"{engine.sidecar_url}/flush_cache?timeout={timeout_s}", timeout=30)


def test_a_rank_that_is_stopped_is_named_and_its_late_answer_is_nobody_else_s(engine: EngineProcess) -> None:
    """
    1. Rank 1 is stopped: a flush ends with 504 at its time and a second of grace, and rank 0 has cleared.
    2. Rank 1 goes on while the next order is under way; its answer to the first is late, and counted.
    """
    _, stopped = rank_pids(engine)
    os.kill(stopped, signal.SIGSTOP)
    silent = flush(engine, 0.5)
    assert silent.status_code == 504
    assert [(rank["rank"], rank["message"]) for rank in silent.json()["ranks"]][1] == (1, "no answer")
    assert silent.json()["ranks"][0]["done"]
    os.kill(stopped, signal.SIGCONT)
    after = flush(engine, 5)
    assert after.status_code == 200
    assert [rank["done"] for rank in after.json()["ranks"]] == [True, True]
    wait_until(
        lambda: metric(engine, "kvherd_late_order_answers_total") == 1, within_s=10, what="the late answer is counted"
    )


def test_a_rank_that_is_killed_ends_orders_of_every_kind_at_once(engine: EngineProcess) -> None:
    _, doomed = rank_pids(engine)
    os.kill(doomed, signal.SIGSTOP)
    paths = ["/flush_cache?timeout=60", "/start_profile", "/stop_profile"]
    with ThreadPoolExecutor() as pool:
        asking = [pool.submit(httpx.post, f"{engine.sidecar_url}{path}", timeout=30) for path in paths]
        wait_until(lambda: metric(engine, "kvherd_orders_open") == 3, within_s=10, what="all are under way")
        os.kill(doomed, signal.SIGKILL)
        answers = [each.result() for each in asking]
    assert [answer.status_code for answer in answers] == [503, 503, 503]
    assert all("rank 1 died: killed by SIGKILL" in answer.json()["error"]["message"] for answer in answers)
    assert engine.process.wait(within_s=10) == 1


def test_two_hundred_flushes_of_different_times_are_each_answered_at_theirs(slow_engine: EngineProcess) -> None:
    """Half expire under load; the others are done together when it ends."""
    with (
        httpx.Client(base_url=slow_engine.sidecar_url, timeout=60, limits=httpx.Limits(max_connections=None)) as client,
        ThreadPoolExecutor(200) as pool,
    ):
        with busy(slow_engine):
            times = [0.5 + 0.005 * index for index in range(100)] + [60.0] * 100
            asking = [pool.submit(client.post, f"/flush_cache?timeout={each}") for each in times]
            expired = [each.result().json() for each in asking[:100]]
        done = [each.result().json() for each in asking[100:]]
    assert [each["timed_out"] for each in expired] == [True] * 100
    assert all("running" in each["message"] for each in expired)
    assert [each["success"] for each in done] == [True] * 100
    wait_until(lambda: metric(slow_engine, "kvherd_flushes_waiting") == 0, within_s=10, what="none waits")
    assert metric(slow_engine, "kvherd_orders_open") == 0


def test_orders_of_other_kinds_go_on_while_a_flush_waits(slow_engine: EngineProcess, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        with busy(slow_engine):
            waiting = pool.submit(flush, slow_engine, 60)
            wait_until(
                lambda: metric(slow_engine, "kvherd_flushes_waiting") == 2, within_s=15, what="both ranks have it"
            )
            body = {"output_dir": str(tmp_path)}
            assert httpx.post(f"{slow_engine.sidecar_url}/start_profile", json=body, timeout=5).status_code == 200
            assert get(f"{slow_engine.url}/server_info")[0] == 200
            assert httpx.post(f"{slow_engine.sidecar_url}/stop_profile", timeout=5).status_code == 200
            assert not waiting.done()
        assert waiting.result().status_code == 200
