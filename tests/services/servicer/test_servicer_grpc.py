"""Every RPC, as a client made from the published protocol alone sees it."""

import asyncio
import hashlib
import json
import math
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from kvherd.core.errors import PortInUse
from kvherd.core.ids import Rank
from kvherd.testing.patience import until
from kvherd.testing.processes import can_bind, free_ports
from kvherd.testing.scheduler import FakeScheduler, answer_token, rank_facts

pytestmark = pytest.mark.net

Opened = Callable[..., AbstractAsyncContextManager[Any]]
PROMPT = list(b"once upon a time")


def asked(
    name: str = "a", *, tokens: int | None = 5, prompt: list[int] | None = None, **more: Any
) -> pb.GenerateRequest:
    params = pb.SamplingParams(temperature=0, max_new_tokens=tokens, **more.pop("params", {}))
    ids = pb.TokenizedInput(input_ids=PROMPT if prompt is None else prompt)
    return pb.GenerateRequest(request_id=name, tokenized=ids, sampling_params=params, **more)


def expected(count: int, prompt: list[int] = PROMPT) -> list[int]:
    return [answer_token(prompt, index) for index in range(count)]


@asynccontextmanager
async def refused(code: str, *words: str) -> AsyncIterator[None]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        yield
    assert caught.value.code() is grpc.StatusCode[code], caught.value.details()
    for word in words:
        assert word in (caught.value.details() or "")


async def read(call: Any) -> list[pb.GenerateResponse]:
    return [message async for message in call]


# --- Generate ----------------------------------------------------------------------------------


async def test_a_stream_has_the_new_tokens_of_each_step_and_then_the_whole_answer(doors: Opened) -> None:
    async with doors() as at:
        messages = await read(at.stub.Generate(asked(stream=True)))
    *chunks, last = messages
    assert [token for message in chunks for token in message.chunk.token_ids] == expected(5)
    assert len(chunks) > 1
    assert [message.chunk.completion_tokens for message in chunks][-1] == 5
    assert last.WhichOneof("response") == "complete"
    assert list(last.complete.output_ids) == expected(5)
    assert last.complete.finish_reason == "length"
    assert (last.complete.prompt_tokens, last.complete.completion_tokens) == (len(PROMPT), 5)
    assert {message.request_id for message in messages} == {"a"}


async def test_who_does_not_stream_gets_one_message(doors: Opened) -> None:
    async with doors() as at:
        [only] = await read(at.stub.Generate(asked()))
    assert list(only.complete.output_ids) == expected(5)


async def test_cached_tokens_are_told(doors: Opened) -> None:
    prompt = list(range(50))
    async with doors() as at:
        [cold] = await read(at.stub.Generate(asked(prompt=prompt)))
        [warm] = await read(at.stub.Generate(asked(prompt=prompt)))
    assert (cold.complete.cached_tokens, warm.complete.cached_tokens) == (0, 48)


async def test_several_choices_come_with_their_index(doors: Opened) -> None:
    async with doors() as at:
        messages = await read(at.stub.Generate(asked(stream=True, params={"n": 3})))
        assert [request.request for request in at.scheduler.submitted] == ["a-0", "a-1", "a-2"]
    complete = {m.complete.index: list(m.complete.output_ids) for m in messages if m.HasField("complete")}
    assert complete == dict.fromkeys(range(3), expected(5))


async def test_a_stop_string_ends_the_answer_with_the_token_that_completes_it(doors: Opened) -> None:
    stop = bytes(expected(20)[7:9]).decode()
    async with doors() as at:
        *chunks, last = await read(at.stub.Generate(asked(tokens=100, stream=True, params={"stop": [stop]})))
        await until(lambda: at.scheduler.running == 0)
        assert at.scheduler.aborted == ["a"]
    assert last.complete.finish_reason == "stop"
    assert last.complete.matched_stop_str == stop
    assert list(last.complete.output_ids) == expected(9)
    assert last.complete.completion_tokens == 9
    assert [token for message in chunks for token in message.chunk.token_ids] == expected(9)


async def test_a_stop_token_ends_the_answer_and_is_named(doors: Opened) -> None:
    async with doors() as at:
        [only] = await read(at.stub.Generate(asked(tokens=100, params={"stop_token_ids": [expected(4)[3]]})))
    assert only.complete.finish_reason == "stop"
    assert only.complete.matched_token_id == expected(4)[3]
    assert list(only.complete.output_ids) == expected(3)


async def test_logprobs_come_with_their_tokens(doors: Opened) -> None:
    async with doors() as at:
        *chunks, last = await read(
            at.stub.Generate(asked(stream=True, return_logprob=True, logprob_start_len=-1, top_logprobs_num=2))
        )
    whole = last.complete.output_logprobs
    assert list(whole.token_ids) == expected(5)
    assert list(whole.token_logprobs) == [-0.5] * 5
    assert [list(top.values) for top in whole.top_logprobs] == [[-0.5, -1.5]] * 5
    assert sum(len(message.chunk.output_logprobs.token_ids) for message in chunks) == 5


async def test_no_limit_means_as_many_tokens_as_the_context_leaves(doors: Opened) -> None:
    scheduler = FakeScheduler([rank_facts(max_context_tokens=40)])
    async with doors(scheduler) as at:
        [only] = await read(at.stub.Generate(asked(tokens=None)))
    assert only.complete.completion_tokens == 40 - len(PROMPT)


async def test_what_proto3_cannot_tell_from_unset_is_taken_as_unset(doors: Opened) -> None:
    async with doors() as at:
        await read(at.stub.Generate(asked()))
        sampling = at.scheduler.submitted[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.repetition_penalty) == (0.0, 1.0, -1, 1.0)
    assert sampling.logprobs is None


async def test_a_very_long_prompt_fits_a_message(doors: Opened) -> None:
    scheduler = FakeScheduler([rank_facts(max_context_tokens=200_000, capacity_tokens=400_000)])
    async with doors(scheduler) as at:
        [only] = await read(at.stub.Generate(asked(prompt=[65] * 100_000, tokens=1)))
    assert only.complete.prompt_tokens == 100_000


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (asked(prompt=[]), ("input_ids", "empty")),
        (asked(prompt=[1, 4711]), ("4711", "259")),
        (asked(tokens=0), ("max_new_tokens",)),
        (asked(tokens=1020), ("16", "1020", "1024")),
        (asked(prompt=[1] * 2000), ("2000", "1024")),
        (asked(""), ("request_id",)),
        (asked(params={"top_p": 1.5}), ("top_p", "1.5")),
        (asked(params={"top_p": -0.5}), ("top_p",)),
        (asked(params={"top_k": -7}), ("top_k",)),
        (asked(params={"min_p": math.nan}), ("min_p",)),
        (asked(params={"frequency_penalty": 3}), ("frequency_penalty",)),
        (asked(params={"repetition_penalty": -1}), ("repetition_penalty",)),
        (asked(params={"min_new_tokens": 9}), ("min_new_tokens", "5")),
        (asked(params={"stop": [""]}), ("stop",)),
        (asked(params={"stop_token_ids": [999]}), ("stop_token_ids", "999")),
        (asked(params={"logit_bias": {"x": 1.0}}), ("logit_bias.x",)),
        (asked(params={"n": 500}), ("n: is 500",)),
        (asked(return_logprob=True, top_logprobs_num=99), ("99",)),
        (asked(data_parallel_rank=3), ("data_parallel_rank", "3")),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
async def test_a_bad_request_is_refused_in_words_and_never_reaches_the_scheduler(
    doors: Opened, request_: pb.GenerateRequest, words: tuple[str, ...]
) -> None:
    async with doors() as at:
        async with refused("INVALID_ARGUMENT", *words):
            await read(at.stub.Generate(request_))
        assert at.scheduler.submitted == []


async def test_a_negative_temperature_is_refused(doors: Opened) -> None:
    request = asked()
    request.sampling_params.temperature = -1
    async with doors() as at, refused("INVALID_ARGUMENT", "temperature", "-1"):
        await read(at.stub.Generate(request))


@pytest.mark.parametrize(
    ("request_", "word"),
    [
        (asked(params={"regex": "a+"}), "regex"),
        (asked(params={"json_schema": "{}"}), "json_schema"),
        (asked(return_hidden_states=True), "return_hidden_states"),
        (asked(lora_id="alpha"), "alpha"),
        (asked(custom_logit_processor="x"), "custom_logit_processor"),
        (asked(return_logprob=True, logprob_start_len=2), "logprob_start_len"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_cannot_be_honoured_is_refused_by_name(
    doors: Opened, request_: pb.GenerateRequest, word: str
) -> None:
    async with doors() as at:
        async with refused("UNIMPLEMENTED", word):
            await read(at.stub.Generate(request_))
        assert at.scheduler.submitted == []


async def test_a_live_id_cannot_be_used_twice_and_can_be_again_when_it_ended(doors: Opened) -> None:
    async with doors() as at:
        at.scheduler.stall()
        first = at.stub.Generate(asked())
        reading = asyncio.ensure_future(read(first))
        await until(lambda: at.scheduler.running == 1)
        async with refused("ALREADY_EXISTS", "'a'"):
            await read(at.stub.Generate(asked()))
        at.scheduler.resume()
        assert len(await reading) == 1
        for _ in range(5):
            assert len(await read(at.stub.Generate(asked()))) == 1


async def test_a_client_that_cancels_ends_the_request_in_the_scheduler(doors: Opened) -> None:
    async with doors(FakeScheduler(step_s=0.01)) as at:
        call = at.stub.Generate(asked(tokens=900, stream=True))
        await call.read()
        call.cancel()
        await until(lambda: at.scheduler.running == 0)
        assert at.scheduler.aborted == ["a"]


async def test_a_deadline_that_passes_ends_the_request_in_the_scheduler(doors: Opened) -> None:
    async with doors() as at:
        at.scheduler.stall()
        async with refused("DEADLINE_EXCEEDED"):
            await read(at.stub.Generate(asked(), timeout=0.1))
        await until(lambda: at.scheduler.running == 0)


async def test_a_client_that_cancels_ends_every_choice(doors: Opened) -> None:
    async with doors(FakeScheduler(step_s=0.01)) as at:
        call = at.stub.Generate(asked(tokens=900, stream=True, params={"n": 3}))
        await call.read()
        call.cancel()
        await until(lambda: at.scheduler.running == 0)
        assert sorted(at.scheduler.aborted) == ["a-0", "a-1", "a-2"]


async def test_a_scheduler_that_dies_ends_streams_at_once(doors: Opened) -> None:
    async with doors(FakeScheduler(step_s=0.01)) as at:
        call = at.stub.Generate(asked(tokens=900, stream=True))
        await call.read()
        at.scheduler.die("killed by SIGKILL")
        async with asyncio.timeout(10), refused("UNAVAILABLE", "rank 0", "SIGKILL"):
            while await call.read() is not grpc.aio.EOF:
                pass


# --- Abort ---------------------------------------------------------------------------------------


async def test_an_abort_ends_the_stream_at_once(doors: Opened) -> None:
    async with doors() as at:
        at.scheduler.stall()
        reading = asyncio.ensure_future(read(at.stub.Generate(asked(stream=True))))
        await until(lambda: at.scheduler.running == 1)
        answer = await at.stub.Abort(pb.AbortRequest(request_id="a", reason="enough"))
        assert answer.success
        async with asyncio.timeout(10):
            [last] = await reading
        assert last.complete.finish_reason == "abort"


async def test_an_abort_ends_every_choice_of_a_call(doors: Opened) -> None:
    async with doors() as at:
        at.scheduler.stall()
        reading = asyncio.ensure_future(read(at.stub.Generate(asked(params={"n": 2}))))
        await until(lambda: at.scheduler.running == 2)
        assert (await at.stub.Abort(pb.AbortRequest(request_id="a"))).success
        async with asyncio.timeout(10):
            assert [message.complete.finish_reason for message in await reading] == ["abort", "abort"]


async def test_an_abort_of_nobody_says_so(doors: Opened) -> None:
    async with doors() as at:
        answer = await at.stub.Abort(pb.AbortRequest(request_id="nobody"))
    assert not answer.success
    assert "nobody" in answer.message


# --- FlushCache -------------------------------------------------------------------------------------


async def test_an_idle_engine_flushes_and_says_what_each_rank_did(doors: Opened) -> None:
    async with doors(FakeScheduler([rank_facts(0), rank_facts(1)])) as at:
        call = at.stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=0))
        assert (await call).success
        ranks = json.loads(dict(await call.trailing_metadata())["kvherd-ranks"])
    assert [(each["rank"], each["done"]) for each in ranks] == [(0, True), (1, True)]


async def test_a_rank_that_refuses_makes_it_no_success_and_says_why(doors: Opened) -> None:
    scheduler = FakeScheduler([rank_facts(0), rank_facts(1)])
    scheduler.refusals[Rank(1)] = "3 writing"
    async with doors(scheduler) as at:
        answer = await at.stub.FlushCache(common_pb2.FlushCacheRequest())
    assert not answer.success
    assert "rank 1: 3 writing" in answer.message


async def test_a_busy_engine_refuses_a_flush_that_may_not_wait(doors: Opened) -> None:
    async with doors() as at:
        at.scheduler.stall()
        call = at.stub.Generate(asked())
        await until(lambda: at.scheduler.running == 1)
        answer = await at.stub.FlushCache(common_pb2.FlushCacheRequest())
        assert not answer.success
        assert "1 running" in answer.message
        call.cancel()


async def test_a_flush_that_waits_too_long_exceeds_its_deadline(doors: Opened) -> None:
    async with doors() as at:
        at.scheduler.stall()
        call = at.stub.Generate(asked())
        await until(lambda: at.scheduler.running == 1)
        async with refused("DEADLINE_EXCEEDED", "1 running"):
            await at.stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=0.1))
        call.cancel()


async def test_a_rank_that_does_not_answer_a_flush_costs_no_more_than_the_time_given(doors: Opened) -> None:
    scheduler = FakeScheduler([rank_facts(0), rank_facts(1)], order_grace_s=0.1)
    scheduler.silent.add(Rank(1))
    async with doors(scheduler) as at, asyncio.timeout(10), refused("DEADLINE_EXCEEDED", "rank 1", "no answer"):
        await at.stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=0.1))


@pytest.mark.parametrize("timeout_s", [-1.0, math.nan, math.inf, -math.inf, 4000.0])
async def test_a_time_that_nobody_can_wait_is_refused(doors: Opened, timeout_s: float) -> None:
    async with doors() as at:
        async with refused("INVALID_ARGUMENT", "timeout"):
            await at.stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=timeout_s))
        assert at.scheduler.flush_calls == []


async def test_hold_travels_beside_the_request(doors: Opened) -> None:
    async with doors() as at:
        await at.stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=2), metadata=(("kvherd-hold", "1"),))
        assert at.scheduler.flush_calls == [(2.0, True)]


async def test_a_dead_scheduler_makes_every_order_unavailable(doors: Opened) -> None:
    async with doors() as at:
        at.scheduler.die("killed by SIGKILL")
        for call in (
            at.stub.FlushCache(common_pb2.FlushCacheRequest()),
            at.stub.GetLoads(pb.GetLoadsRequest()),
            at.stub.GetServerInfo(pb.GetServerInfoRequest()),
        ):
            async with refused("UNAVAILABLE", "SIGKILL"):
                await call


# --- what it says of itself -----------------------------------------------------------------------------


async def test_it_says_what_model_it_serves(doors: Opened) -> None:
    async with doors() as at:
        told = await at.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert told.served_model_name == "letters"
    assert told.is_generation
    assert (told.max_context_length, told.vocab_size, list(told.eos_token_ids)) == (1024, 259, [256])


async def test_it_says_what_it_is_and_does_at_this_moment(doors: Opened) -> None:
    async with doors() as at:
        at.scheduler.stall()
        call = at.stub.Generate(asked())
        await until(lambda: at.scheduler.running == 1)
        told = await at.stub.GetServerInfo(pb.GetServerInfoRequest())
        call.cancel()
    assert told.server_args["page_size"] == 16
    assert told.server_args["dp_size"] == 1
    assert told.scheduler_info["max_total_num_tokens"] == 4096
    assert (told.active_requests, told.server_type, told.max_total_num_tokens) == (1, "grpc", 4096)
    assert told.sglang_version.startswith("kvherd")


async def test_it_tells_the_load_of_each_rank(doors: Opened) -> None:
    async with doors(FakeScheduler([rank_facts(0), rank_facts(1)])) as at:
        at.scheduler.stall()
        call = at.stub.Generate(asked(data_parallel_rank=1))
        await until(lambda: at.scheduler.running == 1)
        told = await at.stub.GetLoads(pb.GetLoadsRequest())
        only = await at.stub.GetLoads(pb.GetLoadsRequest(dp_rank=1))
        async with refused("INVALID_ARGUMENT", "dp_rank", "7"):
            await at.stub.GetLoads(pb.GetLoadsRequest(dp_rank=7))
        call.cancel()
    assert [(load.dp_rank, load.num_running_reqs) for load in told.loads] == [(0, 0), (1, 1)]
    assert told.loads[1].num_used_tokens == len(PROMPT)
    assert (told.dp_rank_count, told.aggregate.total_running_reqs) == (2, 1)
    assert [load.dp_rank for load in only.loads] == [1]


async def test_the_tokenizer_comes_in_pieces_with_its_digest_on_the_last(doors: Opened) -> None:
    async with doors() as at:
        chunks = [chunk async for chunk in at.stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
        data = b"".join(chunk.data for chunk in chunks)
        assert data == at.config.tokenizer_zip
    assert len(chunks) > 1
    assert [chunk.sha256 for chunk in chunks] == [""] * (len(chunks) - 1) + [hashlib.sha256(data).hexdigest()]


async def test_health_goes_down_when_the_scheduler_died(doors: Opened) -> None:
    async with doors() as at:
        health = health_pb2_grpc.HealthStub(at.channel)
        service = "sglang.grpc.scheduler.SglangScheduler"
        for name in ("", service):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert (await at.stub.HealthCheck(pb.HealthCheckRequest())).healthy
        at.scheduler.die("killed by SIGKILL")
        await at.servicer.fail(at.scheduler.failure)
        answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        told = await at.stub.HealthCheck(pb.HealthCheckRequest())
        assert not told.healthy
        assert "SIGKILL" in told.message


async def test_reflection_names_the_services(doors: Opened) -> None:
    async with doors() as at:
        stub = reflection_pb2_grpc.ServerReflectionStub(at.channel)
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        [answer] = [each async for each in stub.ServerReflectionInfo(iter([ask]))]
    names = {service.name for service in answer.list_services_response.service}
    assert {"sglang.grpc.scheduler.SglangScheduler", "grpc.health.v1.Health"} <= names


@pytest.mark.parametrize(
    ("rpc", "request_"),
    [
        ("Embed", pb.EmbedRequest()),
        ("LoadLoRAAdapter", pb.LoadLoRAAdapterRequest()),
        ("UnloadLoRAAdapter", pb.UnloadLoRAAdapterRequest()),
        ("ListLoadedLoRAAdapters", pb.ListLoadedLoRAAdaptersRequest()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_it_does_not_do_it_says_in_a_sentence(doors: Opened, rpc: str, request_: object) -> None:
    async with doors() as at, refused("UNIMPLEMENTED", "is not supported here"):
        await getattr(at.stub, rpc)(request_)


# --- ports -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "offset", "option"),
    [("port", 0, "--port"), ("http_port", 2, "--port"), ("sidecar_port", 1, "--grpc-http-sidecar-port")],
)
async def test_a_port_that_is_taken_is_an_error_that_names_it(
    doors: Opened, name: str, offset: int, option: str
) -> None:
    async with doors() as at:
        taken = at.config.port
        free = free_ports((0, 1, 2))
        ports = {"port": free, "sidecar_port": free + 1, "http_port": free + 2} | {name: taken + offset}
        with pytest.raises(PortInUse) as caught:
            async with doors(**ports):
                pass
        assert (caught.value.port, caught.value.option) == (taken + offset, option)
        assert all(can_bind(free + each) for each in (0, 1, 2))
        assert len(await read(at.stub.Generate(asked()))) == 1  # the first is as it was
