"""How a servicer stops: nothing new, a bounded time for what is under way, and no port or task left."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc
import httpx
import pytest
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from kvherd.testing.patience import until
from kvherd.testing.processes import can_bind
from kvherd.testing.scheduler import FakeScheduler

pytestmark = pytest.mark.net

Opened = Callable[..., AbstractAsyncContextManager[Any]]


def asked(tokens: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id="a",
        tokenized=pb.TokenizedInput(input_ids=[1, 2, 3]),
        sampling_params=pb.SamplingParams(max_new_tokens=tokens),
        stream=True,
    )


async def last_of(call: Any) -> Any:
    last = None
    while (message := await call.read()) is not grpc.aio.EOF:
        last = message
    return last


async def test_what_is_under_way_may_end(doors: Opened) -> None:
    async with doors(FakeScheduler(step_s=0.005), drain_s=3.0) as at:
        call = at.stub.Generate(asked(60))
        await call.read()
        posting = asyncio.ensure_future(
            at.http.post("/v1/completions", json={"model": "letters", "prompt": "once", "max_tokens": 60})
        )
        await until(lambda: at.scheduler.running == 2)
        reading = asyncio.ensure_future(last_of(call))
        await at.servicer.__aexit__(None, None, None)
        assert (await reading).complete.completion_tokens == 60
        assert (await posting).json()["usage"]["completion_tokens"] == 60


async def test_what_takes_too_long_is_ended_in_the_scheduler_too(doors: Opened) -> None:
    async with doors(FakeScheduler(step_s=0.01), drain_s=0.3) as at:
        call = at.stub.Generate(asked(900))
        await call.read()
        posting = asyncio.ensure_future(
            at.http.post("/v1/completions", json={"model": "letters", "prompt": "once", "max_tokens": 900})
        )
        await until(lambda: at.scheduler.running == 2)
        reading = asyncio.ensure_future(last_of(call))
        await at.servicer.__aexit__(None, None, None)
        await asyncio.wait((reading, posting), timeout=10)
        assert at.scheduler.running == 0
        assert posting.done()
        assert reading.done()
        assert await call.code() is not grpc.StatusCode.OK or (await reading).complete.finish_reason == "abort"
        with pytest.raises(httpx.HTTPError):
            (await posting).raise_for_status()


async def test_ports_are_free_afterwards_and_a_servicer_may_start_there_at_once(doors: Opened) -> None:
    async with doors() as at:
        port = at.config.port
        await last_of(at.stub.Generate(asked(2)))
    assert can_bind(port)
    assert can_bind(port + 1)
    assert can_bind(port + 2)
    async with doors(port=port, sidecar_port=port + 1, http_port=port + 2) as at:
        await last_of(at.stub.Generate(asked(2)))
