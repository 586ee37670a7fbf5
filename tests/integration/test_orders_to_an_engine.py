"""Orders to a real engine, whose caller leaves or whose rank does."""

import json
import socket

import httpx
import pytest

from kvherd.testing.herds import EngineProcess, Start, begin_engine, get
from kvherd.testing.processes import wait_until

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
