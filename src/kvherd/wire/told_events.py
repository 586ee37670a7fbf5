"""What a stock engine's `/server_info` says of its KV events, as far as it says anything."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_WILDCARDS = ("*", "0.0.0.0", "::", "[::]")


@dataclass(frozen=True, slots=True)
class EventsTold:
    """`on` None: it does not say. `listens`: the engine binds `endpoint`; else it connects. A size of 0: untold."""

    on: bool | None = None
    endpoint: str | None = None
    replay: str | None = None
    listens: bool = True
    block_size: int = 0


def events_told(document: Mapping[str, Any], host: str) -> EventsTold:
    """Read vLLM's (`?config_format=json`) or SGLang's answer; `host` stands in for the engine's own word for all."""
    if "vllm_config" in document:
        config = document["vllm_config"]
        return _vllm(config.get("kv_events_config") if isinstance(config, dict) else None, host)
    if "kv_events_config" in document or "kv_events" in document:
        return _sglang(document, host)
    return EventsTold()


def _vllm(config: object, host: str) -> EventsTold:
    if not isinstance(config, dict):
        return EventsTold(on=False)
    on = config.get("enable_kv_cache_events") is True and config.get("publisher") == "zmq"
    return _told(config, host, on=on, bind=None, listening=("*", "::"))


def _sglang(document: Mapping[str, Any], host: str) -> EventsTold:
    """The text of its option says which side listens; the description beside it, the size of its blocks."""
    described, text = document.get("kv_events"), document.get("kv_events_config")
    try:
        config = json.loads(text) if isinstance(text, str) and text else {}
    except ValueError:
        config = {}
    if not isinstance(config, dict) or not (config or isinstance(described, dict)):
        return EventsTold(on=False)
    on = config.get("publisher", "zmq") != "null"
    told = _told({"endpoint": "tcp://*:5557", **config}, host, on=on, bind=config.get("bind"), listening=_WILDCARDS)
    size = described.get("block_size") if isinstance(described, dict) else None
    return EventsTold(told.on, told.endpoint, told.replay, told.listens, size if isinstance(size, int) else 0)


def _told(config: Mapping[str, Any], host: str, *, on: bool, bind: object, listening: tuple[str, ...]) -> EventsTold:
    endpoint, replay = (config.get(name) for name in ("endpoint", "replay_endpoint"))
    endpoint = endpoint if isinstance(endpoint, str) else None
    listens = endpoint is None or endpoint.startswith("ipc://") or any(word in endpoint for word in listening)
    return EventsTold(
        on,
        _reachable(endpoint, host),
        _reachable(replay if isinstance(replay, str) and replay else None, host),
        bind if isinstance(bind, bool) else listens,
    )


def _reachable(endpoint: str | None, host: str) -> str | None:
    if endpoint is None or not endpoint.startswith("tcp://"):
        return endpoint
    named, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return f"tcp://{host if named in _WILDCARDS else named}:{port}"
