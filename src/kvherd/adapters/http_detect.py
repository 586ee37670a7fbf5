"""What an HTTP worker turns out to be, by what it says of itself."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvherd.adapters.http_exchange import HttpAsker
from kvherd.adapters.http_url import HttpAddress
from kvherd.core.errors import WorkerLocked, WorkerRefused
from kvherd.core.ids import WorkerId
from kvherd.ports.worker import SGLANG_HEALTH_S, WorkerFacts, WorkerKind

_SGLANG_FIELDS = frozenset({"internal_states", "tp_size", "dp_size", "server_args"})
_LOCKED = frozenset({401, 403})
_ANY_HOST = frozenset({"0.0.0.0", "::", "", "localhost", "127.0.0.1", "::1"})
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class _Models:
    names: tuple[str, ...]
    adapters: tuple[str, ...]
    max_context_tokens: int
    owners: frozenset[str]


async def detect(worker: WorkerId, asker: HttpAsker, address: HttpAddress) -> WorkerFacts:
    """Raises `WorkerError`. A worker must answer `/v1/models`; all else is learned if it is told.

    A server that owns up to being vLLM is not asked for `/server_info`: in its development mode the first answer takes
    seconds, since it looks over its whole machine, and holds nothing that is needed.
    """
    models = await _models(worker, asker)
    if "vllm" not in models.owners:
        info = (await asker.ask("GET", "/server_info")).document_if_ok()
        if "kvherd" in info:
            return _kvherd(info, models, address)
        if _SGLANG_FIELDS & info.keys():
            return _sglang(info, models)
    version = (await asker.ask("GET", "/version")).document_if_ok().get("version")
    if isinstance(version, str):
        return await _vllm(version, asker, models)
    return WorkerFacts(WorkerKind.OPENAI_HTTP, models.names, max_context_tokens=models.max_context_tokens)


async def _models(worker: WorkerId, asker: HttpAsker) -> _Models:
    answer = await asker.ask("GET", "/v1/models")
    if answer.status in _LOCKED:
        raise WorkerLocked(worker, answer.status, shown=asker.has_key)
    listed = answer.document().get("data")
    if not answer.ok or not isinstance(listed, list):
        raise WorkerRefused(worker, f"GET /v1/models gave HTTP {answer.status}: {answer.reason()}")
    models = [model for model in listed if isinstance(model, dict) and isinstance(model.get("id"), str)]
    models.sort(key=lambda model: bool(model.get("parent")))  # a LoRA adapter names its base
    return _Models(
        names=tuple(model["id"] for model in models),
        adapters=tuple(model["id"] for model in models if model.get("parent")),
        max_context_tokens=max((_whole(model.get("max_model_len")) for model in models), default=0),
        owners=frozenset(str(model.get("owned_by")) for model in models),
    )


def _kvherd(info: Mapping[str, Any], models: _Models, address: HttpAddress) -> WorkerFacts:
    events = info.get("kv_events")
    target = events.get("grpc") if isinstance(events, dict) else None
    own = info["kvherd"]
    ranks = max(_whole(info.get("dp_size")), 1)
    return WorkerFacts(
        WorkerKind.KVHERD_HTTP,
        models.names,
        addressable=True,
        block_size=_whole(info.get("block_size")),
        ranks=ranks,
        max_context_tokens=_whole(info.get("context_length")) or models.max_context_tokens,
        capacity_tokens=_whole(info.get("max_total_num_tokens")),
        max_running=_whole(info.get("max_running_requests")) * ranks,
        events_url=_reachable(target, address) if isinstance(target, str) else None,
        version=str(own.get("version", "")) if isinstance(own, dict) else "",
    )


def _sglang(info: Mapping[str, Any], models: _Models) -> WorkerFacts:
    states = info.get("internal_states")
    state = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
    memory = state.get("memory_usage")
    ranks = max(_whole(info.get("dp_size")), 1)
    capacity = _whole(info.get("max_total_num_tokens"))
    if not capacity and isinstance(memory, dict):
        capacity = _whole(memory.get("token_capacity"))
    return WorkerFacts(
        WorkerKind.SGLANG_HTTP,
        models.names,
        addressable=True,
        block_size=_whole(info.get("page_size")),
        ranks=ranks,
        max_context_tokens=models.max_context_tokens or _whole(info.get("context_length")),
        capacity_tokens=capacity,
        max_running=_whole(state.get("effective_max_running_requests_per_dp")) * ranks,
        adapters=models.adapters,
        version=str(info.get("version", "")),
        health_s=SGLANG_HEALTH_S,
    )


async def _vllm(version: str, asker: HttpAsker, models: _Models) -> WorkerFacts:
    """vLLM tells its cache's shape only in its metrics, one line for each data-parallel engine."""
    facts = WorkerFacts(
        WorkerKind.VLLM_HTTP,
        models.names,
        addressable=True,
        max_context_tokens=models.max_context_tokens,
        version=version,
        adapters=models.adapters,
    )
    answer = await asker.ask("GET", "/metrics")
    lines = answer.body.decode("utf-8", "replace").splitlines() if answer.ok else []
    engines = [dict(_LABEL.findall(line)) for line in lines if line.startswith("vllm:cache_config_info{")]
    if not engines:
        return facts
    block_size = _number(engines[0].get("block_size", ""))
    blocks = sum(_number(engine.get("num_gpu_blocks", "")) for engine in engines)
    return replace(facts, block_size=block_size, ranks=len(engines), capacity_tokens=blocks * block_size)


def _reachable(target: str, address: HttpAddress) -> str:
    """Where the events are for us: an engine that listens everywhere, or on its own loopback, is at its own host."""
    host, _, port = target.removeprefix("grpc://").rpartition(":")
    if host.strip("[]") in _ANY_HOST:
        host = address.host if ":" not in address.host else f"[{address.host}]"
    return f"grpc://{host}:{port}"


def _whole(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0
