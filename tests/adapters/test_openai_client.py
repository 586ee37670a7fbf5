"""The unmodified OpenAI client, over HTTP, against our answers."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai
import pytest
import uvicorn
from openai.types.chat import ChatCompletionMessageParam
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from kvherd.adapters.completions import OpenAiCompletions
from kvherd.core.errors import CallerError, EngineStopping
from kvherd.core.ids import RequestId
from kvherd.testing.text import ByteTokenizer, ScriptedGenerations
from kvherd.wire.openai.errors import error_body
from kvherd.wire.openai.requests import decode_chat, decode_completion

pytestmark = pytest.mark.net

HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


def app_over(engine: ScriptedGenerations) -> Starlette:
    completions = OpenAiCompletions(ByteTokenizer(), "herd", 200)

    async def answer(request: Request) -> Response:
        decode = decode_chat if request.url.path.endswith("/chat/completions") else decode_completion
        try:
            call = decode(await request.body())
            if call.options.stream:
                frames = completions.stream(call, request=RequestId("r"), generate=engine.generate)
                return StreamingResponse(frames, media_type="text/event-stream")
            whole = await completions.whole(call, request=RequestId("r"), generate=engine.generate)
        except CallerError as error:
            status, body = error_body(error)
            return Response(body, status, media_type="application/json")
        return Response(whole, media_type="application/json")

    paths = ("/v1/chat/completions", "/v1/completions")
    return Starlette(routes=[Route(path, answer, methods=["POST"]) for path in paths])


@asynccontextmanager
async def client_of(engine: ScriptedGenerations) -> AsyncIterator[openai.AsyncOpenAI]:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app_over(engine), log_level="warning", lifespan="off", ws="none"))
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(server.serve(sockets=[listener]))
        try:
            base_url = f"http://127.0.0.1:{port}/v1"
            async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=20) as client:
                yield client
        finally:
            server.should_exit = True
            await serving
            listener.close()


async def test_it_reads_a_whole_chat() -> None:
    async with client_of(ScriptedGenerations("Paris", cached_tokens=2)) as client:
        answer = await client.chat.completions.create(model="herd", messages=HI, logprobs=True, top_logprobs=1)
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Paris", "stop")
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [token.token for token in choice.logprobs.content] == list("Paris")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2


async def test_it_reads_a_streamed_chat_with_usage() -> None:
    async with client_of(ScriptedGenerations("grüezi")) as client:
        stream = await client.chat.completions.create(
            model="herd",
            messages=HI,
            stream=True,
            stream_options={"include_usage": True},
            n=2,
        )
        chunks = [chunk async for chunk in stream]
    for index in (0, 1):
        choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert "".join(choice.delta.content or "" for choice in choices) == "grüezi"
        assert (choices[0].delta.role, choices[-1].finish_reason) == ("assistant", "stop")
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 14


async def test_it_reads_text_completions() -> None:
    async with client_of(ScriptedGenerations("abc")) as client:
        answer = await client.completions.create(model="herd", prompt=["x", "y"], echo=True, max_tokens=2)
        assert [choice.text for choice in answer.choices] == ["xab", "yab"]
        stream = await client.completions.create(model="herd", prompt="x", stream=True, logprobs=1)
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "abc"
    offsets = [offset for chunk in chunks if (said := chunk.choices[0].logprobs) for offset in said.text_offset or []]
    assert offsets == [0, 1, 2]


async def test_refusals_are_its_bad_requests() -> None:
    async with client_of(ScriptedGenerations("abc")) as client:
        with pytest.raises(openai.BadRequestError, match="temperature: must be between 0 and 2") as caught:
            await client.chat.completions.create(model="herd", messages=HI, temperature=-1)
        assert (caught.value.param, caught.value.code) == ("temperature", "invalid_value")
        with pytest.raises(openai.BadRequestError, match="the prompt has 300 tokens") as caught:
            await client.completions.create(model="herd", prompt="x" * 300)
        assert caught.value.code == "context_length_exceeded"


async def test_an_error_in_the_middle_of_a_stream_reaches_it() -> None:
    async with client_of(ScriptedGenerations("abc", error=EngineStopping(), fail_after=2)) as client:
        stream = await client.chat.completions.create(model="herd", messages=HI, stream=True)
        with pytest.raises(openai.APIError, match="the engine is stopping"):
            async for _ in stream:
                pass


async def test_leaving_a_stream_aborts_the_generation() -> None:
    stopped = asyncio.Event()
    engine = ScriptedGenerations("x" * 100_000, pause=lambda: asyncio.sleep(0), ended=stopped.set)
    async with client_of(engine) as client:
        stream = await client.chat.completions.create(model="herd", messages=HI, stream=True)
        await anext(aiter(stream))
        await stream.close()
        async with asyncio.timeout(10):
            await stopped.wait()
