"""One gateway over stock vLLM and SGLang and kvherd's engines at once: orders and their answers, and what it costs when
one of them is ill.

`make test-fleet` installs them and runs these tests. Each leaves the fleet in working order, but for the last.
"""

import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest

from kvherd.testing.herds import Start, begin_engine
from kvherd.testing.processes import wait_until
from kvherd.testing.stock_engines import MODEL
from kvherd.testing.stock_fleets import NAMES, StockFleet, stock_fleet
from kvherd.testing.stock_herds import ANSWER_S, Talks, chat_until_exact

pytestmark = [pytest.mark.peers, pytest.mark.timeout(900)]

KINDS = {
    "bridged": ("vllm-http", 1),
    "ranked": ("vllm-http", 2),
    "sglang": ("sglang-http", 1),
    "on_grpc": ("sglang-grpc", 1),
    "ours": ("sglang-grpc", 2),
    "ours_http": ("kvherd-http", 1),
}
FLUSHED = {name: "unsupported" if name == "ranked" else "done" for name in NAMES}
"""Stock vLLM can be flushed in its development mode only."""
PROFILED = {name: "unsupported" if name == "bridged" else "done" for name in NAMES}
"""Stock vLLM can be profiled with a profiler configured only."""
HELLO = [{"role": "system", "content": "You answer in one word. " * 16}, {"role": "user", "content": "Hello!"}]
LONG_S = 300.0
PREFIX = "of-one"


@pytest.fixture(scope="module")
def fleet() -> Iterator[StockFleet]:
    with TemporaryDirectory(prefix="kht-", dir="/tmp") as folder, stock_fleet(Path(folder)) as fleet:
        yield fleet


def outcomes(results: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: result["outcome"] for name, result in results.items()}


def flush(fleet: StockFleet, timeout_s: float) -> tuple[httpx.Response, dict[str, dict[str, Any]]]:
    return fleet.ordered(f"/flush_cache?timeout={timeout_s:g}", timeout_s=timeout_s + 30)


@contextmanager
def only(fleet: StockFleet, name: str) -> Iterator[None]:
    """Requests that are new go to this worker."""
    others = [fleet.urls[other] for other in fleet.workers() if other != name]
    try:
        for url in others:
            set_draining(fleet, url, draining=True)
        yield
    finally:
        for url in others:
            set_draining(fleet, url, draining=False)


def set_draining(fleet: StockFleet, url: str, *, draining: bool) -> None:
    answer = httpx.patch(f"{fleet.gateway.url}/workers/{url}", json={"draining": draining}, timeout=30)
    assert answer.status_code == 200, answer.text


def told_metrics(fleet: StockFleet) -> set[str]:
    """Whose engine's metrics are in the page of all."""
    page = httpx.get(f"{fleet.gateway.url}/engine_metrics", timeout=60).text
    return {name for name, url in fleet.urls.items() if f'worker="{url}"' in page}


def test_every_worker_is_known_for_what_it_is(fleet: StockFleet) -> None:
    workers = fleet.workers()
    assert {name: (one["kind"], one["ranks"]) for name, one in workers.items()} == KINDS
    assert {one["state"] for one in workers.values()} == {"up"}
    told = httpx.get(f"{fleet.gateway.url}/server_info").json()
    assert sorted(told["workers"]) == sorted(fleet.urls.values())
    assert told["models"] == [MODEL]
    loads = httpx.get(f"{fleet.gateway.url}/get_loads").json()["loads"]
    assert {one["url"] for one in loads} == set(fleet.urls.values())
    assert all(one["capacity_tokens"] > 0 for one in loads), loads
    wait_until(lambda: told_metrics(fleet) == set(NAMES), within_s=30, what="every engine's metrics are told")


@pytest.mark.parametrize("name", NAMES)
def test_what_it_has_cached_is_predicted_exactly(fleet: StockFleet, name: str) -> None:
    with only(fleet, name):
        assert chat_until_exact(fleet.gateway, HELLO).reported >= 64


def test_chats_of_many_at_once_are_predicted_and_the_audit_finds_no_wrong_one(
    fleet: StockFleet, capsys: pytest.CaptureFixture[str]
) -> None:
    talks = [Talks(seed=seed, at_once=1, block=16) for seed in range(8)]

    def talk(one: Talks) -> None:
        for _ in range(6):
            one.turn(fleet.gateway)

    with ThreadPoolExecutor(len(talks)) as pool:
        list(pool.map(talk, talks))
    audit = httpx.get(f"{fleet.gateway.url}/audit", timeout=30).json()
    told = {one["url"]: (one["decided"], one["wrong"], one["undecided"]) for one in audit["workers"]}
    with capsys.disabled():
        sys.stdout.write(f"\n(decided, wrong, undecided): { {name: told[url] for name, url in fleet.urls.items()} }\n")
    assert sum(wrong for _, wrong, _ in told.values()) == 0, told
    assert audit["fine"] is True, audit


def test_a_flush_is_told_worker_by_worker_and_rank_by_rank(fleet: StockFleet) -> None:
    for name in NAMES:
        with only(fleet, name):
            chat_until_exact(fleet.gateway, HELLO)
    answer, results = flush(fleet, 30)
    assert outcomes(results) == FLUSHED, results
    assert "VLLM_SERVER_DEV_MODE=1" in results["ranked"]["message"]
    assert [(rank["rank"], rank["outcome"]) for rank in results["ours"]["ranks"]] == [(0, "done"), (1, "done")]
    report = answer.json()
    assert (answer.status_code, report["success"]) == (200, False), "all that can did, and one cannot"
    counted = ("workers_flushed", "total_workers", "total_http_workers", "total_grpc_workers")
    assert [report[name] for name in counted] == [5, 6, 4, 2]
    blocks = {name: one["kv"]["blocks"] for name, one in fleet.workers().items()}
    assert {name for name, held in blocks.items() if held} == {"ranked"}, blocks
    for name in NAMES:
        with only(fleet, name):
            told = chat_until_told(fleet, name)
            assert (told > 0) is (name == "ranked"), f"{name} reports {told} cached tokens"


def chat_until_told(fleet: StockFleet, name: str) -> int:
    """The cached tokens that the first answer of the worker reports."""
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 2}
    answer = httpx.post(f"{fleet.gateway.url}/v1/chat/completions", json=body, timeout=ANSWER_S)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-kvherd-worker"] == fleet.urls[name]
    return int((answer.json()["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


@pytest.mark.parametrize("name", ["bridged", "sglang", "on_grpc", "ours_http"])
def test_a_busy_one_refuses_and_is_alone_in_that(fleet: StockFleet, name: str) -> None:
    answer, results = flush_beside(fleet, name)
    assert outcomes(results) == FLUSHED | {name: "refused"}, results
    assert answer.status_code == 207
    wait_until(lambda: fleet.workers()[name]["outstanding"] == 0, within_s=30, what="its client's leaving is seen")
    assert outcomes(flush(fleet, 30)[1]) == FLUSHED, "what nobody waits for ends on the engine"


@contextmanager
def generating(fleet: StockFleet, name: str) -> Iterator[httpx.Response]:
    """A chat that streams from this worker, and has begun; leaving it leaves the answer."""
    messages = [{"role": "user", "content": "Count."}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 900, "ignore_eos": True, "stream": True}
    with only(fleet, name), httpx.Client(timeout=ANSWER_S) as client:
        request = client.build_request("POST", f"{fleet.gateway.url}/v1/chat/completions", json=body)
        answer = client.send(request, stream=True)
        try:
            assert answer.status_code == 200
            assert answer.headers["x-kvherd-worker"] == fleet.urls[name]
            yield answer
        finally:
            answer.close()


def flush_beside(fleet: StockFleet, name: str) -> tuple[httpx.Response, dict[str, dict[str, Any]]]:
    """Flush all at once, while this worker answers a chat. A stock SGLang says that it is well by generating a token,
    and is busy then: so a flush that it refuses is given again.
    """
    for _ in range(5):
        with generating(fleet, name):
            answer, results = flush(fleet, 0)
            busy = fleet.workers()[name]["outstanding"] == 1
        probed = name != "sglang" and results["sglang"]["outcome"] == "refused"
        if busy and not probed:
            return answer, results
    raise AssertionError(f"no answer outlasted a flush that SGLang obeyed; the last: {results}")


def test_one_busy_rank_is_told_from_the_other(fleet: StockFleet) -> None:
    _, results = flush_beside(fleet, "ours")
    assert outcomes(results) == FLUSHED | {"ours": "refused"}, results
    ranks = results["ours"]["ranks"]
    assert sorted(rank["outcome"] for rank in ranks) == ["done", "refused"], ranks
    assert any("running" in rank["message"] for rank in ranks), ranks


@pytest.mark.parametrize("name", NAMES)
def test_one_worker_is_profiled_and_no_other(fleet: StockFleet, name: str) -> None:
    folder = fleet.folder / f"one-{name}"
    where = f"?worker={fleet.urls[name]}"
    begun, started = fleet.ordered(f"/start_profile{where}", timeout_s=LONG_S, **profile_fields(name, folder))
    assert outcomes(started) == {name: PROFILED[name]}, started
    with only(fleet, name):
        chat_until_told(fleet, name)
    _, stopped = fleet.ordered(f"/stop_profile{where}", timeout_s=LONG_S)
    assert outcomes(stopped) == {name: PROFILED[name]}, stopped
    if name == "bridged":
        assert begun.status_code == 502
        assert "--profiler-config" in started[name]["message"]
        return
    written = fleet.folder / "vllm" if name == "ranked" else folder
    prefix = PREFIX if name == "ranked" else ""
    wait_until(lambda: has_trace(written, prefix), within_s=60, what=f"{name} has written a trace")


def profile_fields(name: str, folder: Path) -> dict[str, object]:
    """vLLM is told where to write when it starts."""
    if name in ("bridged", "ranked"):
        return {"profile_prefix": PREFIX}
    return {"output_dir": str(folder), "activities": ["CPU"]}


def has_trace(folder: Path, prefix: str) -> bool:
    found = [path for path in folder.rglob("*") if "trace.json" in path.name and prefix in path.name]
    return any(path.stat().st_size for path in found)


def test_all_are_profiled_when_all_is_said_and_who_cannot_says_so(fleet: StockFleet) -> None:
    unnamed, _ = fleet.ordered("/start_profile", timeout_s=30)
    assert unnamed.status_code == 400
    assert "worker=all" in unnamed.json()["error"]["message"]
    _, started = fleet.ordered("/start_profile?worker=all", timeout_s=LONG_S)
    _, stopped = fleet.ordered("/stop_profile?worker=all", timeout_s=LONG_S)
    assert outcomes(started) == PROFILED, started
    assert outcomes(stopped) == PROFILED, stopped


def test_one_that_stands_still_and_one_that_died_cost_their_own_entries_only(fleet: StockFleet, start: Start) -> None:
    fleet.sglang.signal(signal.SIGSTOP)
    try:
        port = fleet.ours_http.port
        fleet.ours_http.process.signal(signal.SIGKILL)
        fleet.ours_http.process.wait(within_s=10)
        began_s = time.monotonic()
        answer, results = flush(fleet, 2)
        assert time.monotonic() - began_s < 2 + 5 + 10
        assert outcomes(results) == FLUSHED | {"sglang": "timed_out", "ours_http": "unreachable"}, results
        assert answer.status_code == 207
        for _ in range(6):
            body = {"model": MODEL, "messages": HELLO, "max_tokens": 2}
            chatted = httpx.post(f"{fleet.gateway.url}/v1/chat/completions", json=body, timeout=ANSWER_S)
            assert chatted.status_code == 200, chatted.text
            assert chatted.headers["x-kvherd-worker"] not in (fleet.urls["sglang"], fleet.urls["ours_http"])
        assert told_metrics(fleet) == set(NAMES) - {"sglang", "ours_http"}
        wait_until(lambda: states(fleet)["ours_http"] == "down", within_s=30, what="the dead one is down")
        wait_until(lambda: states(fleet)["sglang"] == "down", within_s=30, what="the one that stands still is down")
        up = {name for name, state in states(fleet).items() if state == "up"}
        assert up == set(NAMES) - {"sglang", "ours_http"}
        where = f"?worker={fleet.urls['ours']}"
        assert outcomes(fleet.ordered(f"/start_profile{where}", timeout_s=LONG_S)[1]) == {"ours": "done"}
        assert outcomes(fleet.ordered(f"/stop_profile{where}", timeout_s=LONG_S)[1]) == {"ours": "done"}
    finally:
        fleet.sglang.signal(signal.SIGCONT)
    fleet.ours_http = begin_engine(fleet.start, "--model", MODEL, port=port)
    wait_until(lambda: set(states(fleet).values()) == {"up"}, within_s=120, what="all are up again")
    wait_until(fleet.is_followed, within_s=120, what="all are followed again")
    for name in ("sglang", "ours_http"):
        with only(fleet, name):
            chat_until_exact(fleet.gateway, HELLO)


def states(fleet: StockFleet) -> dict[str, str]:
    return {name: one["state"] for name, one in fleet.workers().items()}


def test_a_drain_shows_what_is_left_cuts_nothing_off_and_leaves_the_rest_to_obey_as_one(
    fleet: StockFleet, start: Start
) -> None:
    told: list[str] = []

    def read(answer: httpx.Response) -> None:
        told.extend(answer.iter_lines())

    def worker() -> dict[str, Any]:
        return dict(httpx.get(f"{fleet.gateway.url}/workers/{fleet.urls['ranked']}", timeout=30).json())

    with generating(fleet, "ranked") as answer:
        fleet.ranked.signal(signal.SIGSTOP)  # or the answer might be over before anybody looks
        try:
            reader = threading.Thread(target=read, args=(answer,))
            reader.start()
            drain = start("drain", fleet.urls["ranked"], "--json", "--gateway", fleet.gateway.url)
            wait_until(lambda: worker()["leaves_in_s"] is not None, within_s=60, what="it is on its way out")
            leaving = worker()
        finally:
            fleet.ranked.signal(signal.SIGCONT)
        assert leaving["state"] == "draining"
        assert [one["prompt_tokens"] > 0 for one in leaving["under_way"]] == [True]
        assert drain.wait(within_s=ANSWER_S) == 0, drain.said
        reader.join(ANSWER_S)
    assert json.loads(drain.said)["drained"] is True
    assert [line for line in told if line][-1] == "data: [DONE]"
    assert "ranked" not in fleet.workers()
    answer, results = flush(fleet, 30)
    assert (answer.status_code, answer.json()["success"]) == (200, True), results
    assert outcomes(results) == {name: "done" for name in NAMES if name != "ranked"}
