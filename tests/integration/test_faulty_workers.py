"""A gateway before worker processes that are killed, stand still, reset and half-close, over real sockets."""

import asyncio
import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any

import httpx
import pytest

from kvherd.testing.herds import BeginOdd, EngineProcess, GatewayProcess, Start, begin_engine, begin_gateway, get
from kvherd.testing.patience import until
from kvherd.testing.processes import wait_until
from kvherd.testing.raw_http import RawClient

pytestmark = pytest.mark.engine

PATIENCE_S = 60.0
ENDLESS = ("--max-context-tokens", "60000", "--kv-tokens", "131072")
"""Answers of the tiny model that outlast any test."""


def complete(gateway: GatewayProcess, **more: object) -> httpx.Response:
    call = {"model": "m", "prompt": "hello", "max_tokens": 4} | more
    return httpx.post(f"{gateway.url}/v1/completions", json=call, timeout=PATIENCE_S)


def worker(gateway: GatewayProcess, url: str) -> dict[str, Any]:
    """As the gateway sees it; empty once it has left."""
    return next((one for one in gateway.workers() if one["url"] == url), {})


def change(gateway: GatewayProcess, url: str, **what: object) -> None:
    httpx.patch(f"{gateway.url}/workers/{worker(gateway, url)['id']}", json=what, timeout=PATIENCE_S).raise_for_status()


@pytest.mark.parametrize("mood", ["die", "die-in-head", "hang", "stand-still", "reset", "half-close"])
def test_what_a_worker_does_before_its_first_byte_costs_a_client_nothing(
    start: Start, begin: BeginOdd, mood: str
) -> None:
    odd, well = begin(mood), begin("well")
    policy = ("--policy", "round_robin", "--first-byte-timeout", "8")
    gateway = begin_gateway(start, odd.url, well.url, up=2, options=policy)
    answers = [complete(gateway) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200] * 2
    assert {answer.headers["x-kvherd-worker"] for answer in answers} == {well.url}
    assert worker(gateway, odd.url)["failures_total"] >= 1


@pytest.mark.parametrize("mood", ["die-in-body", "reset-in-body", "half-close-in-body"])
def test_what_a_worker_does_after_its_first_byte_ends_the_stream_with_an_error_event(
    start: Start, begin: BeginOdd, mood: str
) -> None:
    odd = begin(mood)
    gateway = begin_gateway(start, odd.url, up=1, options=("--policy", "round_robin"))
    first, last = (line for line in complete(gateway, stream=True).text.split("\n\n") if line)
    assert "well" in first
    assert odd.url in json.loads(last.removeprefix("data: "))["error"]["message"]


def test_without_a_second_worker_a_client_is_told_what_the_only_one_did(start: Start, begin: BeginOdd) -> None:
    odd = begin("reset")
    gateway = begin_gateway(start, odd.url, up=1, options=("--policy", "round_robin"))
    answer = complete(gateway)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_worker")
    assert odd.url in answer.json()["error"]["message"]
    assert int(answer.headers["retry-after"]) > 0


def test_all_workers_go_down_and_come_up_again(start: Start, begin: BeginOdd) -> None:
    workers = [begin("well"), begin("well")]
    gateway = begin_gateway(start, *(one.url for one in workers), up=2, options=("--policy", "round_robin"))
    for one in workers:
        one.process.signal(signal.SIGKILL)
        one.process.wait(within_s=10)
    answer = complete(gateway)
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 0
    gateway.process.wait_for(lambda: get(f"{gateway.url}/ready")[0] == 503, what="it is not ready")
    assert get(f"{gateway.url}/health")[0] == 200
    again = [begin("well", one.port) for one in workers]
    gateway.process.wait_for(lambda: gateway.has_up(2), what="both are back")
    answers = [complete(gateway) for _ in range(4)]
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.headers["x-kvherd-worker"] for answer in answers} == {one.url for one in again}


BODY = b'{"model":"m","prompt":"hello"}'
ASK = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
IN_TURN = ("--policy", "round_robin")


async def looked(look: Callable[[], bool]) -> None:
    """Wait until it is so. What looks waits for another process, and this one's clients are to go on."""
    async with asyncio.timeout(PATIENCE_S):
        while not await asyncio.to_thread(look):  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.02)


async def test_a_worker_that_is_killed_under_steady_load_costs_nobody_an_answer(start: Start, begin: BeginOdd) -> None:
    """Sixty clients pipeline, so that about thirty requests are under way at each worker all the time."""
    killed, well = begin("well-later"), begin("well-later")
    gateway = begin_gateway(start, killed.url, well.url, up=2, options=IN_TURN)
    answers: list[int] = []
    enough = asyncio.Event()

    async def client() -> None:
        async with RawClient(gateway.port) as one:
            one.send(ASK)
            while not enough.is_set():
                one.send(ASK)
                answers.append((await one.answer(within_s=PATIENCE_S)).status)
            answers.append((await one.answer(within_s=PATIENCE_S)).status)

    async with asyncio.TaskGroup() as group:
        for _ in range(60):
            group.create_task(client())
        await until(lambda: len(answers) > 200, within_s=PATIENCE_S)
        await looked(lambda: worker(gateway, killed.url)["outstanding"] > 10)
        killed.process.signal(signal.SIGKILL)
        before = len(answers)
        await until(lambda: len(answers) > before + 200, within_s=PATIENCE_S)
        enough.set()
    assert set(answers) == {200}
    assert worker(gateway, killed.url)["failures_total"] > 0, "they were under way there"


async def test_a_burst_at_a_worker_that_is_killed_is_answered_by_another_though_it_was_quiet_before(
    start: Start, begin: BeginOdd
) -> None:
    killed, well = begin("hang"), begin("well")
    gateway = begin_gateway(start, killed.url, well.url, up=2, options=IN_TURN)
    change(gateway, well.url, draining=True)
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(RawClient(gateway.port)) for _ in range(80)]
        for one in clients:
            one.send(ASK)
        await looked(lambda: worker(gateway, killed.url)["outstanding"] == 80)
        await asyncio.to_thread(change, gateway, well.url, draining=False)
        killed.process.signal(signal.SIGKILL)
        answers = [await one.answer(within_s=PATIENCE_S) for one in clients]
    assert {(one.status, one.headers["x-kvherd-worker"]) for one in answers} == {(200, well.url)}


@contextmanager
def under_way(gateway: GatewayProcess, at: str, **more: object) -> Iterator[list[httpx.Response]]:
    """A request that has been sent to that worker; its answer is there on leaving."""
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(complete(gateway, **more)))
    asking.start()
    gateway.process.wait_for(lambda: worker(gateway, at)["outstanding"] == 1, what="the request is on its way")
    yield answers
    asking.join(PATIENCE_S)
    assert not asking.is_alive()


def told(engine: EngineProcess, kind: str) -> tuple[str, str]:
    """As an option has it, and as the gateway calls it."""
    return (engine.grpc_url, engine.grpc_url) if kind == "grpc" else (engine.http_worker, engine.url)


@pytest.mark.parametrize("kind", ["grpc", "http"])
def test_an_engine_that_stands_still_costs_its_requests_some_time_and_is_taken_back_when_it_goes_on(
    start: Start, kind: str
) -> None:
    """1. It is stopped, accepts a request and never answers. 2. It is found to be down. 3. It goes on. 4. It is stopped
    again, has a request, and is killed before its first byte.
    """
    engines = [begin_engine(start), begin_engine(start)]
    (first, first_url), (second, second_url) = (told(engine, kind) for engine in engines)
    gateway = begin_gateway(start, first, second, up=2, options=("--first-byte-timeout", "10"))

    def stopped_with_a_request(*then: signal.Signals) -> None:
        change(gateway, second_url, draining=True)
        engines[0].process.signal(signal.SIGSTOP)
        with under_way(gateway, first_url, model="tiny") as answers:
            change(gateway, second_url, draining=False)
            for each in then:
                engines[0].process.signal(each)
        assert (answers[0].status_code, answers[0].headers["x-kvherd-worker"]) == (200, second_url)

    stopped_with_a_request()
    gateway.process.wait_for(lambda: worker(gateway, first_url)["state"] == "down", what="its probes fail")
    assert complete(gateway, model="tiny").headers["x-kvherd-worker"] == second_url
    engines[0].process.signal(signal.SIGCONT)
    gateway.process.wait_for(lambda: gateway.has_up(2), what="it is back")
    change(gateway, second_url, draining=True)
    assert complete(gateway, model="tiny").headers["x-kvherd-worker"] == first_url
    stopped_with_a_request(signal.SIGKILL)


@pytest.mark.parametrize("kind", ["grpc", "http"])
def test_an_engine_that_is_killed_in_a_stream_ends_it_with_an_error_event(start: Start, kind: str) -> None:
    engine = begin_engine(start, *ENDLESS)
    gateway = begin_gateway(start, told(engine, kind)[0], up=1)
    call = {"model": "tiny", "prompt": "x", "max_tokens": 50_000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{gateway.url}/v1/completions", json=call, timeout=PATIENCE_S) as answer:
        lines = (line for line in answer.iter_lines() if line)
        next(lines)
        engine.process.signal(signal.SIGKILL)
        *_, last = lines
    assert "error" in json.loads(last.removeprefix("data: "))


@pytest.mark.parametrize("kind", ["grpc", "http"])
def test_a_worker_that_is_removed_ends_its_streams_with_an_error_event_when_its_time_is_over(
    start: Start, kind: str
) -> None:
    engine = begin_engine(start, *ENDLESS)
    option, url = told(engine, kind)
    gateway = begin_gateway(start, option, up=1)
    call = {"model": "tiny", "prompt": "x", "max_tokens": 50_000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{gateway.url}/v1/completions", json=call, timeout=PATIENCE_S) as answer:
        lines = (line for line in answer.iter_lines() if line)
        next(lines)
        left: list[httpx.Response] = []
        path = f"{gateway.url}/workers/{worker(gateway, url)['id']}?timeout=1"
        removing = threading.Thread(target=lambda: left.append(httpx.delete(path, timeout=PATIENCE_S)))
        removing.start()
        gateway.process.wait_for(lambda: worker(gateway, url).get("state") != "up", what="it drains")
        assert complete(gateway, model="tiny").status_code == 503, "it takes no new request"
        *_, last = lines
        removing.join(PATIENCE_S)
    assert "error" in json.loads(last.removeprefix("data: "))
    assert left[0].json()["drained"] is False
    wait_until(lambda: gateway.workers() == [], within_s=PATIENCE_S, what="it has left")
