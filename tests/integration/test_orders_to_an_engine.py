"""Orders to a real engine, whose caller leaves or whose rank does."""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from kvherd.testing.herds import EngineProcess, Start, begin_engine, get
from kvherd.testing.processes import command_line, wait_until

pytestmark = pytest.mark.engine

LONG = {"model": "tiny", "prompt": "hello", "max_tokens": 2000, "ignore_eos": True, "stream": True}
SHORT = {"model": "tiny", "prompt": "other", "max_tokens": 3, "ignore_eos": True}


def metric(engine: EngineProcess, name: str) -> float:
    lines = get(f"{engine.url}/metrics")[1].decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{"))


@pytest.fixture
def engine(start: Start) -> EngineProcess:
    return begin_engine(start, "--dp-size", "2")


def test_a_flush_that_holds_lets_go_when_its_caller_hangs_up(engine: EngineProcess) -> None:
    with (
        httpx.stream("POST", f"{engine.url}/v1/completions", json=LONG, timeout=20) as one,
        httpx.stream("POST", f"{engine.url}/v1/completions", json=LONG, timeout=20) as two,
    ):
        arriving = [answer.iter_lines() for answer in (one, two)]
        assert all("choices" in next(lines) for lines in arriving)
        with socket.create_connection(("127.0.0.1", engine.port + 2)) as caller:
            caller.sendall(b"POST /flush_cache?timeout=60&hold=true HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
            wait_until(lambda: metric(engine, "kvherd_orders_open") == 1, within_s=5, what="the flush waits")
        wait_until(lambda: metric(engine, "kvherd_orders_open") == 0, within_s=5, what="the flush is withdrawn")
        answer = httpx.post(f"{engine.url}/v1/completions", json=SHORT, timeout=5)
        assert json.loads(answer.text)["usage"]["completion_tokens"] == 3
    assert metric(engine, "kvherd_flushes_total") == 0


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
    began_s = time.monotonic()
    silent = flush(engine, 0.5)
    assert 1.4 < time.monotonic() - began_s < 3.5
    assert silent.status_code == 504
    assert [(rank["rank"], rank["message"]) for rank in silent.json()["ranks"]][1] == (1, "no answer")
    assert silent.json()["ranks"][0]["done"]
    os.kill(stopped, signal.SIGCONT)
    after = flush(engine, 5)
    assert after.status_code == 200
    assert [rank["done"] for rank in after.json()["ranks"]] == [True, True]
    wait_until(
        lambda: metric(engine, "kvherd_late_order_answers_total") == 1, within_s=5, what="the late answer is counted"
    )


def test_a_rank_that_is_killed_ends_orders_of_every_kind_at_once(engine: EngineProcess) -> None:
    _, doomed = rank_pids(engine)
    os.kill(doomed, signal.SIGSTOP)
    paths = ["/flush_cache?timeout=60", "/start_profile", "/stop_profile"]
    with ThreadPoolExecutor() as pool:
        asking = [pool.submit(httpx.post, f"{engine.sidecar_url}{path}", timeout=30) for path in paths]
        wait_until(lambda: metric(engine, "kvherd_orders_open") == 3, within_s=5, what="all are under way")
        os.kill(doomed, signal.SIGKILL)
        began_s = time.monotonic()
        answers = [each.result() for each in asking]
        assert time.monotonic() - began_s < 2
    assert [answer.status_code for answer in answers] == [503, 503, 503]
    assert all("rank 1 died: killed by SIGKILL" in answer.json()["error"]["message"] for answer in answers)
    assert engine.process.wait(within_s=10) == 1


@contextmanager
def busy(engine: EngineProcess) -> Iterator[None]:
    """Both ranks always have something to run, until this is left."""
    done = threading.Event()

    def ask(tokens: int) -> None:
        while not done.is_set():
            httpx.post(f"{engine.url}/v1/completions", json=SHORT | {"max_tokens": tokens}, timeout=60)

    with ThreadPoolExecutor(10) as pool:  # of different lengths, or they would all end with one step
        asking = [pool.submit(ask, 200 + 83 * index) for index in range(10)]
        try:
            wait_until(lambda: metric(engine, "sglang:num_running_reqs") >= 6, within_s=10, what="it is busy")
            yield
        finally:
            done.set()
            for each in asking:
                each.result()


def test_two_hundred_flushes_of_different_times_are_each_answered_at_theirs(engine: EngineProcess) -> None:
    """Half expire under load; the others are done together when it ends."""
    with (
        httpx.Client(base_url=engine.sidecar_url, timeout=60, limits=httpx.Limits(max_connections=None)) as client,
        ThreadPoolExecutor(200) as pool,
    ):
        with busy(engine):
            times = [0.5 + 0.005 * index for index in range(100)] + [60.0] * 100
            asking = [pool.submit(client.post, f"/flush_cache?timeout={each}") for each in times]
            expired = [each.result().json() for each in asking[:100]]
        done = [each.result().json() for each in asking[100:]]
    assert [each["timed_out"] for each in expired] == [True] * 100
    assert all("running" in each["message"] for each in expired)
    assert [each["success"] for each in done] == [True] * 100
    wait_until(lambda: metric(engine, "kvherd_flushes_waiting") == 0, within_s=5, what="none waits")
    assert metric(engine, "kvherd_orders_open") == 0


def test_orders_of_other_kinds_go_on_while_a_flush_waits(engine: EngineProcess, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        with busy(engine):
            waiting = pool.submit(flush, engine, 60)
            wait_until(lambda: metric(engine, "kvherd_flushes_waiting") == 2, within_s=5, what="both ranks have it")
            body = {"output_dir": str(tmp_path)}
            assert httpx.post(f"{engine.sidecar_url}/start_profile", json=body, timeout=5).status_code == 200
            assert get(f"{engine.url}/server_info")[0] == 200
            assert httpx.post(f"{engine.sidecar_url}/stop_profile", timeout=5).status_code == 200
            assert not waiting.done()
        assert waiting.result().status_code == 200
