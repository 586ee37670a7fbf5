"""Profiling an engine over HTTP, and its metrics: vLLM and SGLang have the same routes, and different fields."""

import re
from collections.abc import Mapping
from typing import Final

import msgspec

from kvherd.adapters.http_exchange import HttpAsker
from kvherd.adapters.http_flush import ranks_told
from kvherd.core.errors import FieldInvalid, WorkerRefused, WorkerUnsupported
from kvherd.core.ids import WorkerId
from kvherd.ports.worker import ProfileAnswer, WorkerKind

_OF_VLLM: Final = {"num_steps": "max_iterations", "profile_prefix": "profile_prefix"}
"""What vLLM calls the fields that it takes, since 0.32."""
_VERSION: Final = re.compile(r"(\d+)\.(\d+)")


async def start_profile(
    worker: WorkerId, asker: HttpAsker, kind: WorkerKind, fields: Mapping[str, object], *, version: str = ""
) -> ProfileAnswer:
    """`fields` are SGLang's; vLLM would ignore most of them without a word, so those are refused."""
    if kind is WorkerKind.VLLM_HTTP:
        fields = _vllm_fields(fields, version)
    return await _ordered(worker, asker, "/start_profile", msgspec.json.encode(dict(fields)) if fields else b"")


def _vllm_fields(fields: Mapping[str, object], version: str) -> Mapping[str, object]:
    found = _VERSION.match(version)
    known = _OF_VLLM if found and (int(found[1]), int(found[2])) >= (0, 32) else {}
    unknown = sorted(fields.keys() - known.keys())
    if unknown:
        problem = "means nothing to this vLLM, which takes it from --profiler-config when it starts, if at all"
        raise FieldInvalid(unknown[0], problem)
    return {
        known[name]: int(value) if isinstance(value, str) and name == "num_steps" else value
        for name, value in fields.items()
    }


async def stop_profile(worker: WorkerId, asker: HttpAsker) -> ProfileAnswer:
    return await _ordered(worker, asker, "/stop_profile", b"")


async def _ordered(worker: WorkerId, asker: HttpAsker, path: str, body: bytes) -> ProfileAnswer:
    answer = await asker.ask("POST", path, body=body)
    if answer.status == 404:
        raise WorkerUnsupported(worker, f"profiling (it has no {path}; vLLM has it with a --profiler-config only)")
    told = answer.document()
    ranks = ranks_told(told)
    if not answer.ok:
        refused = WorkerRefused(worker, f"HTTP {answer.status}: {answer.reason()}")
        if not ranks:
            raise refused
        return ProfileAnswer(message=str(refused), done=False, ranks=ranks)
    files, profile_id = told.get("files"), told.get("profile_id")
    return ProfileAnswer(
        message=answer.reason() if answer.body.strip() else "done",
        profile_id=profile_id if isinstance(profile_id, str) else "",
        files=tuple(map(str, files)) if isinstance(files, list) else (),
        ranks=ranks,
    )


async def engine_metrics(worker: WorkerId, asker: HttpAsker) -> bytes:
    answer = await asker.ask("GET", "/metrics")
    if answer.status == 404:
        raise WorkerUnsupported(worker, "metrics (it has no /metrics)")
    if not answer.ok:
        raise WorkerRefused(worker, f"GET /metrics gave HTTP {answer.status}: {answer.reason()}")
    return answer.body
