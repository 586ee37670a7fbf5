"""gRPC workers before an engine of SGLang's protocol that does as it is told."""

import asyncio
import hashlib
import io
import json
import threading
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from grpc_reflection.v1alpha import reflection
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc

from kvherd.adapters import grpc_generations
from kvherd.adapters.grpc_tokenizer import fetch_tokenizer
from kvherd.adapters.grpc_worker import GrpcWorker
from kvherd.adapters.model_files import locate
from kvherd.adapters.tokenizer import load_tokenizer, tokenizer_from_zip
from kvherd.core.errors import (
    CallerError,
    FieldInvalid,
    PromptTooLong,
    WorkerError,
    WorkerFailed,
    WorkerRefused,
    WorkerTimedOut,
    WorkerUnreachable,
    WorkerUnsupported,
)
from kvherd.core.fleet.refusals import DeadlinePassed
from kvherd.core.ids import Rank, RequestId, WorkerId
from kvherd.ports.worker import NOT_HELD, Call, RankOutcome, WorkerKind
from kvherd.testing.patience import until
from kvherd.testing.sglang_engine import EOS, EngineScript, ScriptedSglang, serving
from kvherd.testing.workers import FakeResponder

pytestmark = pytest.mark.net

TOKENIZER = load_tokenizer(locate("tiny")).artifact_zip()
HI = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def worker_before(script: EngineScript) -> AsyncIterator[GrpcWorker]:
    script.tokenizer_zip = script.tokenizer_zip or TOKENIZER
    async with serving(ScriptedSglang(script)) as target:
        worker = GrpcWorker(WorkerId(f"grpc://{target}"))
        try:
            yield worker
        finally:
            await worker.close()


def call(path: str, body: dict[str, Any], **more: Any) -> Call:
    return Call("POST", path, [], json.dumps(body).encode(), RequestId("r"), **more)


def chat(**fields: Any) -> Call:
    return call("/v1/chat/completions", {"model": "herd", "messages": HI, **fields})


@pytest.mark.parametrize("kind", ["chat", "text", "native"])
async def test_the_loop_does_not_decode_long_bodies(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    ids, threads = [5] * 150_000, set()
    decoders = {"chat": "decode_chat", "text": "decode_long_completion", "native": "decode_long_generate"}
    real = getattr(grpc_generations, decoders[kind])

    def decode(body: bytes, **more: int) -> Any:
        threads.add(threading.get_ident())
        return real(body, **more)

    monkeypatch.setattr(grpc_generations, decoders[kind], decode)
    asked = {
        "chat": chat(messages=[{"role": "user", "content": "so " * 100_000}]),
        "text": call("/v1/completions", {"model": "herd", "prompt": ids}),
        "native": call("/generate", {"input_ids": ids}),
    }[kind]
    async with worker_before(EngineScript()) as worker:
        with pytest.raises(PromptTooLong):
            await worker.forward(asked, FakeResponder())
    assert threads
    assert threading.get_ident() not in threads


async def answer_of(worker: GrpcWorker, asked: Call) -> Any:
    responder = FakeResponder()
    await worker.forward(asked, responder)
    assert responder.status == 200
    return json.loads(responder.body)


# --- what it is ----------------------------------------------------------------------------------------------


async def test_detection_reads_everything_that_routing_needs() -> None:
    async with worker_before(EngineScript()) as worker:
        facts = await worker.detect()
    assert (facts.kind, facts.models, facts.version) == (WorkerKind.SGLANG_GRPC, ("herd",), "kvherd-0.1.0")
    assert (facts.block_size, facts.ranks, facts.max_running) == (16, 2, 16)
    assert (facts.max_context_tokens, facts.capacity_tokens, facts.events_url) == (400, 8192, worker.id)


@pytest.mark.parametrize(("version", "health_s"), [("kvherd-0.1.0", 0), ("0.5.23", 20)])
async def test_a_stock_sglang_may_take_its_time_to_say_that_it_is_well(version: str, health_s: float) -> None:
    async with worker_before(EngineScript(version=version)) as worker:
        assert (await worker.detect()).health_s == health_s


async def test_the_load_is_the_sum_over_ranks() -> None:
    async with worker_before(EngineScript()) as worker:
        load = await worker.load()
    assert (load.running, load.waiting, load.used_tokens, load.capacity_tokens) == (2, 4, 60, 800)


async def test_an_unhealthy_worker_says_why() -> None:
    async with worker_before(EngineScript(healthy=False)) as worker:
        with pytest.raises(WorkerFailed, match="warming up"):
            await worker.probe()


class VllmEngine(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc] # generated, untyped
    """Says `Paris` in chunks of one token and its end, and then all of the last chunk again, as vLLM does."""

    def __init__(self, archive: bytes = b"") -> None:
        self.archive = archive
        self.requests: list[Any] = []
        self.left = asyncio.Event()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self.requests.append(request)
        try:
            counts = {"prompt_tokens": len(request.tokenized.input_ids), "cached_tokens": 4}
            for token_id in (*b"Paris", EOS):
                top = vllm_engine_pb2.TopLogProbs(token_ids=[token_id, 0], values=[-0.25, -3.0])
                told = vllm_engine_pb2.OutputLogProbs(token_ids=[token_id], token_logprobs=[-0.25], top_logprobs=[top])
                logprobs = told if request.sampling_params.HasField("logprobs") else None
                chunk = vllm_engine_pb2.GenerateStreamChunk(
                    token_ids=[token_id], completion_tokens=1, output_logprobs=logprobs, **counts
                )
                yield vllm_engine_pb2.GenerateResponse(chunk=chunk)
                if request.sampling_params.ignore_eos:
                    await asyncio.sleep(60)
            complete = vllm_engine_pb2.GenerateComplete(
                output_ids=[EOS], completion_tokens=1, finish_reason="stop", **counts
            )
            yield vllm_engine_pb2.GenerateResponse(complete=complete)
        finally:
            self.left.set()

    async def GetTokenizer(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        if not self.archive:
            await context.abort(grpc.StatusCode.INTERNAL, "it was started with a name and no directory")
        yield common_pb2.GetTokenizerChunk(data=self.archive, sha256=hashlib.sha256(self.archive).hexdigest())

    async def HealthCheck(self, request: Any, context: Any) -> Any:  # noqa: N802
        return vllm_engine_pb2.HealthCheckResponse(healthy=True)

    async def GetModelInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        return vllm_engine_pb2.GetModelInfoResponse(
            model_path="/m", is_generation=True, max_context_length=99, vocab_size=259, eos_token_ids=[EOS]
        )

    async def GetServerInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        return vllm_engine_pb2.GetServerInfoResponse(data_parallel_size=3, block_size=32, max_num_seqs=7)

    async def FlushCache(self, request: Any, context: Any) -> Any:  # noqa: N802
        return common_pb2.FlushCacheResponse(success=True, message="reset")


@asynccontextmanager
async def foreign_server(names: list[str], engine: VllmEngine | None = None) -> AsyncIterator[GrpcWorker]:
    server = grpc.aio.server()
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(engine or VllmEngine(), server)
    reflection.enable_server_reflection([*names, reflection.SERVICE_NAME], server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    worker = GrpcWorker(WorkerId(f"grpc://127.0.0.1:{port}"))
    try:
        yield worker
    finally:
        await worker.close()
        await server.stop(None)


VLLM = "vllm.grpc.engine.VllmEngine"


async def test_a_vllm_engine_is_known_probed_and_flushed_whatever_it_hands_out() -> None:
    async with foreign_server([VLLM]) as worker:
        facts = await worker.detect()
        assert (facts.kind, facts.models, facts.ranks, facts.addressable) == (WorkerKind.VLLM_GRPC, ("/m",), 3, True)
        assert (facts.block_size, facts.max_running) == (32, 21)
        await worker.probe()
        assert (await worker.flush(timeout_s=0.0)).done
        with pytest.raises(WorkerUnsupported, match="a name and no directory"):
            await worker.forward(chat(), FakeResponder())


async def test_a_vllm_engine_s_tokens_become_an_answer() -> None:
    engine = VllmEngine(TOKENIZER)
    async with foreign_server([VLLM], engine) as worker:
        await worker.detect()
        body = {"logprobs": True, "top_logprobs": 1, "seed": 7, "temperature": 0, "max_tokens": 9}
        asked = call("/v1/chat/completions", {"model": "herd", "messages": HI, **body}, rank=Rank(2))
        answer = await answer_of(worker, asked)
    choice, usage = answer["choices"][0], answer["usage"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Paris", "stop")
    assert [token["token"] for token in choice["logprobs"]["content"]] == list("Paris")
    assert [token["top_logprobs"][0]["token"] for token in choice["logprobs"]["content"]] == list("Paris")
    assert (usage["completion_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) == (6, 4)
    (request,) = engine.requests
    assert (request.data_parallel_rank, request.sampling_params.seed, request.sampling_params.max_tokens) == (2, 7, 9)
    assert len(request.tokenized.input_ids) == usage["prompt_tokens"]


async def test_a_vllm_engine_s_tokens_are_streamed() -> None:
    async with foreign_server([VLLM], VllmEngine(TOKENIZER)) as worker:
        await worker.detect()
        responder = FakeResponder()
        await worker.forward(chat(stream=True, stream_options={"include_usage": True}), responder)
        events = [line.removeprefix("data: ") for line in responder.body.decode().split("\n\n") if line]
    assert events.pop() == "[DONE]"
    *chunks, last = map(json.loads, events)
    said = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert (said, last["usage"]["completion_tokens"]) == ("Paris", 6)


async def test_a_client_that_leaves_a_vllm_engine_s_stream_ends_it_there() -> None:
    engine = VllmEngine(TOKENIZER)
    async with foreign_server([VLLM], engine) as worker:
        await worker.detect()
        responder = FakeResponder()
        asking = asyncio.create_task(worker.forward(chat(stream=True, ignore_eos=True), responder))
        await until(lambda: responder.started)
        asking.cancel()
        async with asyncio.timeout(30):
            await engine.left.wait()


async def test_what_a_vllm_engine_would_drop_is_refused_by_name() -> None:
    async with foreign_server([VLLM], VllmEngine(TOKENIZER)) as worker:
        await worker.detect()
        with pytest.raises(WorkerUnsupported, match="cache_salt"):
            await worker.forward(chat(cache_salt="mine"), FakeResponder())


async def test_a_vllm_engine_hands_out_its_tokenizer() -> None:
    async with foreign_server([VLLM], VllmEngine(TOKENIZER)) as worker:
        assert (await fetch_tokenizer(worker.id, 20.0)).encode("hi") == [104, 105]


async def test_engines_we_can_only_name_are_named_and_cannot_be_flushed() -> None:
    async with foreign_server(["trtllm.TrtllmService"]) as worker:
        assert (await worker.detect()).kind is WorkerKind.TRTLLM_GRPC
        await worker.probe()
        with pytest.raises(WorkerUnsupported):
            await worker.flush(timeout_s=0.0)
        with pytest.raises(WorkerUnsupported):
            await worker.load()


async def test_a_server_that_is_no_engine_is_refused() -> None:
    async with foreign_server([]) as worker:
        with pytest.raises(WorkerUnsupported, match="engine protocol"):
            await worker.detect()


# --- tokenizer -----------------------------------------------------------------------------------------------


async def test_the_tokenizer_comes_from_the_worker() -> None:
    async with serving(ScriptedSglang(EngineScript(tokenizer_zip=TOKENIZER))) as target:
        tokenizer = await fetch_tokenizer(f"grpc://{target}", 20.0)
    assert tokenizer.encode("hi") == [104, 105]


async def test_workers_of_one_model_share_one_tokenizer() -> None:
    script = EngineScript(tokenizer_zip=TOKENIZER)
    async with serving(ScriptedSglang(script)) as one, serving(ScriptedSglang(script)) as other:
        first, second = await asyncio.gather(fetch_tokenizer(one, 20.0), fetch_tokenizer(other, 20.0))
    assert first is second


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        (EngineScript(tokenizer_zip=TOKENIZER, digest="0" * 64), "damaged"),
        (EngineScript(tokenizer_zip=b"no zip at all"), "cannot be used"),
    ],
)
async def test_a_tokenizer_that_cannot_be_trusted_is_not_used(script: EngineScript, problem: str) -> None:
    async with serving(ScriptedSglang(script)) as target:
        with pytest.raises(WorkerFailed, match=problem):
            await fetch_tokenizer(target, 20.0)


# --- answers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "script",
    [
        EngineScript(),
        EngineScript(repeats_all=True),
        EngineScript(ends_with_eos=True),
        EngineScript(ends_with_eos=True, repeats_all=True),
        EngineScript(streams=False, ends_with_eos=True),
    ],
    ids=["last chunk repeated", "all repeated", "eos in chunks", "eos in both", "no chunks"],
)
async def test_every_token_comes_once_however_the_engine_repeats_itself(script: EngineScript) -> None:
    script.answer, script.logprobs, script.cached_tokens = "Paris", True, 4
    async with worker_before(script) as worker:
        answer = await answer_of(worker, chat(logprobs=True, top_logprobs=1, skip_special_tokens=False))
    choice = answer["choices"][0]
    assert choice["message"]["content"] == "Paris"
    assert [token["token"] for token in choice["logprobs"]["content"]] == list("Paris")
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}


async def test_what_was_asked_reaches_the_engine() -> None:
    script = EngineScript()
    async with worker_before(script) as worker:
        await answer_of(
            worker,
            chat(max_tokens=9, temperature=0.5, stop_token_ids=[7], seed=2**53 + 1, cache_salt="s", logprobs=True),
        )
    request = script.requests[0]
    params = request.sampling_params
    assert (request.request_id, params.max_new_tokens, params.temperature) == ("r", 9, 0.5)
    assert (list(params.stop_token_ids), params.top_p, params.top_k, params.n) == ([7], 1.0, -1, 1)
    assert dict(params.custom_params) == {"seed": str(2**53 + 1), "cache_salt": "s"}
    assert request.return_logprob


async def test_the_tokens_that_routing_made_are_used_as_they_are() -> None:
    script = EngineScript()
    async with worker_before(script) as worker:
        body = {"model": "herd", "messages": HI}
        await answer_of(worker, call("/v1/chat/completions", body, prompt_token_ids=[1, 2, 3]))
    assert list(script.requests[0].tokenized.input_ids) == [1, 2, 3]


def zipped_otherwise(archive: bytes, old: bytes = b"", new: bytes = b"") -> bytes:
    """The same files, with another date in the archive, and other words in them."""
    again = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as before, zipfile.ZipFile(again, "w") as after:
        for name in before.namelist():
            after.writestr(zipfile.ZipInfo(name, (2020, 2, 2, 2, 2, 2)), before.read(name).replace(old, new))
    return again.getvalue()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_tokens_of_another_tokenizer_are_nothing_to_a_worker_whose_model_has_the_same_name(path: str) -> None:
    """Its template was mended, say, and not all workers are restarted yet."""
    script, another = (
        EngineScript(),
        tokenizer_from_zip(zipped_otherwise(TOKENIZER, b"'<|im_start|>'", b"'<|im_end|>'")),
    )
    body = {"model": "herd", "messages": HI, "prompt": "hi"}
    async with worker_before(script) as worker:
        await answer_of(worker, call(path, body))
        await answer_of(worker, call(path, body, prompt_token_ids=[1, 2, 3], tokenizer=another))
    own, given = (list(request.tokenized.input_ids) for request in script.requests)
    assert given == own


async def test_of_tokenizers_that_say_the_same_there_is_one_however_they_are_packed() -> None:
    same = tokenizer_from_zip(zipped_otherwise(TOKENIZER))
    script = EngineScript()
    async with worker_before(script) as worker:
        body = {"model": "herd", "messages": HI}
        await answer_of(worker, call("/v1/chat/completions", body, prompt_token_ids=[1, 2, 3], tokenizer=same))
    assert list(script.requests[0].tokenized.input_ids) == [1, 2, 3]


async def test_a_salt_is_never_dropped_silently() -> None:
    async with worker_before(EngineScript(version="0.5.23")) as worker:
        with pytest.raises(WorkerUnsupported, match="cache_salt"):
            await worker.forward(chat(cache_salt="tenant"), FakeResponder())


async def test_a_stop_string_ends_the_generation_on_the_engine() -> None:
    script = EngineScript(answer="one, two, three")
    async with worker_before(script) as worker:
        answer = await answer_of(worker, chat(stop=","))
        assert answer["choices"][0]["message"]["content"] == "one"
        async with asyncio.timeout(5):
            await script.ended.wait()


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({"model": "herd", "messages": HI, "temperature": -1}, FieldInvalid),
        ({"model": "herd", "messages": HI, "max_tokens": 10_000}, PromptTooLong),
    ],
)
async def test_the_callers_mistakes_never_reach_the_engine(body: dict[str, Any], error: type[CallerError]) -> None:
    script, responder = EngineScript(), FakeResponder()
    async with worker_before(script) as worker:
        with pytest.raises(error):
            await worker.forward(call("/v1/chat/completions", body), responder)
    assert script.requests == []
    assert not responder.started


async def test_what_the_engine_calls_invalid_is_the_callers_mistake() -> None:
    async with worker_before(EngineScript(stops_after=0, then="INVALID_ARGUMENT")) as worker:
        with pytest.raises(FieldInvalid, match="as told"):
            await worker.forward(chat(), FakeResponder())


@pytest.mark.parametrize(
    ("status", "error"),
    [
        ("UNAVAILABLE", WorkerUnreachable),
        ("RESOURCE_EXHAUSTED", WorkerRefused),
        ("INTERNAL", WorkerFailed),
        ("UNIMPLEMENTED", WorkerUnsupported),
        ("DEADLINE_EXCEEDED", WorkerFailed),
    ],
)
async def test_each_status_before_the_first_token_is_an_error_of_its_own(status: str, error: type[WorkerError]) -> None:
    for stream in (False, True):
        responder = FakeResponder()
        async with worker_before(EngineScript(stops_after=0, then=status)) as worker:
            with pytest.raises(error):
                await worker.forward(chat(stream=stream), responder)
        assert not responder.started


@pytest.mark.parametrize("wired", [True, False])
@pytest.mark.parametrize("fields", [{"stream": True}, {"stream": True, "n": 2}, {}])
async def test_an_engine_drops_what_nobody_waits_for_and_has_not_failed(fields: dict[str, Any], *, wired: bool) -> None:
    script, responder = EngineScript(stops_after=2), FakeResponder()
    async with worker_before(script) as worker:
        if not wired:
            worker._wires = None
        await worker.detect()
        given_s = 1.0
        asked = chat(**fields).changed(ends=(asyncio.get_running_loop().time() + given_s, given_s))
        with pytest.raises(DeadlinePassed, match="within the 1 s"):
            await worker.forward(asked, responder)
        await until(lambda: not script.alive)
    assert not responder.failed


async def test_an_engine_that_gives_up_long_before_a_deadline_has_failed() -> None:
    async with worker_before(EngineScript(stops_after=0, then="DEADLINE_EXCEEDED")) as worker:
        asked = chat().changed(ends=(asyncio.get_running_loop().time() + 600, 600))
        with pytest.raises(WorkerFailed, match="as told"):
            await worker.forward(asked, FakeResponder())


async def test_closing_the_worker_ends_an_answer_under_way_with_a_reason() -> None:
    script, responder = EngineScript(stops_after=1), FakeResponder()
    async with worker_before(script) as worker:
        await worker.detect()

        async def close_when_it_runs() -> None:
            async with asyncio.timeout(5):
                while not responder.body:  # noqa: ASYNC110 - the responder has no event
                    await asyncio.sleep(0.01)
            await worker.close()

        async with asyncio.TaskGroup() as group:
            group.create_task(close_when_it_runs())
            with pytest.raises(WorkerFailed, match="closed here"):
                await worker.forward(chat(stream=True), responder)
    assert responder.failed


# --- SGLang's own generate, and tokens ------------------------------------------------------------------------


async def test_native_generate_has_sglangs_shape() -> None:
    async with worker_before(EngineScript(answer="abc", cached_tokens=2)) as worker:
        answer = await answer_of(worker, call("/generate", {"text": "say", "sampling_params": {"max_new_tokens": 5}}))
    assert answer == {
        "text": "abc",
        "output_ids": [97, 98, 99],
        "meta_info": {
            "id": "r",
            "finish_reason": {"type": "stop", "matched": 256},
            "prompt_tokens": 3,
            "completion_tokens": 3,
            "cached_tokens": 2,
        },
    }


async def test_native_streams_repeat_the_text_so_far_for_each_prompt() -> None:
    responder = FakeResponder()
    async with worker_before(EngineScript(answer="ab")) as worker:
        body = {"input_ids": [[1], [2, 3]], "stream": True, "sampling_params": {"max_new_tokens": 2}}
        await worker.forward(call("/generate", body), responder)
    events = [event.removeprefix("data: ") for event in responder.body.decode().strip().split("\n\n")]
    assert events.pop() == "[DONE]"
    for index, prompt_tokens in enumerate((1, 2)):
        mine = [event for event in map(json.loads, events) if event["index"] == index]
        assert [event["text"] for event in mine][-1] == "ab"
        assert mine[0]["text"] == "a"
        assert mine[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 2}
        assert mine[-1]["meta_info"]["prompt_tokens"] == prompt_tokens


async def test_tokens_and_text_are_turned_into_each_other() -> None:
    async with worker_before(EngineScript()) as worker:
        tokenized = await answer_of(worker, call("/tokenize", {"prompt": "hé"}))
        text = await answer_of(worker, call("/detokenize", {"tokens": tokenized["tokens"]}))
        chat_tokens = await answer_of(worker, call("/tokenize", {"messages": HI}))
    assert (tokenized["tokens"], tokenized["count"], tokenized["max_model_len"]) == ([104, 195, 169], 3, 400)
    assert text["prompt"] == "hé"
    assert chat_tokens["count"] > 10


async def test_other_paths_are_refused() -> None:
    async with worker_before(EngineScript()) as worker:
        with pytest.raises(WorkerUnsupported, match="/v1/embeddings"):
            await worker.forward(call("/v1/embeddings", {}), FakeResponder())


# --- flush ---------------------------------------------------------------------------------------------------


async def test_a_flush_tells_each_ranks_outcome() -> None:
    async with worker_before(EngineScript(flush="refused")) as worker:
        answer = await worker.flush(timeout_s=1.0)
    assert not answer.done
    assert answer.ranks == (RankOutcome(rank=answer.ranks[0].rank, done=False, message="1 request is running"),)


@pytest.mark.parametrize(
    ("status", "error"),
    [
        ("UNAVAILABLE", WorkerUnreachable),
        ("INVALID_ARGUMENT", WorkerRefused),
        ("FAILED_PRECONDITION", WorkerRefused),
        ("UNIMPLEMENTED", WorkerUnsupported),
        ("INTERNAL", WorkerFailed),
    ],
)
async def test_each_status_of_a_flush_is_an_error_of_its_own(status: str, error: type[WorkerError]) -> None:
    async with worker_before(EngineScript(flush=status)) as worker:
        with pytest.raises(error):
            await worker.flush(timeout_s=1.0)


async def test_a_flush_that_waited_in_vain_is_an_answer_with_the_engines_own_words() -> None:
    async with worker_before(EngineScript(flush="DEADLINE_EXCEEDED")) as worker:
        answer = await worker.flush(timeout_s=1.0)
    assert (answer.done, answer.timed_out) == (False, True)
    assert answer.message


async def test_an_engine_that_is_not_ours_says_that_it_holds_nothing() -> None:
    async with worker_before(EngineScript()) as worker:
        assert NOT_HELD in (await worker.flush(timeout_s=1.0, hold=True)).message
        assert NOT_HELD not in (await worker.flush(timeout_s=1.0)).message


async def test_a_flush_that_stalls_is_on_its_way_and_ends_at_the_callers_deadline() -> None:
    opened: list[bool] = []
    doubts: list[bool] = []
    async with worker_before(EngineScript(flush="stall")) as worker:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await worker.flush(timeout_s=9.0, opened=lambda: opened.append(True), in_doubt=doubts.append)
        await worker.detect()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await worker.flush(timeout_s=9.0, in_doubt=doubts.append)
    assert (opened, doubts) == ([True], [True]), "kvherd's own engine takes it back"


async def test_what_a_bridge_calls_in_doubt_is_no_answer() -> None:
    async with worker_before(EngineScript(flush="in doubt")) as worker:
        with pytest.raises(WorkerTimedOut):
            await worker.flush(timeout_s=1.0)


async def test_a_token_that_is_not_in_the_vocabulary_has_no_text() -> None:
    async with worker_before(EngineScript()) as worker:
        with pytest.raises(FieldInvalid, match="token 1000000 is not in the vocabulary"):
            await worker.forward(call("/detokenize", {"tokens": [1_000_000]}), FakeResponder())
