"""Orders through the servicer's doors: what is promised to callers that stay, and to those that leave."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from smg_grpc_proto.generated import common_pb2

from kvherd.testing.patience import until
from kvherd.testing.scheduler import FakeScheduler

pytestmark = pytest.mark.net

Opened = Callable[..., AbstractAsyncContextManager[Any]]

LONG = {"model": "letters", "prompt": "once", "max_tokens": 900}


async def test_a_flush_is_withdrawn_when_its_grpc_caller_cancels(doors: Opened) -> None:
    scheduler = FakeScheduler(step_s=0.01)
    async with doors(scheduler) as at:
        busy = asyncio.ensure_future(at.http.post("/v1/completions", json=LONG))
        await until(lambda: scheduler.running == 1)
        call = at.stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=60.0))
        waiting = asyncio.ensure_future(call.wait_for_connection())
        await until(lambda: scheduler.open_orders == 1)
        call.cancel()
        await until(lambda: scheduler.withdrawn == 1)
        waiting.cancel()
        busy.cancel()


async def test_a_flush_is_withdrawn_when_its_grpc_caller_s_deadline_comes(doors: Opened) -> None:
    scheduler = FakeScheduler(step_s=0.01)
    async with doors(scheduler) as at:
        busy = asyncio.ensure_future(at.http.post("/v1/completions", json=LONG))
        await until(lambda: scheduler.running == 1)
        call = at.stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=60.0), timeout=0.2)
        assert (await call.code()).name == "DEADLINE_EXCEEDED"
        await until(lambda: scheduler.withdrawn == 1)
        busy.cancel()


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_flush_is_withdrawn_when_its_http_client_leaves(doors: Opened, method: str) -> None:
    scheduler = FakeScheduler(step_s=0.01)
    async with doors(scheduler) as at:
        busy = asyncio.ensure_future(at.http.post("/v1/completions", json=LONG))
        await until(lambda: scheduler.running == 1)
        flush = asyncio.ensure_future(at.http.request(method, "/flush_cache?timeout=60&hold=true"))
        await until(lambda: scheduler.open_orders == 1)
        flush.cancel()
        await until(lambda: scheduler.withdrawn == 1)
        busy.cancel()


async def test_the_metrics_count_orders_that_wait_and_answers_that_came_late(doors: Opened) -> None:
    scheduler = FakeScheduler(step_s=0.01)
    scheduler.late_answers = 3
    async with doors(scheduler) as at:
        busy = asyncio.ensure_future(at.http.post("/v1/completions", json=LONG))
        await until(lambda: scheduler.running == 1)
        flush = asyncio.ensure_future(at.http.post("/flush_cache?timeout=60"))
        await until(lambda: scheduler.open_orders == 1)
        text = (await at.http.get("/metrics")).text
        assert 'kvherd_orders_open{model_name="letters"} 1.0' in text
        assert 'kvherd_late_order_answers_total{model_name="letters"} 3.0' in text
        flush.cancel()
        busy.cancel()
