"""What a caller gets wrong is answered the same way at every door: the gateway's and each engine's own."""

import http.client
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from kvherd.testing.herds import HerdProcess

pytestmark = pytest.mark.engine

DOORS: dict[str, Callable[[HerdProcess], str]] = {
    "gateway": lambda herd: herd.url,
    "engine-a": lambda herd: herd.engine_urls[0],
    "engine-b": lambda herd: herd.engine_urls[1],
}
CONTEXT_TOKENS = 2048


@pytest.fixture(params=DOORS)
def door(request: pytest.FixtureRequest, herd: HerdProcess) -> str:
    return DOORS[request.param](herd)


def chat(content: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 4} | fields


def post(door: str, body: Any, path: str = "/v1/chat/completions") -> tuple[int, dict[str, Any]]:
    answer = httpx.post(f"{door}{path}", json=body, timeout=20)
    return answer.status_code, answer.json()


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(door: str) -> None:
    status, answer = post(door, chat("x" * 3000))
    assert status == 400
    assert answer["error"]["code"] == "context_length_exceeded"
    assert f"holds {CONTEXT_TOKENS}" in answer["error"]["message"]
    assert any(int(word) > 3000 for word in answer["error"]["message"].split() if word.isdigit())


def test_an_answer_that_cannot_fit_is_refused_with_all_three_numbers(door: str) -> None:
    status, answer = post(door, {"model": "tiny", "prompt": "x" * 100, "max_tokens": 5000}, "/v1/completions")
    assert status == 400
    for number in ("100", "5000", str(CONTEXT_TOKENS)):
        assert number in re.findall(r"\d+", answer["error"]["message"])


def test_an_unknown_model_is_refused_with_those_served(door: str) -> None:
    status, answer = post(door, chat(model="gpt-17"))
    assert status == 404
    assert answer["error"]["code"] == "model_not_found"
    assert answer["error"]["message"] == "model 'gpt-17' is not served here; served: tiny"


def test_broken_json_is_refused_with_line_and_column(door: str) -> None:
    answer = httpx.post(f"{door}/v1/chat/completions", content=b'{"model": "tiny",\n  "messages": [}', timeout=20)
    assert answer.status_code == 400
    assert "at line 2, column 16" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": "hello, " * 20}, "messages"),
        ({"messages": ["hello, " * 20]}, "messages"),
        ({"n": 0}, "n"),
    ],
)
def test_a_value_out_of_range_is_refused_by_the_name_of_its_field(
    door: str, fields: dict[str, Any], named: str
) -> None:
    status, answer = post(door, chat(**fields))
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["message"].startswith(named)


def test_a_body_over_the_limit_is_refused_before_it_is_read(door: str) -> None:
    url = urlsplit(door)
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=10)
    try:
        connection.putrequest("POST", "/v1/chat/completions")
        connection.putheader("Content-Length", str(2**40))
        connection.endheaders()
        answer = connection.getresponse()
        assert answer.status == 413
        assert b"limit" in answer.read()
    finally:
        connection.close()


def test_a_door_serves_on_after_all_that(door: str) -> None:
    status, answer = post(door, chat())
    assert status == 200
    assert answer["usage"]["completion_tokens"] <= 4
