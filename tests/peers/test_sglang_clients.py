"""SGLang's own clients, unmodified, against the embedded engine and a gateway before it: they flush, profile and load.

`make test-sglang` installs them and runs these tests.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvherd.testing.herds import EngineProcess
from kvherd.testing.processes import OwnedProcess, wait_until
from kvherd.testing.stock_clients import engine_with_a_tokenizer, gateway_over
from kvherd.testing.stock_engines import STUBS, model_directory

pytestmark = [pytest.mark.peers, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    with engine_with_a_tokenizer() as engine:
        yield engine


@pytest.fixture(scope="module", params=["engine", "gateway over http", "gateway over grpc"])
def door(request: pytest.FixtureRequest, engine: EngineProcess) -> Iterator[str]:
    """Where a client goes."""
    if request.param == "engine":
        yield engine.url
        return
    with gateway_over(engine, request.param.removeprefix("gateway over ")) as url:
        yield url


def run(module: str, *words: str) -> str:
    python = Path(os.environ.get("KVHERD_SGLANG", ".venv-sglang")) / "bin" / "python"
    environment = {"PYTHONPATH": str(STUBS), "HF_HUB_OFFLINE": "1"}
    with OwnedProcess([str(python.absolute()), "-m", module, *words], environment=environment) as client:
        assert client.wait(within_s=400) == 0, client.said
        return client.said


def steps(directory: Path) -> list[dict[str, Any]]:
    wait_until(lambda: not list(directory.glob("*/*.part")), within_s=20, what="the trace is whole")
    [trace] = directory.glob("*/*.trace.json")
    return [each for each in json.loads(trace.read_bytes()) if each["name"].startswith("step ")]


LOAD = ("--dataset-name", "random-ids", "--random-input-len", "40", "--random-output-len", "8")


def test_bench_serving_flushes_loads_and_profiles(door: str, tmp_path: Path) -> None:
    said = run(
        "sglang.bench_serving",
        *("--backend", "sglang-oai", "--base-url", door, "--model", str(model_directory())),
        *("--tokenizer", str(model_directory()), *LOAD, "--random-range-ratio", "1.0", "--num-prompts", "3"),
        *("--flush-cache", "--profile", "--profile-output-dir", str(tmp_path), "--output-file", str(tmp_path / "out")),
    )
    assert "Profiler started" in said
    assert "Profiler stopped" in said
    assert "Successful requests:                     3" in said
    assert {each["args"]["phase"] for each in steps(tmp_path)} >= {"prefill", "decode"}


@pytest.mark.parametrize("backend", ["sglang", "sglang-oai", "sglang-oai-chat", "vllm", "vllm-chat"])
def test_every_backend_of_bench_serving_has_its_requests_answered(door: str, backend: str, tmp_path: Path) -> None:
    said = run(
        "sglang.bench_serving",
        *("--backend", backend, "--base-url", door, "--model", str(model_directory())),
        *("--tokenizer", str(model_directory()), *LOAD, "--random-range-ratio", "1.0", "--num-prompts", "4"),
        *("--output-file", str(tmp_path / "out"), "--output-details"),
    )
    assert "Successful requests:                     4" in said
    result = json.loads((tmp_path / "out").read_text())
    assert result["output_lens"] == [8] * 4
    assert not any(result["errors"])


def test_bench_one_batch_server_flushes_loads_and_profiles(door: str, tmp_path: Path) -> None:
    said = run(
        "sglang.bench_one_batch_server",
        *("--model-path", "None", "--base-url", door, "--dataset-name", "random-ids"),
        *("--batch-size", "2", "--input-len", "32", "--output-len", "8", "--skip-warmup"),
        *("--profile", "--profile-output-dir", str(tmp_path), "--result-filename", str(tmp_path / "result.jsonl")),
    )
    assert "output throughput" in said
    assert len(steps(tmp_path)) == 5


@pytest.mark.parametrize("where", ["sidecar", "http"])
def test_sglang_s_profiler_profiles(engine: EngineProcess, tmp_path: Path, where: str) -> None:
    url = engine.sidecar_url if where == "sidecar" else engine.url
    run("sglang.profiler", "--url", url, "--num-steps", "1", "--output-dir", str(tmp_path))
    [begun] = tmp_path.glob("*/*.part")
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 2}}
    httpx.post(f"{engine.url}/generate", json=body, timeout=60).raise_for_status()
    wait_until(lambda: not begun.exists(), within_s=20, what="the profile has ended by itself")
    assert len(steps(tmp_path)) == 1
