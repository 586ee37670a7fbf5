"""SGLang's own calls, and the tokenizer's, through a real gateway over a worker of either kind."""

import json
import uuid
from itertools import pairwise
from typing import Any

import httpx
import pytest

from kvherd.testing.doors import ANSWER_S, Door
from kvherd.testing.processes import wait_until

pytestmark = pytest.mark.engine

GREEDY = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 8}
HALVES = {"195": 100, "169": 100}
"""The two bytes of é, by chance in either order."""


def post(door: Door, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{door.gateway.url}{path}", json=body, timeout=ANSWER_S)


def generate(door: Door, **body: Any) -> Any:
    answer = post(door, "/generate", {"sampling_params": GREEDY, **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-kvherd-worker"] == door.worker
    return answer.json()


def events(door: Door, **body: Any) -> list[dict[str, Any]]:
    answer = post(door, "/generate", {"sampling_params": GREEDY, "stream": True, **body})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *told, done, nothing = answer.text.split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in told]


def test_a_text_and_its_tokens_are_one_prompt(door: Door) -> None:
    text = generate(door, text="one")
    tokens = generate(door, input_ids=[111, 110, 101])
    assert (text["text"], text["output_ids"]) == (tokens["text"], tokens["output_ids"])
    meta = text["meta_info"]
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (3, 8)
    assert meta["finish_reason"] == {"type": "length", "length": 8}


def test_each_event_of_a_stream_has_the_whole_text_so_far(door: Door) -> None:
    told = events(door, text="one")
    assert told[-1]["text"] == generate(door, text="one")["text"]
    assert told[-1]["meta_info"]["finish_reason"]["type"] == "length"
    for before, after in pairwise(told):
        assert after["text"].startswith(before["text"])
        assert before["meta_info"]["finish_reason"] is None


def test_no_event_holds_half_a_character(door: Door) -> None:
    drawn = {"ignore_eos": True, "max_new_tokens": 64, "sampling_seed": 3, "logit_bias": HALVES}
    whole = generate(door, text="one", sampling_params=drawn)["text"]
    assert "é" in whole
    assert all(whole.startswith(event["text"]) for event in events(door, text="one", sampling_params=drawn))


def test_several_prompts_are_answered_in_their_order(door: Door) -> None:
    alone = [generate(door, text=text)["text"] for text in ("one", "two", "three")]
    assert [each["text"] for each in generate(door, text=["one", "two", "three"])] == alone
    tokens = [list(b"one"), list(b"two"), list(b"three")]
    assert [each["text"] for each in generate(door, input_ids=tokens)] == alone
    last: dict[int, str] = {}
    for event in events(door, text=["one", "two", "three"]):
        last[event["index"]] = event["text"]
    assert [last[index] for index in range(3)] == alone


def test_logprobs_are_told_of_each_token_when_asked_for(door: Door) -> None:
    answer = generate(door, text="one", return_logprob=True, top_logprobs_num=2)
    told, top = answer["meta_info"]["output_token_logprobs"], answer["meta_info"]["output_top_logprobs"]
    assert [token for _, token, _ in told] == answer["output_ids"]
    assert all(logprob <= 0 for logprob, _, _ in told)
    assert [len(each) for each in top] == [2] * 8
    assert "output_token_logprobs" not in generate(door, text="one")["meta_info"]


def test_a_stop_string_ends_an_answer_before_it(door: Door) -> None:
    drawn = {"ignore_eos": True, "max_new_tokens": 24, "sampling_seed": 7, "logit_bias": {"97": 100, "98": 100}}
    whole = generate(door, text="one", sampling_params=drawn)["text"]
    stop = whole[9:14]
    answer = generate(door, text="one", sampling_params=drawn | {"stop": [stop]})
    assert answer["text"] == whole[: whole.index(stop)]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


@pytest.mark.parametrize("text", ["hello", "é€😀", " a\n\tb "])
def test_a_text_becomes_tokens_and_the_tokens_the_text(door: Door, text: str) -> None:
    answer = post(door, "/tokenize", {"prompt": text, "add_special_tokens": False}).json()
    assert answer["count"] == len(answer["tokens"]) == len(text.encode())
    assert answer["max_model_len"] == 2048
    assert post(door, "/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": text, "text": text}


def test_the_tokens_of_a_chat_are_those_that_it_is_charged_for(door: Door) -> None:
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "how many?"}]}
    count = post(door, "/tokenize", chat).json()["count"]
    answer = post(door, "/v1/chat/completions", chat | {"max_tokens": 1}).json()
    assert answer["usage"]["prompt_tokens"] == count


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/generate", {}, "text"),
        ("/generate", {"text": "a", "input_ids": [1]}, "text"),
        ("/generate", {"input_ids": []}, "input_ids"),
        ("/generate", {"input_ids": [2**20]}, "token"),
        ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens"),
        ("/generate", {"text": "a", "sampling_params": {"regex": "a+"}}, "sampling_params.regex"),
        ("/generate", {"text": "a", "image_data": "x"}, "image_data"),
        ("/generate", {"text": "a" * 3000}, "2048"),
        ("/tokenize", {}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [2**20]}, "vocabulary"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(door: Door, path: str, body: dict[str, Any], named: str) -> None:
    answer = post(door, path, body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert named in error["message"]
    assert error["type"] == "invalid_request_error"


def test_who_leaves_a_stream_leaves_an_idle_engine(door: Door) -> None:
    long = {"ignore_eos": True, "max_new_tokens": 1900}
    body = {"text": uuid.uuid4().hex, "stream": True, "sampling_params": long}
    with httpx.stream("POST", f"{door.gateway.url}/generate", json=body, timeout=ANSWER_S) as answer:
        next(answer.iter_lines())
    wait_until(lambda: door.running() == 0, within_s=20, what="the engine runs nothing")
