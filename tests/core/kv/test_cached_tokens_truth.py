"""The events that stock engines published predict the cached tokens that they reported."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvherd.core.kv.pages import folded_block
from kvherd.testing.recorded_life import RecordedLife
from kvherd.testing.recordings import read_recording
from kvherd.wire.vllm_kv import decode_batch

FIXTURES = Path(__file__).parents[2] / "fixtures"
VLLM_BLOCK = 32


def overlapped(request: dict[str, Any], others: list[dict[str, Any]]) -> bool:
    return any(other is not request and other["t0"] < request["t1"] and request["t0"] < other["t1"] for other in others)


def read_truth(folder: str, name: str) -> tuple[RecordedLife, list[dict[str, Any]]]:
    lines = (FIXTURES / folder / f"{name}_truth.jsonl").read_text().splitlines()
    return RecordedLife(list(read_recording(FIXTURES / folder / f"{name}.bin"))), [json.loads(line) for line in lines]


@pytest.mark.parametrize(("name", "lives"), [("evict_clear", 1), ("restart", 2)])
def test_vllms_sequential_requests_are_predicted_exactly(name: str, lives: int) -> None:
    life, truth = read_truth("vllm-0.32", name)
    wrong, decided, hits, after_reset = [], 0, 0, False
    for request in truth:
        life.until(request["t0"])
        if request["op"] != "chat":
            after_reset = True
            continue
        first, after_reset = after_reset, False
        if overlapped(request, truth):
            continue
        decided += 1
        hits += request["cached"] > 0
        predicted = life.predict(request["prompt_token_ids"], block_size=VLLM_BLOCK, salt=request["salt"])
        if predicted != request["cached"] and not first:
            wrong.append((request["i"], predicted, request["cached"]))
    assert wrong == []
    assert decided >= 15
    assert hits >= decided / 3
    assert life.lives == lives


@pytest.mark.parametrize(("name", "page", "lives"), [("page16", 16, 1), ("page1", 1, 1), ("restart", 16, 2)])
def test_sglangs_sequential_requests_are_predicted_exactly(name: str, page: int, lives: int) -> None:
    """Unlike vLLM, SGLang tells of a flush at once. That it was restarted is seen with its next batch."""
    life, truth = read_truth("sglang-0.5.23", name)
    wrong, asked, hits, restarted = [], 0, 0, False
    for request in truth:
        life.until(request["t0"])
        if request["op"] != "generate":
            restarted = request["op"] == "restart"
            continue
        asked += 1
        hits += request["cached"] > 0
        block = folded_block(page)
        predicted = life.predict(request["prompt_token_ids"], block_size=block)
        if predicted != request["cached"] // block * block and not restarted:
            wrong.append((predicted, request["cached"]))
        restarted = False
    assert wrong == []
    assert asked >= 20
    assert hits >= asked / 2
    assert life.lives == lives


def test_sglangs_salted_blocks_are_credited_to_their_salt_only() -> None:
    life, truth = read_truth("sglang-0.5.23", "namespaces")
    salted = [request for request in truth if "extra_key" not in request]
    assert [request["cached"] for request in salted] == [0, 64, 0, 64]
    for request in salted:
        life.until(request["t0"])
        prompt = request["prompt_token_ids"]
        assert life.predict(prompt, block_size=16, salt=request.get("cache_salt")) == request["cached"]
        assert life.predict(prompt, block_size=16, salt="another") == 0


def test_no_event_of_sglang_tells_an_extra_key() -> None:
    """Why the gateway gives requests with one no credit: their blocks cannot be told from the plain ones."""
    recorded = read_recording(FIXTURES / "sglang-0.5.23" / "namespaces.bin")
    plain, _, keyed, _ = (decode_batch(message.payload).events for message in recorded)
    assert plain == keyed
