"""The fake of a stock vLLM is held against what a real one said and did."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvherd.core.kv.events import BlocksRemoved, BlocksStored, CacheCleared, KvEvent
from kvherd.testing.paged_cache import PagedCache
from kvherd.testing.recordings import read_recording
from kvherd.testing.stock_vllm import StockVllm
from kvherd.wire.vllm_kv import KvDecoder

FIXTURES = Path(__file__).parents[1] / "fixtures"
USABLE_BLOCKS = 90  # of 91: one is no block
TRUTH = FIXTURES / "vllm-0.32/evict_clear_truth.jsonl"


def serve(
    cache: PagedCache, prompt: list[int], output: list[int], salt: str | None = None
) -> tuple[int, list[KvEvent]]:
    """What was cached of a prompt, and the events of its whole answer."""
    running = cache.begin(prompt, salt=salt)
    said = list(cache.take_said())
    for token in output:
        cache.decode(running, token)
        said += cache.take_said()
    cache.end(running)
    return running.cached_tokens, said


def test_its_cache_reports_what_vllm_reported_and_stores_as_often() -> None:
    requests = sorted(map(json.loads, TRUTH.read_text().splitlines()), key=lambda request: request["t0"])
    cache, decided, stored = PagedCache(USABLE_BLOCKS, 32), 0, 0
    for request in requests:
        if request["op"] != "chat":
            assert cache.reset()
            continue
        cached, said = serve(cache, request["prompt_token_ids"], request["token_ids"], request["salt"])
        stored += sum(isinstance(event, BlocksStored) for event in said)
        alone = all(
            other is request or other["t1"] <= request["t0"] or request["t1"] <= other["t0"] for other in requests
        )
        if alone:
            assert (request["i"], cached) == (request["i"], request["cached"])
            decided += 1
    recorded = KvDecoder()
    events = [
        event
        for one in read_recording(TRUTH.with_name("evict_clear.bin"))
        for event in recorded.decode(one.payload).events
    ]
    assert decided == 50
    assert stored == sum(isinstance(event, BlocksStored) for event in events)


def test_its_events_tell_exactly_what_it_holds() -> None:
    cache = PagedCache(blocks=9, block_size=2)
    held: dict[int, int] = {}
    most = 0
    for number in range(60):
        turn = number // 2
        prompt = [turn % 2, turn % 2, turn % 3, turn % 3, 8, 9][: 3 + turn % 4]
        _, said = serve(cache, prompt, [1, 2, 3])
        for event in said:
            match event:
                case BlocksStored(hashes):
                    for name in hashes:
                        held[name] = held.get(name, 0) + 1
                case BlocksRemoved(hashes):
                    for name in hashes:
                        held[name] -= 1
                case CacheCleared():
                    held.clear()
        most = max(most, *held.values())
        assert {name: copies for name, copies in held.items() if copies} == cache.truth
        if number == 40:
            assert cache.reset()
            assert cache.truth == {}
    assert most >= 2, "a block that is computed again is a second copy"


def keys(document: Any) -> Any:
    """The keys of a JSON value in their order, all the way down."""
    match document:
        case dict():
            return {name: keys(each) for name, each in document.items()}
        case list():
            return [keys(each) for each in document[:1]]
        case _:
            return None


@pytest.mark.net
async def test_its_answers_have_the_keys_of_recorded_ones_in_their_order() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "stream_options": {"include_usage": True}}
    async with StockVllm() as server, httpx.AsyncClient(base_url=server.url) as client:
        whole = (await client.post("/v1/chat/completions", json={"messages": body["messages"]})).json()
        stream = (await client.post("/v1/chat/completions", json=body)).text
    recorded = (FIXTURES / "vllm-0.32-http/chat_stream.txt").read_text()
    assert json.dumps(keys(whole)) == json.dumps(keys(json.loads((FIXTURES / "vllm-0.32-http/chat.json").read_bytes())))
    ours, theirs = ([json.loads(one[6:]) for one in text.split("\n\n")[:-2]] for text in (stream, recorded))
    for place in (0, 1, -2, -1):
        assert json.dumps(keys(ours[place])) == json.dumps(keys(theirs[place])), place


@pytest.mark.net
async def test_a_stream_that_asks_for_no_usage_ends_with_the_fingerprint() -> None:
    body = {"prompt": "hi", "stream": True}
    async with StockVllm() as server, httpx.AsyncClient(base_url=server.url) as client:
        *_, last, done, end = (await client.post("/v1/completions", json=body)).text.split("\n\n")
        assert (done, end, json.loads(last[6:])["system_fingerprint"]) == ("data: [DONE]", "", "vllm-0.32.0-47c0b76c")
        server.details = False
        usage = (await client.post("/v1/completions", json={"prompt": "hi"})).json()["usage"]
        assert usage["prompt_tokens_details"] is None
