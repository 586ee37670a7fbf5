"""An HTTP worker keeps the promises of the port."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from socket import create_server

import pytest

from kvherd.adapters.http_worker import HttpWorker
from kvherd.core.ids import WorkerId
from kvherd.ports.worker import Worker
from kvherd.testing.raw_http import SSE_HEAD, RawRequest, RawServer, chunk, json_answer
from kvherd.testing.worker_contract import EngineActs, WorkerContract

pytestmark = pytest.mark.net


class TestHttpWorker(WorkerContract):
    def opened(self, acts: EngineActs) -> AbstractAsyncContextManager[Worker]:
        return _opened(acts)

    def nowhere(self) -> AbstractAsyncContextManager[Worker]:
        return _nowhere()


class ScriptedHttp:
    """An engine like kvherd's own, a token a letter."""

    def __init__(self, acts: EngineActs) -> None:
        self._acts = acts

    async def __call__(self, request: RawRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        acts = self._acts
        path = request.target.partition("?")[0]
        if path == "/v1/chat/completions":
            try:
                await self._generate(reader, writer, stream=json.loads(request.body)["stream"] is True)
            finally:
                acts.ended.set()
        elif path == "/flush_cache":
            told = {"success": acts.flushes, "message": "cleared" if acts.flushes else "1 running"}
            writer.write(json_answer(json.dumps(told).encode(), "200 OK" if acts.flushes else "400 Bad Request"))
        elif path == "/health":
            writer.write(json_answer(b"{}", "200 OK" if acts.healthy else "503 Service Unavailable"))
        else:
            told_of = {"/server_info": {"kvherd": {}}, "/v1/models": {"data": [{"id": "herd"}]}}
            writer.write(json_answer(json.dumps(told_of[path]).encode()))

    async def _generate(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, stream: bool) -> None:
        acts = self._acts
        usage = {"prompt_tokens": 3, "completion_tokens": len(acts.answer)}
        if stream:
            writer.write(SSE_HEAD)
            for letter in acts.answer[: acts.breaks_after]:
                writer.write(_event({"choices": [{"delta": {"content": letter}}]}))
            await writer.drain()
        if acts.stalls:
            await reader.readexactly(1)
        if acts.breaks_after is not None:
            writer.close()
        elif stream:
            writer.write(_event({"choices": [], "usage": usage}) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        else:
            whole = {"choices": [{"message": {"content": acts.answer}}], "usage": usage}
            writer.write(json_answer(json.dumps(whole).encode()))


def _event(document: object) -> bytes:
    return chunk(b"data: " + json.dumps(document).encode() + b"\n\n")


@asynccontextmanager
async def _opened(acts: EngineActs) -> AsyncIterator[Worker]:
    async with RawServer(ScriptedHttp(acts)) as server:
        worker = HttpWorker(WorkerId(server.url), server.url)
        try:
            yield worker
        finally:
            await worker.close()


@asynccontextmanager
async def _nowhere() -> AsyncIterator[Worker]:
    with closing(create_server(("127.0.0.1", 0))) as probe:
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    worker = HttpWorker(WorkerId(url), url)
    try:
        yield worker
    finally:
        await worker.close()
