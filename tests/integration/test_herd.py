"""A herd as its user has it: one gateway, one engine over gRPC, one over HTTP, caches that are used and shown."""

import json
import uuid
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from kvherd.cli.main import main
from kvherd.testing.herds import HerdProcess, get, workers_of
from kvherd.testing.processes import wait_until

pytestmark = pytest.mark.engine

BLOCK = 16


@pytest.fixture
def gateway(herd: HerdProcess) -> str:
    return herd.url


def ask(gateway: str, prompt: str) -> tuple[str, int]:
    """The worker that served the prompt and how many of its tokens were cached there."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "temperature": 0}
    answer = httpx.post(f"{gateway}/v1/completions", json=body, timeout=20)
    assert answer.status_code == 200, answer.text
    cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer.headers["x-kvherd-worker"], cached


def blocks(gateway: str) -> dict[str, Any]:
    return {str(worker["url"]): worker["kv"]["blocks"] for worker in workers_of(gateway)}  # type: ignore[index]


def running(engine: str) -> int:
    return sum(int(load["num_running_reqs"]) for load in json.loads(get(f"{engine}/get_loads")[1])["loads"])


def test_both_workers_are_up_and_followed(gateway: str) -> None:
    workers = workers_of(gateway)
    assert sorted(str(worker["url"]).split(":")[0] for worker in workers) == ["grpc", "http"]
    assert {worker["state"] for worker in workers} == {"up"}
    wait_until(
        lambda: all(worker["kv"]["state"] == "live" for worker in workers_of(gateway)),  # type: ignore[index]
        within_s=10,
        what="the KV events of both are followed",
    )


def test_a_prompt_that_repeats_lands_where_its_prefix_is_on_either_kind_of_worker(gateway: str) -> None:
    served = set()
    for _ in range(12):
        prompt = uuid.uuid4().hex * 20
        before = blocks(gateway)
        worker, cached = ask(gateway, prompt)
        assert cached == 0
        wait_until(lambda: blocks(gateway)[worker] >= before[worker] + 40, within_s=10, what="its blocks are known")  # noqa: B023
        again, cached = ask(gateway, prompt)
        assert again == worker
        assert cached == (len(prompt) - 1) // BLOCK * BLOCK
        served.add(worker.split(":")[0])
        if served == {"grpc", "http"}:
            break
    assert served == {"grpc", "http"}


def test_a_flush_clears_every_worker_and_what_is_known_of_it(gateway: str, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = uuid.uuid4().hex * 10
    ask(gateway, prompt)
    with pytest.raises(SystemExit) as ended:
        main(["flush", "--timeout", "10", "--json", "--gateway", gateway])
    report = json.loads(capsys.readouterr().out)
    assert ended.value.code in (0, None)
    assert report["success"] is True
    assert (report["workers_flushed"], report["total_http_workers"], report["total_grpc_workers"]) == (2, 1, 1)
    assert {worker["outcome"] for worker in report["workers"]} == {"done"}
    assert set(blocks(gateway).values()) == {0}
    assert ask(gateway, prompt)[1] == 0


def test_the_openai_client_streams_through_the_gateway(gateway: str) -> None:
    with openai.OpenAI(base_url=f"{gateway}/v1", api_key="none", max_retries=0, timeout=20) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        for _ in range(4):
            stream = client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": uuid.uuid4().hex}],
                max_tokens=8,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},  # a random model may well begin with the end
            )
            chunks = list(stream)
            assert chunks[0].choices[0].delta.role == "assistant"
            assert chunks[-1].usage is not None
            assert chunks[-1].usage.completion_tokens == 8
            assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] in ("length", "stop")


def test_the_openai_client_gets_its_own_kind_of_error(gateway: str) -> None:
    with (
        openai.OpenAI(base_url=f"{gateway}/v1", api_key="none", max_retries=0, timeout=20) as client,
        pytest.raises(openai.NotFoundError, match="served: tiny"),
    ):
        client.completions.create(model="other", prompt="hello")


LONG = {"model": "tiny", "max_tokens": 1900, "ignore_eos": True}


def leave_after_the_first_bytes(gateway: str) -> None:
    body = LONG | {"prompt": uuid.uuid4().hex, "stream": True}
    with httpx.stream("POST", f"{gateway}/v1/completions", json=body, timeout=20) as answer:
        next(answer.iter_raw())


def leave_before_the_first_byte(gateway: str) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{gateway}/v1/completions", json=LONG | {"prompt": uuid.uuid4().hex}, timeout=0.3)


@pytest.mark.parametrize("leave", [leave_after_the_first_bytes, leave_before_the_first_byte])
def test_a_client_that_leaves_ends_its_request_on_the_engine(herd: HerdProcess, leave: Callable[[str], None]) -> None:
    for _ in range(4):  # both workers, whatever the policy thinks
        leave(herd.url)
    for engine in herd.engine_urls:
        wait_until(lambda: running(engine) == 0, within_s=2, what="the engine runs nothing")  # noqa: B023


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/v1/models", "/workers"])
def test_the_gateway_tells_about_itself(gateway: str, path: str) -> None:
    status, body = get(f"{gateway}{path}")
    assert status == 200
    assert body


@pytest.mark.parametrize("engine", [0, 1])
@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models", "/server_info", "/get_loads"])
def test_an_engine_tells_about_itself(herd: HerdProcess, engine: int, path: str) -> None:
    status, body = get(f"{herd.engine_urls[engine]}{path}")
    assert status == 200
    assert body
