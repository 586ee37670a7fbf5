"""A gRPC worker keeps the promises of the port."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from socket import create_server

import pytest

from kvherd.adapters.grpc_worker import GrpcWorker
from kvherd.adapters.model_files import locate
from kvherd.adapters.tokenizer import load_tokenizer
from kvherd.core.ids import WorkerId
from kvherd.ports.worker import Worker
from kvherd.testing.sglang_engine import EngineScript, ScriptedSglang, serving
from kvherd.testing.worker_contract import EngineActs, WorkerContract

pytestmark = pytest.mark.net

TOKENIZER = load_tokenizer(locate("tiny")).artifact_zip()


class TestGrpcWorker(WorkerContract):
    def opened(self, acts: EngineActs) -> AbstractAsyncContextManager[Worker]:
        return _opened(acts)

    def nowhere(self) -> AbstractAsyncContextManager[Worker]:
        return _nowhere()


@asynccontextmanager
async def _opened(acts: EngineActs) -> AsyncIterator[Worker]:
    script = EngineScript(
        answer=acts.answer,
        stops_after=acts.breaks_after,
        then="stall" if acts.stalls else "INTERNAL",
        flush="done" if acts.flushes else "refused",
        healthy=acts.healthy,
        tokenizer_zip=TOKENIZER,
        ended=acts.ended,
    )
    async with serving(ScriptedSglang(script)) as target:
        worker = GrpcWorker(WorkerId(f"grpc://{target}"))
        try:
            yield worker
        finally:
            await worker.close()


@asynccontextmanager
async def _nowhere() -> AsyncIterator[Worker]:
    with closing(create_server(("127.0.0.1", 0))) as probe:
        port = probe.getsockname()[1]
    worker = GrpcWorker(WorkerId(f"grpc://127.0.0.1:{port}"))
    try:
        yield worker
    finally:
        await worker.close()
