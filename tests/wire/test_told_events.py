"""What stock engines say of where their KV events are."""

import json
from typing import Any

import pytest

from kvherd.wire.told_events import EventsTold, events_told


def vllm(**config: object) -> dict[str, Any]:
    told = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": None}
    return {"vllm_config": {"kv_events_config": {**told, **config}}}


def sglang(**config: object) -> dict[str, Any]:
    described = {"publisher": "zmq", "endpoint_port_base": 5557, "block_size": 16}
    return {"kv_events_config": json.dumps({"publisher": "zmq", **config}), "kv_events": described}


@pytest.mark.parametrize(
    ("document", "told"),
    [
        (vllm(), EventsTold(True, "tcp://10.0.0.1:5557")),
        (vllm(endpoint="tcp://127.0.0.1:7"), EventsTold(True, "tcp://127.0.0.1:7", listens=False)),
        (vllm(endpoint="ipc:///a", replay_endpoint="ipc:///b"), EventsTold(True, "ipc:///a", "ipc:///b")),
        (vllm(enable_kv_cache_events=False), EventsTold(False, "tcp://10.0.0.1:5557")),
        ({"vllm_config": {"kv_events_config": None}}, EventsTold(on=False)),
        ({"vllm_config": "a text"}, EventsTold(on=False)),
        (sglang(), EventsTold(True, "tcp://10.0.0.1:5557", block_size=16)),
        (
            sglang(endpoint="tcp://127.0.0.1:9", bind=True, replay_endpoint="tcp://*:8"),
            EventsTold(True, "tcp://127.0.0.1:9", "tcp://10.0.0.1:8", block_size=16),
        ),
        (sglang(endpoint="tcp://10.0.0.9:9"), EventsTold(True, "tcp://10.0.0.9:9", listens=False, block_size=16)),
        (sglang(publisher="null"), EventsTold(False, "tcp://10.0.0.1:5557", block_size=16)),
        ({"kv_events_config": None, "kv_events": None}, EventsTold(on=False)),
        ({"kv_events_config": "not JSON"}, EventsTold(on=False)),
        ({"kv_events_config": "[]"}, EventsTold(on=False)),
        ({"version": "something else"}, EventsTold()),
    ],
)
def test_an_engines_own_word(document: dict[str, Any], told: EventsTold) -> None:
    assert events_told(document, "10.0.0.1") == told
