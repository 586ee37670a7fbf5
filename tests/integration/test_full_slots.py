"""Equal prompts over engines with two slots each: who finds none free at one goes to the other, cached there or not."""

from contextlib import ExitStack

import httpx
import pytest

from kvherd.testing.herds import Start, begin_engine, begin_gateway
from kvherd.testing.processes import wait_until

pytestmark = pytest.mark.engine

LONG = {"model": "tiny", "prompt": "forty letters, of which some are blanks.", "max_tokens": 1900, "ignore_eos": True}


def test_equal_prompts_beyond_the_slots_of_one_engine_go_to_the_other(start: Start) -> None:
    engines = [begin_engine(start, "--max-running", "2") for _ in range(2)]
    gateway = begin_gateway(start, *(engine.grpc_url for engine in engines), up=2)
    url = f"{gateway.url}/v1/completions"
    answer = httpx.post(url, json=LONG | {"max_tokens": 2}, timeout=20)
    assert answer.status_code == 200, answer.text
    first = answer.headers["x-kvherd-worker"]
    wait_until(
        lambda: any(one["url"] == first and one["kv"]["blocks"] >= 2 for one in gateway.workers()),  # type: ignore[index]
        within_s=10,
        what="its blocks are known",
    )
    with ExitStack() as under_way:
        served = []
        for _ in range(4):
            told = under_way.enter_context(httpx.stream("POST", url, json=LONG | {"stream": True}, timeout=60))
            assert told.status_code == 200
            served.append(told.headers["x-kvherd-worker"])
    assert served[:2] == [first, first], "where the prompt is cached, as long as a slot is free"
    assert first not in served[2:]
