"""The OpenAI client, unmodified, through a gateway over servers that can what the embedded engine cannot."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel

from kvherd.adapters.http_worker import HttpWorker
from kvherd.core.fleet.spec import WorkerSpec
from kvherd.core.ids import WorkerId
from kvherd.services.gateway.gateway import Gateway, GatewayConfig
from kvherd.testing.openai_engine import OpenAiEngine
from kvherd.testing.raw_http import until

pytestmark = pytest.mark.net

ANSWER_S = 30.0
HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


class Weather(BaseModel):
    city: str
    degrees: int


@dataclass
class Room:
    engines: list[OpenAiEngine]
    client: openai.AsyncOpenAI
    url: str

    def asked(self, method: str, path: str) -> list[int]:
        """How many such requests each engine had."""
        return [len(engine.asked(method, path)) for engine in self.engines]

    def at(self, header: str | None) -> OpenAiEngine:
        """The engine that an answer's header names."""
        return next(engine for engine in self.engines if engine.url == header)


@asynccontextmanager
async def gateway(*engines: OpenAiEngine, data_key: str | None = None, key: str = "none") -> AsyncIterator[Room]:
    """Before engines that run."""
    config = GatewayConfig(
        port=0,
        grpc_port=0,
        workers=tuple(WorkerSpec(WorkerId(engine.url)) for engine in engines),
        policy="round_robin",
        data_key=data_key,
    )

    def nothing(_: object) -> Any:
        raise AssertionError("no engine here tells events or tokens")

    made = Gateway(
        config,
        worker_factory=lambda url, _: HttpWorker(WorkerId(url), url),
        feed_factory=nothing,
        tokenizer_factory=nothing,
    )
    async with made as it, httpx.AsyncClient() as plain:
        url = f"http://127.0.0.1:{it.port}"
        async with asyncio.timeout(ANSWER_S):
            while engines and (await plain.get(f"{url}/ready")).status_code != 200:  # noqa: ASYNC110 - HTTP tells of nothing
                await asyncio.sleep(0.01)
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=ANSWER_S) as client:
            yield Room(list(engines), client, url)


@asynccontextmanager
async def room(engines: int = 1) -> AsyncIterator[Room]:
    async with AsyncExitStack() as stack:
        started = [await stack.enter_async_context(OpenAiEngine()) for _ in range(engines)]
        yield await stack.enter_async_context(gateway(*started))


# --- what passes through ------------------------------------------------------------------------------------------


async def test_embeddings_come_packed_as_the_client_wants_them() -> None:
    async with room() as it:
        one = await it.client.embeddings.create(model="m", input="hello")
        assert [each.embedding for each in one.data] == [[5.0, 0.5]]
        several = await it.client.embeddings.create(model="m", input=["a", "bb"], encoding_format="float")
        assert [each.embedding[0] for each in several.data] == [1.0, 2.0]
        tokens = await it.client.embeddings.create(model="m", input=[[1, 2, 3]])
        assert tokens.data[0].embedding[0] == 3.0


async def test_a_tool_is_called_and_its_answer_answered() -> None:
    async with room() as it:
        asked = await it.client.chat.completions.create(
            model="m", messages=HELLO, tools=[WEATHER], tool_choice="required"
        )
        message = asked.choices[0].message
        assert asked.choices[0].finish_reason == "tool_calls"
        (call,) = message.tool_calls or []
        assert call.type == "function"
        assert json.loads(call.function.arguments) == {"city": "Ulm"}
        done: Any = {"role": "tool", "tool_call_id": call.id, "content": "7 degrees"}
        told = await it.client.chat.completions.create(
            model="m",
            messages=[*HELLO, message.model_dump(exclude_none=True), done],  # type: ignore[list-item]
            tools=[WEATHER],
        )
        assert told.choices[0].message.content == "hello"
        sent = json.loads(it.engines[0].asked("POST", "/v1/chat/completions")[0].body)
        assert (sent["tools"], sent["tool_choice"]) == ([WEATHER], "required")


async def test_a_streamed_call_of_a_tool_is_put_together_by_the_client() -> None:
    async with room() as it, it.client.chat.completions.stream(model="m", messages=HELLO, tools=[WEATHER]) as stream:
        answer = await stream.get_final_completion()
    (call,) = answer.choices[0].message.tool_calls or []
    assert json.loads(call.function.arguments) == {"city": "Ulm"}


async def test_an_answer_of_a_wanted_form_is_read_into_it() -> None:
    async with room() as it:
        answer = await it.client.chat.completions.parse(model="m", messages=HELLO, response_format=Weather)
        assert answer.choices[0].message.parsed == Weather(city="Ulm", degrees=7)
        sent = json.loads(it.engines[0].asked("POST", "/v1/chat/completions")[0].body)
        assert sent["response_format"]["json_schema"]["name"] == "Weather"


async def test_a_body_reaches_the_engine_byte_for_byte() -> None:
    body = b'{ "model":"m" , "messages" :[{"role":"user","content":"\\u00e9"}],"x": 1.50e+0, "x":{"y":[ null ]} }\n'
    async with room() as it, httpx.AsyncClient() as plain:
        path = "/v1/chat/completions"
        assert (await plain.post(it.url + path, content=body)).status_code == 200
        assert it.engines[0].asked("POST", path)[0].body == body


async def test_names_and_traces_go_to_the_engine_and_the_name_comes_back() -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with room() as it:
        create = it.client.chat.completions.with_raw_response.create
        answer = await create(
            model="m", messages=HELLO, extra_headers={"traceparent": trace, "X-Request-Id": "mine", "X-Own": "1"}
        )
        made = await create(model="m", messages=HELLO)
        first, second = it.engines[0].asked("POST", "/v1/chat/completions")
        assert (first.header("traceparent"), first.header("x-request-id")) == (trace, "mine")
        assert first.header("x-own") == "1"
        assert first.header("authorization") == "Bearer none"
        assert answer.headers["x-request-id"] == "mine"
        assert answer.headers["x-kvherd-worker"] == it.engines[0].url
        assert second.header("x-request-id") == made.headers["x-request-id"] == made.parse()._request_id
        assert len((second.header("traceparent") or "").split("-")) == 4


# --- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, openai.BadRequestError),
        (401, openai.AuthenticationError),
        (403, openai.PermissionDeniedError),
        (404, openai.NotFoundError),
        (409, openai.ConflictError),
        (422, openai.UnprocessableEntityError),
        (429, openai.RateLimitError),
        (500, openai.InternalServerError),
    ],
)
async def test_an_engine_s_own_refusal_is_the_client_s(status: int, kind: type[openai.APIStatusError]) -> None:
    async with room(2) as it:
        for engine in it.engines:
            engine.fails = [status]
        with pytest.raises(kind, match="the engine's own word") as caught:
            await it.client.chat.completions.create(model="m", messages=HELLO)
        assert (caught.value.code, caught.value.type) == ("engine", "engine_error")
        assert sum(it.asked("POST", "/v1/chat/completions")) == 1


async def test_the_gateway_s_own_refusals_are_the_errors_that_the_client_knows() -> None:
    async with OpenAiEngine() as engine:
        async with gateway(engine, data_key="secret", key="wrong") as it:
            with pytest.raises(openai.AuthenticationError) as caught:
                await it.client.models.list()
            with pytest.raises(openai.AuthenticationError) as caught:
                await it.client.chat.completions.create(model="m", messages=HELLO)
            assert caught.value.code == "invalid_api_key"
        async with gateway(engine, data_key="secret", key="secret") as it:
            assert [model.id async for model in it.client.models.list()] == ["m"]
            await it.client.chat.completions.create(model="m", messages=HELLO)
            assert engine.asked("POST", "/v1/chat/completions")[-1].header("authorization") is None
            with pytest.raises(openai.NotFoundError):
                await it.client.chat.completions.create(model="other", messages=HELLO)
    async with gateway() as it:
        with pytest.raises(openai.InternalServerError) as later:
            await it.client.chat.completions.create(model="m", messages=HELLO)
        assert (later.value.status_code, later.value.code) == (503, "no_worker")
        assert int(later.value.response.headers["retry-after"]) > 0


async def test_a_client_comes_again_when_it_was_told_to() -> None:
    async with OpenAiEngine() as engine, gateway(engine) as it:
        engine.fails = [503, 503, 503]
        patient = it.client.with_options(max_retries=2)
        with pytest.raises(openai.InternalServerError):
            await it.client.chat.completions.create(model="m", messages=HELLO)
        engine.fails = [429]
        answer = await patient.chat.completions.create(model="m", messages=HELLO)
        assert answer.choices[0].message.content == "hello"


async def test_an_engine_that_drops_a_chat_is_replaced_and_nobody_notices() -> None:
    async with room(2) as it:
        for engine in it.engines:
            engine.cuts = 1
        one, two = it.engines
        two.cuts = 0
        for _ in range(2):
            answer = await it.client.chat.completions.create(model="m", messages=HELLO)
            assert answer.choices[0].message.content == "hello"
        assert one.cuts == 0


# --- clients that leave -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("begun", [False, True])
async def test_a_client_that_leaves_ends_its_request_on_the_engine(begun: bool) -> None:
    async with room() as it:
        it.engines[0].holds = True
        if begun:
            stream = await it.client.chat.completions.create(model="m", messages=HELLO, stream=True)
            async for _ in stream:
                break
            await stream.close()
        else:
            asking = asyncio.create_task(it.client.chat.completions.create(model="m", messages=HELLO))
            await until(lambda: bool(it.engines[0].asked("POST", "/v1/chat/completions")), "the engine has it")
            asking.cancel()
        await until(lambda: it.engines[0].deserted == 1, "the engine was told")


# --- what is stored -----------------------------------------------------------------------------------------------


async def test_a_conversation_goes_on_where_it_is_kept() -> None:
    async with room(3) as it:
        responses = it.client.responses
        for _ in range(4):
            first = await responses.with_raw_response.create(model="m", input="hello")
            keeper = it.at(first.headers["x-kvherd-worker"])
            past = first.parse()
            for _ in range(3):
                later = await responses.with_raw_response.create(model="m", input="and?", previous_response_id=past.id)
                assert it.at(later.headers["x-kvherd-worker"]) is keeper
                past = later.parse()
            assert (await responses.retrieve(past.id)).id == past.id
            assert (await responses.cancel(past.id)).status == "cancelled"
            assert [item async for item in responses.input_items.list(past.id)] == []
            await responses.delete(past.id)
            with pytest.raises(openai.NotFoundError):
                await responses.retrieve(past.id)
        assert sum(it.asked("POST", "/v1/responses")) == 16  # none was asked of an engine that did not keep its past


async def test_a_streamed_response_is_gone_on_with_as_well() -> None:
    async with room(3) as it:
        for _ in range(3):
            stream = await it.client.responses.create(model="m", input="hello", stream=True)
            kinds = {event.type: event async for event in stream}
            assert list(kinds) == ["response.created", "response.completed"]
            name = kinds["response.completed"].response.id  # type: ignore[union-attr]
            assert (await it.client.responses.create(model="m", input="and?", previous_response_id=name)).id != name


async def test_a_conversation_object_is_kept_to() -> None:
    async with room(3) as it:
        for _ in range(3):
            talk = await it.client.conversations.create()
            answer = await it.client.responses.create(model="m", input="hello", conversation=talk.id)
            assert (await it.client.conversations.retrieve(talk.id)).id == talk.id
            assert (await it.client.responses.retrieve(answer.id)).id == answer.id


async def test_another_gateway_finds_what_it_did_not_see() -> None:
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(OpenAiEngine()) for _ in range(3)]
        async with gateway(*engines) as it:
            names = [(await it.client.responses.create(model="m", input="hello")).id for _ in range(3)]
        async with gateway(*engines) as it:
            for name in names:
                answer = await it.client.responses.create(model="m", input="and?", previous_response_id=name)
                assert answer.previous_response_id == name
            with pytest.raises(openai.NotFoundError, match="no worker here keeps"):
                await it.client.responses.create(model="m", input="and?", previous_response_id="resp_unknown")


async def test_a_response_that_may_be_stored_is_never_asked_for_twice() -> None:
    async with room(3) as it:
        for engine in it.engines:
            engine.cuts = 1
        with pytest.raises(openai.InternalServerError) as caught:
            await it.client.responses.create(model="m", input="hello")
        assert caught.value.code == "worker_failed"
        assert sum(it.asked("POST", "/v1/responses")) == 1
