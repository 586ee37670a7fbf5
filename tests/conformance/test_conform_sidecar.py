"""What the HTTP beside an engine's gRPC promises."""

import json
import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvherd.testing.engine_client import EngineClient, fresh_prompt
from kvherd.testing.engines_under_test import EngineUnderTest

BAD_FIELDS = [
    ("output_dir", 7),
    ("output_dir", ["/tmp"]),
    ("start_step", "soon"),
    ("start_step", -1),
    ("num_steps", "five"),
    ("num_steps", 5.5),
    ("num_steps", True),
    ("num_steps", -1),
    ("num_steps", [5]),
    ("num_steps", 10**30),
    ("activities", "CPU"),
    ("activities", ["CAFFEINE"]),
    ("activities", [1]),
    ("with_stack", "perhaps"),
    ("with_stack", 2),
    ("record_shapes", {}),
    ("profile_by_stage", "no"),
    ("merge_profiles", 1.5),
    ("profile_prefix", 5),
    ("profile_prefix", "../up"),
    ("profile_stages", "prefill"),
    ("profile_stages", ["breakfast"]),
    ("profile_id", {"a": 1}),
    ("colour", "blue"),
]
BAD_TIMES = ["-1", "-0.001", "nan", "inf", "-inf", "soon", "3600.5", "1e12", ""]


def message(answer: httpx.Response) -> str:
    """The words of a refusal, whatever else there is beside them."""
    document = answer.json()
    return str(document.get("message") or document["error"]["message"])


def serves_on(engine: EngineClient) -> bool:
    """It takes orders and generates, and no profile was left on."""
    return (
        engine.post("/stop_profile").status_code != 200
        and engine.flush(10).answer.success
        and engine.complete([1, 2, 3]).completion_tokens == 4
    )


# --- what it tells -----------------------------------------------------------------------------------


def test_it_is_one_port_above_grpc(sidecar: EngineClient) -> None:
    assert sidecar.address.sidecar_port == sidecar.address.port + 1
    assert sidecar.get("/health").status_code == 200


def test_its_metrics_have_the_names_of_sglang_s_boards(sidecar: EngineClient) -> None:
    sidecar.complete(fresh_prompt())
    page = sidecar.get("/metrics")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/plain")
    names = ("num_running_reqs", "num_queue_reqs", "token_usage", "prompt_tokens_total", "gen_throughput")
    assert [name for name in names if f"sglang:{name}" not in page.text] == []


def test_its_server_information_is_json(sidecar: EngineClient) -> None:
    answer = sidecar.get("/server_info")
    assert answer.status_code == 200
    assert isinstance(answer.json(), dict)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/metrics"),
        ("GET", "/start_profile"),
        ("GET", "/stop_profile"),
        ("POST", "/health"),
        ("PUT", "/flush_cache"),
    ],
)
def test_a_method_that_does_not_fit_is_a_405_and_orders_nothing(sidecar: EngineClient, method: str, path: str) -> None:
    answer = sidecar.http.request(method, path)
    assert answer.status_code == 405
    assert sidecar.post("/stop_profile").status_code == 409


def test_a_path_that_is_not_there_is_a_404(sidecar: EngineClient) -> None:
    assert sidecar.get("/v1/chat/completions").status_code == 404


# --- flushes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_an_idle_engine_flushes(sidecar: EngineClient, method: str) -> None:
    prompt = fresh_prompt()
    sidecar.complete(prompt, rank=0)
    assert sidecar.complete(prompt, rank=0).cached_tokens > 0
    answer = sidecar.http.request(method, "/flush_cache")
    assert answer.status_code == 200
    assert sidecar.complete(prompt, rank=0).cached_tokens == 0


@pytest.mark.parametrize("timeout_s", [0, 0.3])
def test_a_busy_engine_is_a_400_that_says_whether_it_expired_and_what_is_busy(
    sidecar: EngineClient, timeout_s: float
) -> None:
    with sidecar.busy():
        answer = sidecar.post(f"/flush_cache?timeout={timeout_s:g}")
    assert answer.status_code == 400
    assert "running" in message(answer)
    assert ("within" in message(answer)) == bool(timeout_s)


@pytest.mark.parametrize("seconds", BAD_TIMES)
def test_a_time_that_nobody_can_wait_is_a_400_at_once(sidecar: EngineClient, seconds: str) -> None:
    answer = sidecar.post(f"/flush_cache?timeout={seconds}")
    assert answer.status_code == 400
    assert "timeout" in message(answer)


def test_orders_to_a_rank_that_dies_are_a_503_at_once(
    mortal: EngineUnderTest, sidecar: EngineClient, tmp_path: Path
) -> None:
    pid = mortal.rank_pid(sidecar.address.ranks - 1)
    os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(3) as pool:
        body = {"output_dir": str(tmp_path)}
        asking = [pool.submit(sidecar.post, path) for path in ("/flush_cache?timeout=60", "/stop_profile")]
        asking.append(pool.submit(sidecar.post, "/start_profile", body))
        sidecar.until_under_way(3)
        os.kill(pid, signal.SIGKILL)
        assert [each.result().status_code for each in asking] == [503] * 3


def test_a_rank_that_gives_no_answer_is_a_504(mortal: EngineUnderTest, sidecar: EngineClient) -> None:
    pid = mortal.rank_pid(sidecar.address.ranks - 1)
    os.kill(pid, signal.SIGSTOP)
    try:
        answer = sidecar.post("/flush_cache?timeout=0.3")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert answer.status_code == 504
    assert "no answer" in message(answer)
    assert serves_on(sidecar)


# --- bodies -----------------------------------------------------------------------------------


def test_a_profile_starts_and_stops_with_no_body_at_all(sidecar: EngineClient) -> None:
    assert sidecar.post("/start_profile").status_code == 200
    assert sidecar.post("/stop_profile").status_code == 200
    assert serves_on(sidecar)


@pytest.mark.parametrize(
    "text", ['{"num_steps": }', '{"num_steps": 5', "five", '{"num_steps": 5}}', '{"output_dir": "\\ud8"}']
)
def test_a_body_that_is_no_json_is_a_400_that_says_where(sidecar: EngineClient, text: str) -> None:
    answer = sidecar.post("/start_profile", content=text.encode())
    assert answer.status_code == 400
    assert "column" in message(answer)
    assert serves_on(sidecar)


@pytest.mark.parametrize("body", [[], "CPU", 5, True, [{"num_steps": 5}]], ids=str)
def test_a_body_that_is_no_object_is_a_400(sidecar: EngineClient, body: Any) -> None:
    assert sidecar.post("/start_profile", content=json.dumps(body).encode()).status_code == 400
    assert serves_on(sidecar)


@pytest.mark.parametrize(("field", "value"), BAD_FIELDS, ids=str)
def test_a_field_that_is_wrong_is_a_400_that_names_it(sidecar: EngineClient, field: str, value: Any) -> None:
    answer = sidecar.post("/start_profile", {field: value})
    assert answer.status_code == 400
    assert field in message(answer)
    assert serves_on(sidecar)


def test_a_stop_takes_no_field(sidecar: EngineClient) -> None:
    answer = sidecar.post("/stop_profile", {"profile_id": "x"})
    assert answer.status_code == 400
    assert "profile_id" in message(answer)


def test_numbers_that_come_as_text_are_taken_as_numbers(sidecar: EngineClient, tmp_path: Path) -> None:
    body = {"output_dir": str(tmp_path), "num_steps": "5", "start_step": "0", "activities": ["CPU"]}
    assert sidecar.post("/start_profile", body).status_code == 200
    for rank in range(sidecar.address.ranks):
        sidecar.complete(fresh_prompt(), tokens=8, rank=rank)
    sidecar.until(lambda: list(tmp_path.rglob("*.trace.json*")) != [], "it ended by itself")
    assert serves_on(sidecar)


def raw(engine: EngineClient, data: bytes) -> bytes:
    """What comes back until the other side is done, or says that it wants no more."""
    with socket.create_connection((engine.address.host, engine.address.sidecar_port or 0)) as connection:
        connection.settimeout(engine.patience_s)
        connection.sendall(data)
        return connection.recv(65536)


def test_a_body_in_chunks_is_read(sidecar: EngineClient) -> None:
    head = b"POST /start_profile HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    assert raw(sidecar, head + b'7\r\n{"colou\r\n8\r\nr": "red\r\n2\r\n"}\r\n0\r\n\r\n').startswith(b"HTTP/1.1 400")
    assert raw(sidecar, head + b'11\r\n{"num_steps": 99}\r\n0\r\n\r\n').startswith(b"HTTP/1.1 200")
    assert sidecar.post("/stop_profile").status_code == 200


@pytest.mark.parametrize("path", ["/start_profile", "/stop_profile", "/flush_cache"])
def test_a_body_of_100_mb_is_a_413(sidecar: EngineClient, path: str) -> None:
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {100 * 2**20}\r\n\r\n"
    assert raw(sidecar, head.encode()).startswith(b"HTTP/1.1 413")
    assert serves_on(sidecar)


def test_100_mb_in_chunks_are_a_413_before_they_have_come(sidecar: EngineClient) -> None:
    head = b"POST /start_profile HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    with socket.create_connection((sidecar.address.host, sidecar.address.sidecar_port or 0)) as connection:
        connection.settimeout(sidecar.patience_s)
        connection.sendall(head + 32 * piece)
        assert connection.recv(65536).startswith(b"HTTP/1.1 413")
        with suppress(OSError):  # it may hang up, or read on and forget
            for _ in range(1600):
                connection.sendall(piece)
    assert serves_on(sidecar)


def test_a_caller_who_hangs_up_within_his_body_costs_nothing(sidecar: EngineClient) -> None:
    with socket.create_connection((sidecar.address.host, sidecar.address.sidecar_port or 0)) as connection:
        connection.sendall(b'POST /start_profile HTTP/1.1\r\nhost: localhost\r\ncontent-length: 20\r\n\r\n{"num')
    assert serves_on(sidecar)


# --- one profile at a time -----------------------------------------------------------------------------------


def test_a_second_start_and_a_stop_of_none_are_a_409(sidecar: EngineClient, tmp_path: Path) -> None:
    body = {"output_dir": str(tmp_path)}
    assert sidecar.post("/stop_profile").status_code == 409
    assert sidecar.post("/start_profile", body).status_code == 200
    second = sidecar.post("/start_profile", body)
    assert sidecar.post("/stop_profile").status_code == 200
    assert second.status_code == 409
    assert sidecar.post("/stop_profile").status_code == 409


def test_a_rank_that_refuses_is_a_400_with_its_reason(sidecar: EngineClient, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    answer = sidecar.post("/start_profile", {"output_dir": str(tmp_path / "file" / "in")})
    sidecar.post("/stop_profile")
    assert answer.status_code == 400
    assert "Not a directory" in message(answer)
    assert serves_on(sidecar)


def test_grpc_and_sidecar_order_the_same_profile(sidecar: EngineClient, tmp_path: Path) -> None:
    assert sidecar.start_profile(output_dir=str(tmp_path), activities=["CPU"]).answer.success
    assert sidecar.post("/start_profile").status_code == 409
    assert sidecar.post("/stop_profile").status_code == 200
