"""Profiling an engine over HTTP: vLLM and SGLang have the same two routes, and different fields."""

from collections.abc import Mapping

import msgspec

from kvherd.adapters.http_exchange import HttpAsker
from kvherd.core.errors import FieldInvalid, WorkerRefused, WorkerUnsupported
from kvherd.core.ids import WorkerId
from kvherd.ports.worker import WorkerKind


async def start_profile(worker: WorkerId, asker: HttpAsker, kind: WorkerKind, fields: Mapping[str, object]) -> str:
    """`fields` are SGLang's; vLLM would ignore each of them without a word, so there must be none."""
    if kind is WorkerKind.VLLM_HTTP and fields:
        raise FieldInvalid(min(fields), "means nothing to vLLM, which takes it from --profiler-config when it starts")
    return await _ordered(worker, asker, "/start_profile", msgspec.json.encode(dict(fields)) if fields else b"")


async def stop_profile(worker: WorkerId, asker: HttpAsker) -> str:
    return await _ordered(worker, asker, "/stop_profile", b"")


async def _ordered(worker: WorkerId, asker: HttpAsker, path: str, body: bytes) -> str:
    answer = await asker.ask("POST", path, body=body)
    if answer.status == 404:
        raise WorkerUnsupported(worker, f"profiling (it has no {path}; vLLM has it with a --profiler-config only)")
    if not answer.ok:
        raise WorkerRefused(worker, f"HTTP {answer.status}: {answer.reason()}")
    return answer.reason() if answer.body.strip() else "done"
