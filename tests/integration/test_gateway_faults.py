"""A gateway whose workers fail costs a caller no more than it must, and says what is wrong."""

import signal
import threading
from typing import Any

import httpx
import pytest

from kvherd.testing.herds import GatewayProcess, Start, begin_engine, begin_gateway, workers_of
from kvherd.testing.processes import free_ports

pytestmark = pytest.mark.engine

CALL = {"model": "tiny", "prompt": "hello", "max_tokens": 4}


def complete(gateway: GatewayProcess) -> httpx.Response:
    return httpx.post(f"{gateway.url}/v1/completions", json=CALL, timeout=20)


def test_without_a_living_worker_a_call_is_told_to_come_back(start: Start) -> None:
    gateway = begin_gateway(start, f"http://127.0.0.1:{free_ports((0,))}", f"grpc://127.0.0.1:{free_ports((0,))}")
    answer = complete(gateway)
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 0
    assert answer.json()["error"]["code"] == "no_worker"
    assert httpx.get(f"{gateway.url}/health").status_code == 200, "the gateway itself is alive"
    assert httpx.get(f"{gateway.url}/ready").status_code == 503


def test_a_worker_that_is_stopped_during_a_flush_costs_its_own_entry_on_time(start: Start) -> None:
    engines = [begin_engine(start), begin_engine(start)]
    gateway = begin_gateway(start, engines[0].grpc_url, engines[1].http_worker, up=2)
    engines[1].process.signal(signal.SIGSTOP)
    try:
        answer = httpx.post(f"{gateway.url}/flush_cache?timeout=1", timeout=20)
    finally:
        engines[1].process.signal(signal.SIGCONT)
    assert answer.status_code == 207
    outcomes = {worker["url"]: worker["outcome"] for worker in answer.json()["workers"]}
    assert outcomes == {engines[0].grpc_url: "done", engines[1].url: "timed_out"}


@pytest.mark.parametrize("kind", ["grpc", "http"])
def test_a_worker_that_restarts_is_served_from_and_followed_again(start: Start, kind: str) -> None:
    port = free_ports()
    engine = begin_engine(start, port=port)
    gateway = begin_gateway(start, engine.grpc_url if kind == "grpc" else engine.http_worker, up=1)
    gateway.process.wait_for(lambda: is_live(gateway), what="its KV events are followed")
    assert complete(gateway).status_code == 200
    epoch = kv(gateway)["epoch"]
    engine.process.signal(signal.SIGKILL)
    assert engine.process.wait(within_s=5) == -signal.SIGKILL
    gateway.process.wait_for(lambda: gateway.has_up(0), what="the loss is noticed")
    assert complete(gateway).status_code == 503
    begin_engine(start, port=port)
    gateway.process.wait_for(lambda: gateway.has_up(1), what="the worker is back")
    assert complete(gateway).status_code == 200
    gateway.process.wait_for(lambda: is_live(gateway) and kv(gateway)["epoch"] != epoch, what="a new epoch is followed")


def test_a_gateway_that_restarts_learns_again_what_its_workers_hold(start: Start) -> None:
    engine = begin_engine(start)
    for _ in range(2):
        gateway = begin_gateway(start, engine.grpc_url, up=1)
        gateway.process.wait_for(lambda: is_live(gateway), what="its KV events are followed")  # noqa: B023
        httpx.post(f"{gateway.url}/v1/completions", json=CALL | {"prompt": "x" * 100}, timeout=20)
        gateway.process.wait_for(lambda: kv(gateway)["blocks"] == 6, what="it knows the blocks of the prompt")  # noqa: B023
        gateway.process.signal(signal.SIGTERM)
        assert gateway.process.wait(within_s=10) == 0
        gateway.process.assert_nothing_left(ports=[gateway.port, gateway.port + 1])


def test_a_worker_that_dies_in_the_middle_of_an_answer_ends_it_with_an_error(start: Start) -> None:
    engine = begin_engine(start)
    gateway = begin_gateway(start, engine.http_worker, up=1)
    call = CALL | {"max_tokens": 2000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{gateway.url}/v1/completions", json=call, timeout=20) as answer:
        lines = (line for line in answer.iter_lines() if line)
        next(lines)
        engine.process.signal(signal.SIGKILL)
        *_, last = lines
    assert "error" in last


def test_a_dead_worker_s_share_goes_to_the_living(start: Start) -> None:
    engine = begin_engine(start)
    dead = f"http://127.0.0.1:{free_ports((0,))}"
    gateway = begin_gateway(start, dead, engine.grpc_url, up=1)
    answers: list[int] = []
    threads = [threading.Thread(target=lambda: answers.append(complete(gateway).status_code)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert answers == [200] * 8


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (("--worker", "ftp://x:1"), 2, "ftp://x:1"),
        (("--policy", "magic"), 2, "--policy"),
    ],
)
def test_a_gateway_that_cannot_start_says_why_in_one_line(
    start: Start, words: tuple[str, ...], code: int, sentence: str
) -> None:
    port = free_ports((0, 1))
    process = start("gateway", "--port", str(port), "--grpc-port", str(port + 1), "--log-level", "error", *words)
    assert process.wait(within_s=20) == code
    assert sentence in process.said
    assert "Traceback" not in process.said
    process.assert_nothing_left(ports=[port, port + 1])


def test_a_port_in_use_is_one_line_with_port_and_option(start: Start) -> None:
    gateway = begin_gateway(start)
    other = free_ports((0,))
    for words, option in (
        (("--port", str(gateway.port), "--grpc-port", str(other)), "--port"),
        (("--port", str(other), "--grpc-port", str(gateway.port + 1)), "--grpc-port"),
    ):
        process = start("gateway", "--log-level", "error", *words)
        assert process.wait(within_s=20) == 1
        taken = gateway.port + (option == "--grpc-port")
        assert process.said == f"kvherd: port {taken} is in use; choose another with {option}\n"


def kv(gateway: GatewayProcess) -> dict[str, Any]:
    state: dict[str, Any] = workers_of(gateway.url)[0]["kv"]  # type: ignore[assignment]
    return state


def is_live(gateway: GatewayProcess) -> bool:
    return bool(kv(gateway)["state"] == "live")
