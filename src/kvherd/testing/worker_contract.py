"""What every worker of the gateway must do, whatever it speaks.

A suite derives from `WorkerContract` and says how to open a worker before an engine that behaves as `EngineActs` says.
Tests are marked `net` by the suite's module. The engine serves the model `herd`.
"""

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

import pytest

from kvherd.core.errors import WorkerError, WorkerFailed, WorkerUnreachable
from kvherd.core.ids import RequestId
from kvherd.ports.completions import Usage
from kvherd.ports.worker import Call, NewsTo, Worker
from kvherd.testing.workers import FakeResponder


@dataclass
class EngineActs:
    """The engine answers `answer` to everything; at `breaks_after` bytes of it, it breaks, or stalls if `stalls`.

    `flushes`: whether a flush is done, or refused because of a running request. `ended` is set when a generation has
    ended on the engine, however.
    """

    answer: str = "Paris"
    breaks_after: int | None = None
    stalls: bool = False
    flushes: bool = True
    healthy: bool = True
    ended: asyncio.Event = field(default_factory=asyncio.Event)


def chat(
    *,
    stream: bool = False,
    on_usage: Callable[[Usage], None] | None = None,
    on_first_token: Callable[[], None] | None = None,
) -> Call:
    body: dict[str, object] = {"model": "herd", "messages": [{"role": "user", "content": "hi"}], "stream": stream}
    body |= {"stream_options": {"include_usage": True}} if stream else {}
    headers = [(b"content-type", b"application/json")]
    return Call(
        "POST",
        "/v1/chat/completions",
        headers,
        json.dumps(body).encode(),
        RequestId("r"),
        model="herd",
        stream=stream,
        news=NewsTo(on_first_token, on_usage),
    )


class WorkerContract:
    def opened(self, acts: EngineActs) -> AbstractAsyncContextManager[Worker]:
        """A worker that has not been detected yet; its engine is stopped afterwards."""
        raise NotImplementedError

    def nowhere(self) -> AbstractAsyncContextManager[Worker]:
        """A worker at an address where nobody listens."""
        raise NotImplementedError

    async def test_detection_tells_the_model(self) -> None:
        async with self.opened(EngineActs()) as worker:
            assert (await worker.detect()).models == ("herd",)

    async def test_an_answer_is_whole_with_its_status_and_usage(self) -> None:
        seen: list[Usage] = []
        async with self.opened(EngineActs()) as worker:
            responder = FakeResponder()
            await worker.forward(chat(on_usage=seen.append), responder)
        assert (responder.status, responder.ended, responder.failed) == (200, True, "")
        assert responder.headers["content-type"].startswith("application/json")
        assert json.loads(responder.body)["choices"][0]["message"]["content"] == "Paris"
        assert [usage.completion_tokens for usage in seen] == [5]

    async def test_a_stream_is_passed_on_to_its_done(self) -> None:
        seen: list[Usage] = []
        first: list[bool] = []
        async with self.opened(EngineActs()) as worker:
            responder = FakeResponder()
            call = chat(stream=True, on_usage=seen.append, on_first_token=lambda: first.append(True))
            await worker.forward(call, responder)
        assert (responder.status, responder.ended, responder.failed) == (200, True, "")
        assert responder.headers["content-type"].startswith("text/event-stream")
        events = responder.body.decode().strip().split("\n\n")
        assert events.pop() == "data: [DONE]"
        chunks = [json.loads(event.removeprefix("data: ")) for event in events]
        said = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"]]
        assert "".join(said) == "Paris"
        assert [usage.completion_tokens for usage in seen] == [5]
        assert first == [True]

    async def test_an_engine_that_breaks_in_the_middle_is_no_silence(self) -> None:
        async with self.opened(EngineActs(breaks_after=2)) as worker:
            responder = FakeResponder()
            with pytest.raises(WorkerFailed):
                await worker.forward(chat(stream=True), responder)
        assert responder.failed
        assert b"[DONE]" not in responder.body

    async def test_an_engine_that_breaks_before_its_answer_leaves_it_to_another(self) -> None:
        async with self.opened(EngineActs(breaks_after=0)) as worker:
            responder = FakeResponder()
            with pytest.raises(WorkerError):
                await worker.forward(chat(), responder)
        assert not responder.started

    async def test_leaving_aborts_the_generation_on_the_engine(self) -> None:
        acts = EngineActs(breaks_after=2, stalls=True)
        async with self.opened(acts) as worker:
            responder = FakeResponder()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await worker.forward(chat(stream=True), responder)
            async with asyncio.timeout(5):
                await acts.ended.wait()

    async def test_a_flush_that_is_done_says_so_and_when_it_was_on_its_way(self) -> None:
        opened: list[bool] = []
        async with self.opened(EngineActs()) as worker:
            await worker.detect()
            answer = await worker.flush(timeout_s=0.0, opened=lambda: opened.append(True))
        assert answer.done
        assert opened == [True]

    async def test_a_flush_that_is_refused_is_an_answer_and_no_failure(self) -> None:
        async with self.opened(EngineActs(flushes=False)) as worker:
            await worker.detect()
            answer = await worker.flush(timeout_s=0.0)
        assert not answer.done
        assert answer.message

    async def test_a_probe_tells_health(self) -> None:
        async with self.opened(EngineActs()) as worker:
            await worker.probe()
        async with self.opened(EngineActs(healthy=False)) as worker:
            with pytest.raises(WorkerError):
                await worker.probe()

    async def test_nobody_there_is_said_before_anything_started(self) -> None:
        responder = FakeResponder()
        async with self.nowhere() as worker:
            for attempt in (worker.detect(), worker.probe(), worker.flush(timeout_s=0.0)):
                with pytest.raises(WorkerUnreachable):
                    await attempt
            with pytest.raises(WorkerUnreachable):
                await worker.forward(chat(), responder)
        assert not responder.started

    async def test_closing_twice_is_closing_once(self) -> None:
        async with self.opened(EngineActs()) as worker:
            await worker.probe()
            await worker.close()
            await worker.close()
