"""A gateway as an operator runs it: workers and keys in a file, TLS before it, a drain in the middle of a stream."""

import json
import signal
import ssl
import threading
from pathlib import Path

import httpx
import pytest

from kvherd.testing.certificates import Authority
from kvherd.testing.herds import BeginOdd, Start, begin_engine, begin_gateway, get
from kvherd.testing.processes import free_ports, wait_until

pytestmark = pytest.mark.engine

PATIENCE_S = 60.0
OURS = {"authorization": "Bearer secret-of-the-web"}
BOSS = {"authorization": "Bearer secret-of-the-boss"}


def test_a_worker_of_the_file_is_drained_while_it_streams_and_nothing_is_cut_off(start: Start, tmp_path: Path) -> None:
    engine = begin_engine(start)
    files = Authority().issue(tmp_path, "gateway")
    (tmp_path / "web.key").write_text("secret-of-the-web\n")
    (tmp_path / "boss.key").write_text("secret-of-the-boss\n")
    config, lines = tmp_path / "herd.toml", tmp_path / "access.jsonl"
    config.write_text(
        f'[[workers]]\nurl = "{engine.grpc_url}"\n[aliases]\ngpt = "tiny"\n'
        f'[[keys]]\nname = "web"\nfile = "{tmp_path / "web.key"}"\n'
    )
    port = free_ports((0, 1))
    words = ["--config", str(config), "--port", str(port), "--grpc-port", str(port + 1), "--access-log", str(lines)]
    words += ["--tls-cert", str(files.certificate), "--tls-key", str(files.key)]
    gateway = start("gateway", *words, "--admin-key-file", str(tmp_path / "boss.key"))
    context = ssl.create_default_context(cafile=str(files.authority))
    base = f"https://localhost:{port}"
    with httpx.Client(base_url=base, verify=context, timeout=PATIENCE_S) as client:

        def ready() -> bool:
            try:
                return client.get("/ready").status_code == 200
            except httpx.TransportError:
                return False

        gateway.wait_for(ready, what="the gateway has its worker")
        told: list[str] = []

        def stream() -> None:
            body = {"model": "gpt", "prompt": "x" * 20, "max_tokens": 600, "ignore_eos": True, "stream": True}
            with (
                httpx.Client(base_url=base, verify=context, timeout=PATIENCE_S) as other,
                other.stream("POST", "/v1/completions", json=body, headers=OURS) as answer,
            ):
                for line in answer.iter_lines():
                    told.append(line)  # noqa: PERF402 - another thread looks at what came so far

        streaming = threading.Thread(target=stream)
        streaming.start()
        wait_until(lambda: len(told) > 2, within_s=PATIENCE_S, what="the stream has begun")
        (worker,) = client.get("/workers", headers=BOSS).json()["workers"]
        left = client.delete(f"/workers/{worker['id']}?timeout=60", headers=BOSS, timeout=2 * PATIENCE_S).json()
        streaming.join(PATIENCE_S)
        assert not streaming.is_alive()
        assert left["drained"] is True
        assert [line for line in told if line][-1] == "data: [DONE]"
        gone = client.post("/v1/completions", json={"model": "gpt", "prompt": "x"}, headers=OURS)
        assert gone.status_code == 503
    wait_until(lambda: lines.read_text().count("\n") == 2, within_s=PATIENCE_S, what="both requests have a line")
    first, second = map(json.loads, lines.read_text().splitlines())
    assert (first["key"], first["outcome"], first["worker"]) == ("web", "answered", engine.grpc_url)
    assert (second["key"], second["outcome"], second["status"]) == ("web", "NoWorker", 503)
    assert "secret" not in lines.read_text() + gateway.said


def test_a_gateway_that_is_asked_to_stop_takes_no_more_and_lets_its_stream_end(start: Start) -> None:
    engine = begin_engine(start)
    gateway = begin_gateway(start, engine.http_worker, up=1)
    body = {"model": "tiny", "prompt": "x" * 20, "max_tokens": 120, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{gateway.url}/v1/completions", json=body, timeout=PATIENCE_S) as answer:
        lines = (line for line in answer.iter_lines() if line)
        next(lines)
        gateway.process.signal(signal.SIGTERM)
        wait_until(lambda: get(f"{gateway.url}/health")[0] == 0, within_s=PATIENCE_S, what="nobody else is let in")
        *_, last = lines
    assert last == "data: [DONE]"
    assert gateway.process.wait(within_s=PATIENCE_S) == 0
    gateway.process.assert_nothing_left(ports=[gateway.port, gateway.port + 1])


def test_a_name_of_this_machine_s_resolver_is_a_worker_at_each_of_its_addresses(start: Start, begin: BeginOdd) -> None:
    odd = begin("well")
    named = f"http://localhost:{odd.port},resolve=1"
    gateway = begin_gateway(start, named, up=1, options=("--policy", "round_robin"))
    assert [one["url"] for one in gateway.workers() if one["state"] == "up"] == [odd.url]
    answer = httpx.post(f"{gateway.url}/v1/completions", json={"model": "m", "prompt": "x"}, timeout=PATIENCE_S)
    assert (answer.status_code, answer.headers["x-kvherd-worker"]) == (200, odd.url)


def test_two_models_are_served_behind_one_gateway_each_by_its_own_workers(start: Start) -> None:
    engines = {name: begin_engine(start, "--served-model-name", name) for name in ("large", "small")}
    gateway = begin_gateway(start, *(engine.http_worker for engine in engines.values()), up=2)
    with httpx.Client(base_url=gateway.url, timeout=PATIENCE_S) as client:
        assert {one["id"] for one in client.get("/v1/models").json()["data"]} == set(engines)
        for name, engine in engines.items():
            for _ in range(2):
                answer = client.post("/v1/completions", json={"model": name, "prompt": "x" * 40, "max_tokens": 2})
                assert (answer.status_code, answer.headers["x-kvherd-worker"]) == (200, engine.url)
        unnamed = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})
        assert (unnamed.status_code, unnamed.json()["error"]["param"]) == (400, "model")
        engines["small"].process.signal(signal.SIGKILL)
        gateway.process.wait_for(lambda: client.get("/ready").status_code == 503, what="one model has nobody")
        assert client.post("/v1/completions", json={"model": "small", "prompt": "x"}).status_code == 503
        assert client.post("/v1/completions", json={"model": "large", "prompt": "x"}).status_code == 200
