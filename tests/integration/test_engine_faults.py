"""An engine that breaks says so at once, and leaves nothing behind."""

import json
import os
import signal
import socket
from collections.abc import Iterator

import httpx
import pytest

from kvherd.testing.herds import EngineProcess, Start, begin_engine, get
from kvherd.testing.processes import ENGINE_OFFSETS, free_ports, wait_until

pytestmark = pytest.mark.engine

LONG = {"model": "tiny", "prompt": "hello", "max_tokens": 2000, "ignore_eos": True, "stream": True}


def events(answer: httpx.Response) -> Iterator[str]:
    return (line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: "))


def test_a_scheduler_that_is_killed_ends_requests_health_and_engine_at_once(start: Start) -> None:
    engine = begin_engine(start)
    with httpx.stream("POST", f"{engine.url}/v1/completions", json=LONG, timeout=20) as answer:
        arriving = events(answer)
        assert "choices" in json.loads(next(arriving))
        engine.kill_rank()
        last = [event for event in arriving if event != "[DONE]"][-1]
    assert "scheduler of rank 0 died" in json.loads(last)["error"]["message"]
    assert get(f"{engine.url}/health")[0] in (503, 0), "unhealthy, or gone already"
    assert engine.process.wait(within_s=10) == 1
    assert engine.process.said.splitlines()[-1] == "kvherd: the scheduler of rank 0 died: killed by SIGKILL"
    engine.process.assert_nothing_left(ports=engine.ports)


def test_an_engine_that_is_asked_to_stop_lets_answers_end_and_leaves_nothing(start: Start) -> None:
    engine = begin_engine(start)
    call = LONG | {"max_tokens": 100}
    with httpx.stream("POST", f"{engine.url}/v1/completions", json=call, timeout=20) as answer:
        arriving = events(answer)
        next(arriving)
        engine.process.signal(signal.SIGTERM)
        *_, end, done = arriving
    assert json.loads(end)["choices"][0]["finish_reason"] == "length"
    assert done == "[DONE]"
    assert engine.process.wait(within_s=15) == 0
    engine.process.assert_nothing_left(ports=engine.ports)
    assert "Traceback" not in engine.process.said


def test_an_answer_that_outlasts_the_stopping_ends_with_an_error(start: Start) -> None:
    engine = begin_engine(start)
    with httpx.stream("POST", f"{engine.url}/v1/completions", json=LONG, timeout=20) as answer:
        arriving = events(answer)
        next(arriving)
        os.kill(engine.process.member("kvherd.runtime.process"), signal.SIGSTOP)
        engine.process.signal(signal.SIGTERM)
        last = [event for event in arriving if event != "[DONE]"][-1]
    assert json.loads(last)["error"]["message"] == "the engine is stopping"
    assert engine.process.wait(within_s=15) == 0
    engine.process.assert_nothing_left(ports=engine.ports)


def test_an_engine_whose_servicer_is_killed_leaves_no_scheduler(start: Start) -> None:
    engine = begin_engine(start)
    engine.process.signal(signal.SIGKILL)
    wait_until(lambda: not engine.process.family(), within_s=10, what="the scheduler has noticed")
    engine.process.assert_nothing_left(ports=engine.ports)


@pytest.mark.parametrize(
    ("offset", "option"),
    [(0, "--port"), (1, "--grpc-http-sidecar-port"), (2, "--port"), (10, "--port"), (30, "--port")],
)
def test_a_port_in_use_is_one_line_with_port_and_option(start: Start, offset: int, option: str) -> None:
    port = free_ports()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port + offset))
        listener.listen()
        process = start("engine", "--model", "tiny", "--port", str(port), "--log-level", "error")
        assert process.wait(within_s=20) == 1
        assert process.said == f"kvherd: port {port + offset} is in use; choose another with {option}\n"
        process.assert_nothing_left()


@pytest.mark.parametrize(
    ("options", "code", "sentence"),
    [
        (("--model", "/nowhere.gguf"), 1, "no model at /nowhere.gguf: there is no such file"),
        (("--model", "Makefile"), 1, "Makefile"),
        (("--dp-size", "99"), 2, "--dp-size: there are ports for 20 ranks behind --port, not for 99"),
        (("--chunk-tokens", "4"), 2, "--chunk-tokens: 4 is less than a block"),
        (("--port", "65535"), 2, "--port: 65537 is no port"),
        (("--grpc-http-sidecar-port", "65536"), 2, "--grpc-http-sidecar-port: 65536 is no port"),
        (("--grpc-http-sidecar-port", "-1"), 2, "--grpc-http-sidecar-port: -1 is no port"),
        (("--metrics-http-port", "9000"), 2, "--metrics-http-port: is called --grpc-http-sidecar-port now"),
    ],
)
def test_an_engine_that_cannot_start_says_why_in_one_line(
    start: Start, options: tuple[str, ...], code: int, sentence: str
) -> None:
    process = start("engine", "--log-level", "error", "--model", "tiny", "--port", str(free_ports()), *options)
    assert process.wait(within_s=30) == code
    assert process.said.startswith("kvherd: ")
    assert sentence in process.said
    assert process.said.count("\n") == 1
    process.assert_nothing_left()


def running(engine: EngineProcess) -> int:
    loads = json.loads(get(f"{engine.url}/get_loads")[1])
    return sum(int(load["num_running_reqs"]) for load in loads["loads"])


def test_a_client_that_leaves_ends_its_request_within_a_step(start: Start) -> None:
    engine = begin_engine(start)
    with httpx.stream("POST", f"{engine.url}/v1/completions", json=LONG, timeout=20) as answer:
        arriving = events(answer)  # kept: httpx hangs up when its iterator is dropped
        next(arriving)
        assert running(engine) == 1
    wait_until(lambda: running(engine) == 0, within_s=2, what="the engine runs nothing")


def test_the_sidecar_is_where_its_option_says_or_nowhere(start: Start) -> None:
    port = free_ports((*ENGINE_OFFSETS, 3))
    engine = begin_engine(start, "--grpc-http-sidecar-port", str(port + 3), port=port)
    assert get(f"http://127.0.0.1:{port + 3}/health")[0] == 200
    assert get(f"{engine.sidecar_url}/health")[0] == 0
    without = begin_engine(start, "--grpc-http-sidecar-port", "0")
    assert get(f"{without.sidecar_url}/health")[0] == 0
