"""The engine's HTTP door."""

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
import pytest

from kvherd.core.ids import Rank
from kvherd.testing.patience import until
from kvherd.testing.scheduler import FakeScheduler, answer_token, rank_facts

pytestmark = pytest.mark.net

Opened = Callable[..., AbstractAsyncContextManager[Any]]
HELLO = [{"role": "user", "content": "hello"}]
RENDERED = list(b"user: hello\nassistant: ")


def chat(**more: object) -> dict[str, object]:
    return {"model": "letters", "messages": HELLO, "max_tokens": 5, **more}


def text(**more: object) -> dict[str, object]:
    return {"model": "letters", "prompt": "once", "max_tokens": 5, **more}


def said(prompt: list[int], count: int = 5) -> str:
    return bytes(answer_token(prompt, index) for index in range(count)).decode()


def refusal(answer: httpx.Response) -> str:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return str(error["message"])


# --- generation ------------------------------------------------------------------------------------


async def test_a_chat_is_answered(doors: Opened) -> None:
    async with doors() as at:
        answer = await at.http.post("/v1/chat/completions", json=chat())
    assert answer.status_code == 200
    body = answer.json()
    assert body["choices"][0]["message"] == {"role": "assistant", "content": said(RENDERED)} | {
        key: value for key, value in body["choices"][0]["message"].items() if value is None
    }
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["prompt_tokens"] == len(RENDERED)
    assert body["usage"]["completion_tokens"] == 5


async def test_sglangs_own_form_is_answered_whole_and_streamed(doors: Opened) -> None:
    asked = {"text": "once", "sampling_params": {"max_new_tokens": 3, "temperature": 0}}
    async with doors() as at:
        whole = await at.http.post("/generate", json=asked)
        streamed = await at.http.post("/generate", json=asked | {"stream": True})
        refused = await at.http.post("/generate", json={"sampling_params": {}})
    prompt = list(b"once")
    assert whole.json()["text"] == said(prompt, 3)
    assert whole.json()["meta_info"]["prompt_tokens"] == len(prompt)
    *events, last = streamed.text.removesuffix("\n\n").split("\n\n")
    assert json.loads(events[-1].removeprefix("data: "))["text"] == said(prompt, 3)
    assert last == "data: [DONE]"
    assert refused.status_code == 400
    assert "text" in refusal(refused)


async def test_cached_tokens_are_in_the_usage_and_true(doors: Opened) -> None:
    prompt = "a sentence of more than forty-eight bytes, for sure."
    async with doors() as at:
        cold = await at.http.post("/v1/completions", json=text(prompt=prompt))
        warm = await at.http.post("/v1/completions", json=text(prompt=prompt))
    assert cold.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert warm.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 48


async def test_a_stream_comes_piece_by_piece_and_not_at_the_end(doors: Opened) -> None:
    async with (
        doors(FakeScheduler(step_s=0.005)) as at,
        at.http.stream("POST", "/v1/completions", json=text(stream=True, max_tokens=300)) as answer,
    ):
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.aiter_lines()
        frame = json.loads((await anext(lines)).removeprefix("data: "))
        assert frame["choices"][0]["text"]
        assert at.scheduler.running == 1  # there is much to come yet
        frames = [line async for line in lines if line]
    assert frames[-1] == "data: [DONE]"
    assert len(frames) > 100


async def test_a_stream_carries_usage_if_asked(doors: Opened) -> None:
    options = {"include_usage": True}
    async with doors() as at:
        answer = await at.http.post("/v1/chat/completions", json=chat(stream=True, stream_options=options))
    frames = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert frames[-1]["usage"]["completion_tokens"] == 5
    assert "".join(c["delta"].get("content") or "" for f in frames for c in f["choices"]) == said(RENDERED)


async def test_a_stop_string_ends_the_answer_and_the_work(doors: Opened) -> None:
    stop = said(list(b"once"), 9)[6:9]
    async with doors() as at:
        answer = await at.http.post("/v1/completions", json=text(stop=stop, max_tokens=900))
        await until(lambda: at.scheduler.running == 0)
    assert answer.json()["choices"][0]["text"] == said(list(b"once"), 6)
    assert answer.json()["choices"][0]["finish_reason"] == "stop"


async def test_a_client_that_leaves_a_stream_ends_its_request(doors: Opened) -> None:
    async with doors(FakeScheduler(step_s=0.01)) as at:
        async with at.http.stream("POST", "/v1/completions", json=text(stream=True, max_tokens=900)) as answer:
            await anext(answer.aiter_lines())
        await until(lambda: at.scheduler.running == 0)
        assert len(at.scheduler.aborted) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_before_the_answer_ends_its_request(doors: Opened, stream: bool) -> None:
    async with doors() as at:
        at.scheduler.stall()
        with pytest.raises(httpx.ReadTimeout):
            await at.http.post("/v1/completions", json=text(stream=stream), timeout=0.1)
        await until(lambda: at.scheduler.running == 0)
        assert len(at.scheduler.aborted) == 1


async def test_a_scheduler_that_dies_ends_a_stream_with_an_error_event(doors: Opened) -> None:
    async with (
        doors(FakeScheduler(step_s=0.01)) as at,
        at.http.stream("POST", "/v1/completions", json=text(stream=True, max_tokens=900)) as answer,
    ):
        lines = answer.aiter_lines()
        await anext(lines)
        at.scheduler.die("killed by SIGKILL")
        async with asyncio.timeout(10):
            frames = [line async for line in lines if line.startswith("data: ")]
    assert "SIGKILL" in json.loads(frames[-1].removeprefix("data: "))["error"]["message"]


async def test_a_scheduler_that_dies_ends_an_answer_with_503(doors: Opened) -> None:
    async with doors() as at:
        at.scheduler.stall()
        asking = asyncio.ensure_future(at.http.post("/v1/completions", json=text()))
        await until(lambda: at.scheduler.running == 1)
        at.scheduler.die("killed by SIGKILL")
        async with asyncio.timeout(10):
            answer = await asking
    assert answer.status_code == 503
    assert "SIGKILL" in refusal(answer)
    assert answer.headers["retry-after"]


async def test_a_request_id_comes_back(doors: Opened) -> None:
    async with doors() as at:
        answer = await at.http.post("/v1/completions", json=text(), headers={"X-Request-Id": "mine-7"})
        refused = await at.http.post("/v1/completions", json={}, headers={"X-Request-Id": "mine-8"})
    assert answer.headers["x-request-id"] == "mine-7"
    assert refused.headers["x-request-id"] == "mine-8"


async def test_two_requests_of_one_request_id_are_both_answered(doors: Opened) -> None:
    async with doors() as at:
        answers = await asyncio.gather(
            *(at.http.post("/v1/completions", json=text(), headers={"X-Request-Id": "trace"}) for _ in range(3))
        )
    assert [answer.status_code for answer in answers] == [200, 200, 200]


# --- refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (chat(model="gpt-9"), 404, ("gpt-9", "letters")),
        (chat(temperature=-1), 400, ("temperature", "-1")),
        (chat(messages=[]), 400, ("messages",)),
        (text(prompt=""), 400, ("prompt",)),
        (text(prompt=[]), 400, ("prompt",)),
        (text(prompt=[4711]), 400, ("4711", "259")),
        (text(prompt="x" * 2000), 400, ("2000", "1024")),
        (text(max_tokens=5000), 400, ("4", "5000", "1024")),
        (text(stop=[""]), 400, ("stop",)),
        (text(top_p=0), 400, ("top_p",)),
        ([1], 400, ("object",)),
    ],
)
async def test_a_bad_request_is_refused_in_words(doors: Opened, body: Any, status: int, words: tuple[str, ...]) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with doors() as at:
        answer = await at.http.post(path, json=body)
        assert at.scheduler.submitted == []
    assert answer.status_code == status
    for word in words:
        assert word in refusal(answer)


async def test_a_bad_streaming_request_has_a_status_too(doors: Opened) -> None:
    async with doors() as at:
        answer = await at.http.post("/v1/completions", json=text(prompt=[4711], stream=True))
    assert answer.status_code == 400


async def test_json_that_is_none_is_refused_with_line_and_column(doors: Opened) -> None:
    async with doors() as at:
        answer = await at.http.post("/v1/completions", content=b'{\n  "model": letters}')
    assert answer.status_code == 400
    assert "line 2, column 12" in refusal(answer)


async def test_a_body_over_the_limit_is_refused(doors: Opened) -> None:
    async def endless() -> Any:
        for _ in range(100):
            yield b" " * 1000

    async with doors(body_limit_bytes=10_000) as at:
        told = await at.http.post("/v1/completions", content=b" " * 10_001)
        chunked = await at.http.post("/v1/completions", content=endless())
        assert (await at.http.post("/v1/completions", json=text())).status_code == 200
    assert (told.status_code, chunked.status_code) == (413, 413)
    assert "10000 bytes" in refusal(told)


async def test_a_path_that_does_not_exist_and_a_method_that_does_not_fit_are_refused_in_json(doors: Opened) -> None:
    async with doors() as at:
        unknown = await at.http.get("/v1/nothing")
        unfit = await at.http.get("/v1/completions")
    assert (unknown.status_code, unfit.status_code) == (404, 405)
    assert "/v1/nothing" in refusal(unknown)
    assert "GET" in refusal(unfit)


async def test_a_client_that_breaks_off_its_body_costs_nothing(doors: Opened, caplog: pytest.LogCaptureFixture) -> None:
    async with doors() as at:
        _, writer = await asyncio.open_connection("127.0.0.1", at.config.http_port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        assert (await at.http.get("/health")).status_code == 200
        await asyncio.sleep(0.05)
    assert "unforeseen" not in caplog.text


async def test_a_client_that_never_ends_its_body_is_told(doors: Opened) -> None:
    async with doors(body_within_s=0.1) as at:
        reader, writer = await asyncio.open_connection("127.0.0.1", at.config.http_port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        async with asyncio.timeout(10):
            assert b" 408 " in await reader.readline()
        writer.close()
        await writer.wait_closed()


# --- tokens --------------------------------------------------------------------------------------------


async def test_text_and_chats_are_tokenized_as_they_would_be_computed(doors: Opened) -> None:
    async with doors() as at:
        plain = (await at.http.post("/tokenize", json={"model": "letters", "prompt": "abc"})).json()
        chatted = (await at.http.post("/tokenize", json={"messages": HELLO})).json()
        back = (await at.http.post("/detokenize", json={"tokens": [97, 98, 99]})).json()
    assert plain == {"count": 3, "max_model_len": 1024, "tokens": [97, 98, 99]}
    assert chatted["tokens"] == RENDERED
    assert back == {"prompt": "abc", "text": "abc"}


async def test_a_long_text_is_tokenized_and_computed_like_a_short_one(doors: Opened) -> None:
    long = "x" * 100_000
    async with doors(FakeScheduler([rank_facts(max_context_tokens=200_000, capacity_tokens=200_000)])) as at:
        counted = (await at.http.post("/tokenize", json={"prompt": long})).json()["count"]
        answer = await at.http.post("/v1/completions", json=text(prompt=long))
    assert counted == 100_000
    assert answer.json()["usage"]["prompt_tokens"] == 100_000


async def test_tokens_that_do_not_exist_are_refused(doors: Opened) -> None:
    async with doors() as at:
        strange = await at.http.post("/detokenize", json={"tokens": [4711]})
        missing = await at.http.post("/tokenize", json={})
    assert (strange.status_code, missing.status_code) == (400, 400)
    assert "4711" in refusal(strange)


# --- flush -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_an_idle_engine_flushes(doors: Opened, method: str) -> None:
    async with doors() as at:
        answer = await at.http.request(method, "/flush_cache", params={"timeout": "2.5"})
        assert at.scheduler.flush_calls == [(2.5, False)]
    assert answer.status_code == 200
    assert answer.json()["success"]
    assert [each["done"] for each in answer.json()["ranks"]] == [True]


@pytest.mark.parametrize("within", ["0", "0.05"])
async def test_a_busy_engine_says_what_is_busy(doors: Opened, within: str) -> None:
    async with doors() as at:
        at.scheduler.stall()
        asking = asyncio.ensure_future(at.http.post("/v1/completions", json=text()))
        await until(lambda: at.scheduler.running == 1)
        answer = await at.http.post("/flush_cache", params={"timeout": within})
        at.scheduler.resume()
        await asking
    assert answer.status_code == 400
    assert "1 running" in answer.json()["message"]
    assert not answer.json()["success"]


@pytest.mark.parametrize("within", ["-1", "nan", "inf", "soon", "4000", ""])
async def test_a_time_that_nobody_can_wait_is_refused(doors: Opened, within: str) -> None:
    async with doors() as at:
        answer = await at.http.post("/flush_cache", params={"timeout": within})
        assert at.scheduler.flush_calls == []
    assert answer.status_code == 400
    assert "timeout" in refusal(answer)


async def test_a_rank_that_does_not_answer_is_named(doors: Opened) -> None:
    scheduler = FakeScheduler([rank_facts(0), rank_facts(1)], order_grace_s=0.05)
    scheduler.silent.add(Rank(1))
    async with doors(scheduler) as at:
        answer = await at.http.post("/flush_cache")
    assert answer.status_code == 504
    assert answer.json()["ranks"][1] == {"rank": 1, "done": False, "message": "no answer", "cleared_blocks": 0}


async def test_a_dead_scheduler_makes_everything_unavailable(doors: Opened) -> None:
    async with doors() as at:
        at.scheduler.die("killed by SIGKILL")
        await at.servicer.fail(at.scheduler.failure)
        health = await at.http.get("/health")
        orders = [await at.http.get(path) for path in ("/flush_cache", "/server_info", "/get_loads")]
        metrics = await at.http.get("/metrics")
    assert health.status_code == 503
    assert "SIGKILL" in health.json()["reason"]
    assert [answer.status_code for answer in orders] == [503, 503, 503]
    assert metrics.status_code == 200


# --- what it says of itself --------------------------------------------------------------------------------


async def test_it_is_healthy_and_names_its_model(doors: Opened) -> None:
    async with doors() as at:
        health = await at.http.get("/health")
        models = (await at.http.get("/v1/models")).json()
        model = (await at.http.get("/get_model_info")).json()
    assert health.status_code == 200
    assert [(card["id"], card["max_model_len"]) for card in models["data"]] == [("letters", 1024)]
    assert model["is_generation"]


async def test_its_information_leads_a_gateway_to_its_events_and_a_bench_to_its_size(doors: Opened) -> None:
    async with doors() as at:
        told = (await at.http.get("/server_info")).json()
        same = (await at.http.get("/get_server_info")).json()
        port = at.config.port
    assert told["kv_events"] == {"grpc": f"127.0.0.1:{port}"}
    assert told["kvherd"]["version"]
    assert (told["block_size"], told["dp_size"], told["max_total_num_tokens"]) == (16, 1, 4096)
    assert told["internal_states"][0]["effective_max_running_requests_per_dp"] == 8
    assert told["internal_states"][0]["memory_usage"]["token_capacity"] == 4096
    assert same["kvherd"] == told["kvherd"]


async def test_loads_and_metrics_tell_what_happens(doors: Opened) -> None:
    async with doors() as at:
        at.scheduler.stall()
        asking = asyncio.ensure_future(at.http.post("/v1/completions", json=text()))
        await until(lambda: at.scheduler.running == 1)
        loads = (await at.http.get("/get_loads")).json()
        during = (await at.http.get("/metrics")).text
        at.scheduler.resume()
        await asking
        after = (await at.http.get("/metrics")).text
    assert loads["loads"][0]["num_running_reqs"] == 1
    labels = '{dp_rank="0",model_name="letters"}'
    assert f"sglang:num_running_reqs{labels} 1.0" in during
    assert f"sglang:num_running_reqs{labels} 0.0" in after
    assert 'sglang:time_to_first_token_seconds_count{model_name="letters"} 1.0' in after
    assert 'kvherd_generations_total{model_name="letters",outcome="finished"} 1.0' in after


async def test_a_head_request_flushes_nothing(doors: Opened) -> None:
    async with doors() as at:
        answer = await at.http.head("/flush_cache")
        health = await at.http.head("/health")
    assert (answer.status_code, health.status_code) == (405, 200)
