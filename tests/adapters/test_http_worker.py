"""HTTP workers over real sockets, against servers that behave as engines do."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, closing
from pathlib import Path
from socket import AF_INET, SOCK_STREAM, socket
from typing import Any

import pytest

from kvherd.adapters.http_exchange import HttpAsker, pool_to
from kvherd.adapters.http_pool import HttpPool
from kvherd.adapters.http_url import http_address
from kvherd.adapters.http_worker import HttpWorker
from kvherd.core.errors import (
    OptionInvalid,
    WorkerError,
    WorkerFailed,
    WorkerLocked,
    WorkerRefused,
    WorkerUnreachable,
    WorkerUnsupported,
)
from kvherd.core.fleet.refusals import WorkerBusy
from kvherd.core.ids import Rank, RequestId, WorkerId
from kvherd.ports.completions import Usage
from kvherd.ports.worker import NOT_HELD, Call, FlushAnswer, NewsTo, RankOutcome, WorkerKind, WorkerLoad
from kvherd.testing.raw_http import SSE_HEAD, RawRequest, RawServer, Script, chunk, json_answer, until
from kvherd.testing.workers import FakeResponder

pytestmark = pytest.mark.net
ANN = WorkerId("ann")


def call(path: str = "/v1/chat/completions", body: bytes = b"{}", **more: Any) -> Call:
    headers = [(b"content-type", b"application/json"), (b"host", b"gateway"), (b"content-length", b"9"), (b"x-a", b"1")]
    return Call("POST", path, headers, body, RequestId("r"), **more)


def saying(*pieces: bytes, close: bool = False) -> Script:
    async def script(_request: RawRequest, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.002)
        if close:
            writer.close()

    return script


def paths(answers: Mapping[str, bytes]) -> Script:
    """A server that knows these `METHOD path` and answers 404 for all others."""

    async def script(request: RawRequest, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = f"{request.method} {request.target}"
        writer.write(answers.get(asked, json_answer(b'{"detail":"Not Found"}', "404 Not Found")))

    return script


def said(document: object, status: str = "200 OK") -> bytes:
    return json_answer(json.dumps(document).encode(), status)


@asynccontextmanager
async def worker_at(url: str, **more: Any) -> AsyncIterator[HttpWorker]:
    worker = HttpWorker(ANN, url, **more)
    try:
        yield worker
    finally:
        await worker.close()


def free_port() -> int:
    with closing(socket(AF_INET, SOCK_STREAM)) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        assert isinstance(port, int)
        return port


# --- forwarding ------------------------------------------------------------------------------------------------


async def test_a_request_reaches_the_worker_as_the_client_sent_it() -> None:
    async with RawServer(saying(json_answer(b'{"a":1}'))) as server, worker_at(server.url) as worker:
        responder = FakeResponder()
        await worker.forward(call(body=b'{"model": "m"}', extra_headers=[(b"x-kvherd-worker", b"ann")]), responder)
        (request,) = server.requests
        assert (request.method, request.target, request.body) == ("POST", "/v1/chat/completions", b'{"model": "m"}')
        assert sorted(request.headers) == [
            ("content-length", "14"),
            ("content-type", "application/json"),
            ("host", f"127.0.0.1:{server.port}"),
            ("x-a", "1"),
        ]
        assert (responder.status, responder.body, responder.ended) == (200, b'{"a":1}', True)
        assert responder.headers["x-kvherd-worker"] == "ann"


async def test_a_key_of_the_worker_takes_the_place_of_the_clients() -> None:
    async with RawServer(saying(json_answer(b"{}"))) as server, worker_at(server.url + "/base/", api_key="k") as worker:
        sent = Call("POST", "/v1/x", [(b"authorization", b"Bearer mine")], b"", RequestId("r"))
        await worker.forward(sent, FakeResponder())
        assert [value for name, value in server.requests[0].headers if name == "authorization"] == ["Bearer k"]
        assert server.requests[0].target == "/base/v1/x"


@pytest.mark.parametrize(("key", "says"), [(None, "wants an API key"), ("k", "does not accept the API key")])
async def test_a_worker_that_wants_a_key_says_so(key: str | None, says: str) -> None:
    refused = json_answer(b'{"error":"Unauthorized"}', "401 Unauthorized")
    async with RawServer(saying(refused)) as server, worker_at(server.url, api_key=key) as worker:
        with pytest.raises(WorkerLocked, match=says) as locked:
            await worker.detect()
    assert "KVHERD_ENGINE_API_KEY" in str(locked.value)


@pytest.mark.parametrize(("engine", "names_it"), [("vllm", "header"), ("sglang", "body")])
async def test_an_engine_is_told_the_rank_in_its_own_way(engine: str, names_it: str) -> None:
    answers = (VLLM if engine == "vllm" else SGLANG) | {"POST /v1/completions": json_answer(b"{}")}
    async with RawServer(paths(answers)) as server, worker_at(server.url) as worker:
        assert (await worker.detect()).addressable
        await worker.forward(call("/v1/completions", b'{"model": "m" }', rank=Rank(1)), FakeResponder())
        request = server.requests[-1]
    told = {"header": dict(request.headers).get("x-data-parallel-rank") == "1", "body": b"rank" in request.body}
    assert told == {"header": names_it == "header", "body": names_it == "body"}
    assert json.loads(request.body) == {"model": "m"} | ({"data_parallel_rank": 1} if names_it == "body" else {})


async def test_connections_are_kept_and_shared() -> None:
    async with RawServer(saying(json_answer(b"{}"))) as server, worker_at(server.url) as worker:

        async def some() -> None:
            for _ in range(125):
                await worker.forward(call(), FakeResponder())

        async with asyncio.TaskGroup() as group:
            for _ in range(8):
                group.create_task(some())
        assert len(server.requests) == 1000
        assert server.connections <= 8


async def test_a_full_pool_makes_requests_wait_and_a_waiter_may_leave() -> None:
    may_answer = asyncio.Event()

    async def hold(_request: RawRequest, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await may_answer.wait()
        writer.write(json_answer(b"{}"))

    async with RawServer(hold) as server:
        pool = HttpPool("127.0.0.1", server.port, max_connections=2)
        async with worker_at(server.url, pool=pool) as worker, asyncio.TaskGroup() as group:
            tasks = [group.create_task(worker.forward(call(), FakeResponder())) for _ in range(20)]
            await until(lambda: len(server.requests) == 2, "both connections are in use")
            tasks[5].cancel()
            may_answer.set()
        assert server.connections == 2
        assert len(server.requests) == 19


async def test_a_worker_is_asked_how_it_is_however_many_requests_hold_its_connections() -> None:
    """Else it would be found to be down, and stay so, for as long as it is busy."""

    async def hold(request: RawRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if request.method == "POST":
            await reader.read(1)
        writer.write(json_answer(b"{}"))

    async with RawServer(hold) as server:
        pool = HttpPool("127.0.0.1", server.port, max_connections=1)
        async with worker_at(server.url, pool=pool) as worker, asyncio.TaskGroup() as group:
            stream = group.create_task(worker.forward(call(), FakeResponder()))
            await until(lambda: len(server.requests) == 1, "its only connection is in use")
            async with asyncio.timeout(30):
                await worker.probe()
            stream.cancel()


async def test_a_client_that_leaves_as_its_answer_ends_takes_nobody_else_s_connection_along() -> None:
    """The connection is the next request's before the task of the one that was left learns of it."""
    loop = asyncio.get_running_loop()
    landed: asyncio.Future[object] = loop.create_future()

    class Leaving(FakeResponder):
        def write(self, data: bytes) -> None:
            super().write(data)
            loop.call_soon(begin_next)
            left.cancel()

    def begin_next() -> None:
        assert worker.launch(call(), FakeResponder(), landed.set_result) is not None

    async with RawServer(saying(json_answer(b"{}"))) as server, worker_at(server.url) as worker:
        left = asyncio.create_task(worker.forward(call(), Leaving()))
        with pytest.raises(asyncio.CancelledError):
            await left
        async with asyncio.timeout(10):
            assert await landed is None
        assert (server.connections, len(server.requests)) == (1, 2)


@pytest.mark.parametrize(
    "pieces",
    [
        [SSE_HEAD, chunk(b"data: 1\n\n"), chunk(b"data: 2\n\n") + chunk(b"data: [DONE]\n\n"), b"0\r\n\r\n"],
        [SSE_HEAD + chunk(b"data: 1\n\nda"), chunk(b"ta: 2\n\ndata: [DONE]\n\n") + b"0\r\nX-Trailer: 1\r\n\r\n"],
        [b"HTTP/1.1 100 Continue\r\n\r\n", SSE_HEAD, chunk(b"data: 1\n\ndata: 2\n\ndata: [DONE]\n\n"), b"0\r\n\r\n"],
    ],
)
async def test_a_stream_passes_untouched(pieces: list[bytes]) -> None:
    async with RawServer(saying(*pieces)) as server, worker_at(server.url) as worker:
        for _ in range(2):
            responder = FakeResponder()
            await worker.forward(call(), responder)
            assert responder.body == b"data: 1\n\ndata: 2\n\ndata: [DONE]\n\n"
            assert responder.ended
            assert not responder.failed
            assert "x-trailer" not in responder.headers
        assert server.connections == 1


async def test_a_body_that_ends_with_its_connection_is_whole() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\n"
    async with RawServer(saying(head, b"abc", b"def", close=True)) as server, worker_at(server.url) as worker:
        responder = FakeResponder()
        await worker.forward(call(), responder)
        assert (responder.body, responder.failed, responder.ended) == (b"abcdef", "", True)


@pytest.mark.parametrize(
    ("pieces", "started", "why"),
    [
        ([], False, "before it answered"),
        ([b"HTTP/1.1 200 OK\r\nconte"], False, "in the middle"),
        ([SSE_HEAD, chunk(b"data: 1\n\n")], True, "in the middle"),
        ([SSE_HEAD, b"10\r\nabc"], True, "in the middle"),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc"], True, "in the middle"),
        ([b"not HTTP at all\r\n\r\n"], False, "not HTTP/1.1"),
        ([SSE_HEAD, b"zz\r\nabc\r\n"], True, "not HTTP/1.1"),
        (
            [b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"],
            False,
            "not HTTP/1.1",
        ),
        ([b"HTTP/1.1 200 OK\r\nx: " + b"x" * 70_000], False, "larger than"),
        ([b"HTTP/1.1 101 Switching\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n"], False, "switched protocols"),
    ],
)
async def test_a_worker_that_breaks_down_is_told_apart_by_when(pieces: list[bytes], started: bool, why: str) -> None:
    async with RawServer(saying(*pieces, close=True)) as server, worker_at(server.url) as worker:
        responder = FakeResponder()
        with pytest.raises(WorkerFailed, match=why):
            await worker.forward(call(), responder)
        assert responder.started is started
        assert (why in responder.failed) is started
        assert len(server.requests) == 1, "a first connection that breaks is not tried again"


async def test_a_worker_that_resets_fails() -> None:
    async def reset(_request: RawRequest, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD + chunk(b"data: 1\n\n"))
        await writer.drain()
        writer.transport.abort()

    async with RawServer(reset) as server, worker_at(server.url) as worker:
        responder = FakeResponder()
        with pytest.raises(WorkerFailed):
            await worker.forward(call(), responder)


async def test_a_kept_connection_that_ended_costs_nobody_a_request() -> None:
    """1. a request is answered; 2. the worker closes the idle connection; 3. the next request takes a new one, also
    if it met the old one just as it closed, and only a request that may be repeated does so.
    """

    async def answer_then_close(
        request: RawRequest, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if request.connection == 1 and len(server.requests) == 2:
            writer.close()
            return
        writer.write(json_answer(b"{}"))

    for path in ("/v1/chat/completions", "/v1/responses"):
        async with RawServer(answer_then_close) as server, worker_at(server.url) as worker:
            await worker.forward(call(path), FakeResponder())
            responder = FakeResponder()
            if path == "/v1/responses":
                with pytest.raises(WorkerFailed):
                    await worker.forward(call(path), responder)
                continue
            await worker.forward(call(path), responder)
            assert (responder.status, server.connections, len(server.requests)) == (200, 2, 3)


async def test_idle_connections_are_let_go() -> None:
    async with RawServer(saying(json_answer(b"{}"))) as server:
        pool = HttpPool("127.0.0.1", server.port, idle_s=0.05)
        async with worker_at(server.url, pool=pool) as worker:
            await worker.forward(call(), FakeResponder())
            assert pool.idle_connections == 1
            await until(lambda: pool.open_connections == 0 and server.left == 1, "it was closed")


async def test_more_than_was_asked_for_never_reaches_the_next_request() -> None:
    async with (
        RawServer(saying(json_answer(b"{}") + json_answer(b'"evil"'))) as server,
        worker_at(server.url) as worker,
    ):
        for _ in range(2):
            responder = FakeResponder()
            await worker.forward(call(), responder)
            assert responder.body == b"{}"
        assert server.connections == 2


async def test_nobody_there_is_unreachable() -> None:
    async with worker_at(f"http://127.0.0.1:{free_port()}") as worker:
        with pytest.raises(WorkerUnreachable, match="ann cannot be reached"):
            await worker.forward(call(), FakeResponder())
        with pytest.raises(WorkerUnreachable):
            await worker.probe()


@pytest.mark.parametrize("pieces", [[], [SSE_HEAD, chunk(b"data: 1\n\n")]])
async def test_leaving_a_request_ends_its_connection(pieces: list[bytes]) -> None:
    async def wait(_request: RawRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"".join(pieces))
        await reader.readexactly(1)

    async with RawServer(wait) as server, worker_at(server.url) as worker, asyncio.TaskGroup() as group:
        responder = FakeResponder()
        task = group.create_task(worker.forward(call(), responder))
        await until(lambda: len(server.requests) == 1 and responder.started == bool(pieces), "it is under way")
        task.cancel()
        await until(lambda: server.left == 1, "the worker saw it go")


@pytest.mark.parametrize(
    ("status", "error"),
    [
        ("502 Bad Gateway", WorkerFailed),
        ("503 Service Unavailable", WorkerBusy),
        ("504 Gateway Time-out", WorkerRefused),
    ],
)
@pytest.mark.parametrize("kept", [False, True])
async def test_what_another_worker_may_do_better_is_raised(status: str, error: type[WorkerError], kept: bool) -> None:
    answer = said({"error": {"message": "the engine is stopping"}}, status)
    async with RawServer(saying(answer)) as server, worker_at(server.url) as worker:
        responder = FakeResponder()
        with pytest.raises(error, match=f"HTTP {status[:3]}: the engine is stopping"):
            await worker.forward(call(), responder)
        if kept:
            landed: asyncio.Future[object] = asyncio.get_running_loop().create_future()
            assert worker.launch(call(), responder, landed.set_result) is not None
            async with asyncio.timeout(10):
                assert type(await landed) is error
        assert not responder.started


@pytest.mark.parametrize(
    ("told", "retry_after_s"),
    [("", 1), ("7", 7), ("999999", 3600), ("9" * 5000, 1), ("Wed, 21 Oct 2026 07:28:00 GMT", 1), ("-5", 1)],
)
async def test_a_busy_worker_says_when_to_come_again(told: str, retry_after_s: int) -> None:
    more = f"retry-after: {told}\r\n" if told else ""
    answer = f"HTTP/1.1 503 Service Unavailable\r\n{more}content-length: 2\r\n\r\n{{}}".encode()
    async with RawServer(saying(answer)) as server, worker_at(server.url) as worker:
        with pytest.raises(WorkerBusy) as caught:
            await worker.forward(call(), FakeResponder())
        assert caught.value.retry_after_s == retry_after_s


async def test_who_does_not_accept_our_key_is_no_matter_of_the_client() -> None:
    """Without a key of ours it is the client's own that was shown, and its 401 is told to him."""
    async with RawServer(saying(said({"error": "Unauthorized"}, "401 Unauthorized"))) as server:
        responder = FakeResponder()
        async with worker_at(server.url, api_key="old") as worker:
            with pytest.raises(WorkerLocked, match="does not accept the API key"):
                await worker.forward(call(), responder)
        assert not responder.started
        async with worker_at(server.url) as worker:
            await worker.forward(call(), responder)
        assert responder.status == 401


async def test_any_other_answer_is_the_clients() -> None:
    async with RawServer(saying(said({"error": 1}, "400 Bad Request"))) as server, worker_at(server.url) as worker:
        responder = FakeResponder()
        await worker.forward(call(), responder)
        assert (responder.status, responder.body) == (400, b'{"error": 1}')


async def test_a_slow_client_stops_the_reading_from_the_worker() -> None:
    waiting: list[Callable[[], None]] = []
    received = sent = 0

    class Slow(FakeResponder):
        def write(self, data: bytes) -> None:
            nonlocal received
            received += len(data)

        def when_drained(self, then: Callable[[], None]) -> None:
            waiting.append(then)

    async def flood(_request: RawRequest, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(SSE_HEAD)
        for _ in range(1000):
            writer.write(chunk(b"x" * 32_768))
            await writer.drain()
            sent += 32_768
        writer.write(b"0\r\n\r\n")

    async with RawServer(flood) as server, worker_at(server.url) as worker, asyncio.TaskGroup() as group:
        task = group.create_task(worker.forward(call(), Slow()))
        before = -1
        while before != sent or not received:
            before = sent
            await asyncio.sleep(0.1)
        assert received < 400_000, "the bound and one read"
        assert sent < 12_000_000, "what the kernel's buffers hold"
        while not task.done():
            while waiting:
                waiting.pop()()
            await asyncio.sleep(0)
        assert received == 32_768_000


# --- what it cost ----------------------------------------------------------------------------------------------

USAGE = (
    b'{"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}'
)
LAST_CHUNK = b"0\r\n\r\n"
CHUNKED_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
LAST = b'data: {"choices":[],"usage":' + USAGE + b"}\n\n"


@pytest.mark.parametrize(
    "pieces",
    [
        [json_answer(b'{"choices":[],"usage":' + USAGE + b"}")],
        [CHUNKED_HEAD, chunk(b'{"choices":[],"us'), chunk(b'age":' + USAGE + b"}"), b"0\r\n\r\n"],
        [SSE_HEAD, chunk(b'data: {"usage":null}\n\n' + LAST + b"data: [DONE]\n\n"), b"0\r\n\r\n"],
        [SSE_HEAD, chunk(b"data: 1\n\n" + LAST[:20]), chunk(LAST[20:] + b"data: [DONE]\n\n"), b"0\r\n\r\n"],
    ],
)
async def test_what_an_answer_cost_is_read_in_passing(pieces: list[bytes]) -> None:
    told: list[Usage] = []
    begun: list[bool] = []
    async with RawServer(saying(*pieces)) as server, worker_at(server.url) as worker:
        responder = FakeResponder()
        await worker.forward(call(news=NewsTo(lambda: begun.append(True), told.append)), responder)
        assert told == [Usage(prompt_tokens=7, cached_tokens=4, completion_tokens=2)]
        assert begun == [True]


META = b'{"text":"a \\"meta_info\\" data:","meta_info":{"prompt_tokens":7,"completion_tokens":%d,"cached_tokens":4%b}}'


@pytest.mark.parametrize(
    ("pieces", "told"),
    [
        ([json_answer(META % (2, b""))], [Usage(7, 4, 2)]),
        ([json_answer(META % (2, b',"cached_tokens_details":{"host":1}'))], [Usage(7, 4, 2, host_tokens=1)]),
        (
            [
                json_answer(
                    META % (2, b',"cached_tokens_details":{"device":1,"host":1,"storage":2,"storage_backend":"F"}')
                )
            ],
            [Usage(7, 4, 2, host_tokens=1, storage_tokens=2)],
        ),
        ([SSE_HEAD, *(chunk(b"data: " + META % (n, b"") + b"\n\n") for n in (1, 2)), LAST_CHUNK], [Usage(7, 4, 2)]),
        ([SSE_HEAD, chunk(b'data: {"index":1,"meta_info":{"prompt_tokens":7}}\n\n'), LAST_CHUNK], []),
        ([json_answer(b'[{"meta_info":{"prompt_tokens":7}}]')], []),
        ([json_answer(b'{"meta_info":{}}')], []),
    ],
)
async def test_what_an_answer_to_generate_cost_is_in_its_last_meta_info(pieces: list[bytes], told: list[Usage]) -> None:
    said: list[Usage] = []
    async with RawServer(saying(*pieces)) as server, worker_at(server.url) as worker:
        await worker.forward(call(news=NewsTo(on_usage=said.append)), FakeResponder())
    assert said == told


@pytest.mark.parametrize(
    "details",
    [
        b"",  # nothing is said of them
        b',"prompt_tokens_details":null',  # vLLM and SGLang without their flags
        b',"prompt_tokens_details":{"multimodal_tokens":{"image":3}}',
        b',"prompt_tokens_details":{"cached_tokens":0,"image_tokens":3}',  # SGLang without its flag, and an image
    ],
)
async def test_a_server_that_was_not_told_to_report_cached_tokens_reports_none(details: bytes) -> None:
    told: list[Usage] = []
    usage = b'{"usage":{"prompt_tokens":12,"total_tokens":19,"completion_tokens":7%b}}' % details
    async with RawServer(saying(json_answer(usage))) as server, worker_at(server.url) as worker:
        await worker.forward(call(news=NewsTo(on_usage=told.append)), FakeResponder())
    assert told == [Usage(12, None, 7)]


@pytest.mark.parametrize(
    "body", [b"{}", b'{"usage": null}', b'{"usage": {"prompt_tokens": "many"}}', b'"usage"', b"\xff"]
)
async def test_an_answer_that_does_not_say_is_not_guessed(body: bytes) -> None:
    told: list[Usage] = []
    async with RawServer(saying(json_answer(body))) as server, worker_at(server.url) as worker:
        await worker.forward(call(news=NewsTo(on_usage=told.append)), FakeResponder())
        assert told == []


# --- what it is ------------------------------------------------------------------------------------------------

MODELS = said({"object": "list", "data": [{"id": "smollm2", "max_model_len": 2048}, {"id": "lora"}]})
KVHERD = {
    "GET /v1/models": MODELS,
    "GET /health": said({}),
    "GET /server_info": said(
        {
            "kvherd": {"version": "0.1.0"},
            "version": "kvherd-0.1.0",
            "block_size": 16,
            "page_size": 16,
            "dp_size": 2,
            "context_length": 8192,
            "max_total_num_tokens": 65536,
            "max_running_requests": 16,
            "internal_states": [],
            "kv_events": {"grpc": "127.0.0.1:51100"},
        }
    ),
    "GET /get_loads": said(
        {
            "loads": [
                {"num_running_reqs": 1, "num_waiting_reqs": 2, "num_used_tokens": 3, "max_total_num_tokens": 4},
                {"num_running_reqs": 10, "num_waiting_reqs": 20, "num_used_tokens": 30, "max_total_num_tokens": 40},
            ]
        }
    ),
    "POST /flush_cache?timeout=7": said(
        {"success": False, "message": "silent", "ranks": [{"rank": 0, "done": False, "message": "no answer"}]},
        "504 Gateway Timeout",
    ),
    "POST /flush_cache?timeout=2.5": said(
        {
            "success": False,
            "message": "rank 1 is busy",
            "ranks": [{"rank": 0, "done": True, "message": "cleared"}, {"rank": 1, "done": False, "message": "busy"}],
        },
        "400 Bad Request",
    ),
}
RECORDED = Path(__file__).parent.parent / "fixtures/vllm-0.32-http"


def recorded(name: str) -> bytes:
    return (RECORDED / name).read_bytes()


VLLM = {
    "GET /v1/models": json_answer(recorded("models.json")),
    "GET /version": json_answer(recorded("version.json")),
    "GET /metrics": json_answer(recorded("metrics_one_running.txt")),
    "GET /health": json_answer(b""),
}
VLLM_TWO_RANKS = VLLM | {
    "GET /metrics": json_answer(
        b'vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="10"} 1.0\n'
        b'vllm:cache_config_info{block_size="32",engine="1",num_gpu_blocks="20"} 1.0\n'
        b'vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_running{engine="1"} 1.0\n'
        b'vllm:num_requests_waiting{engine="0"} 4.0\nvllm:kv_cache_usage_perc{engine="0"} 0.5\n'
    ),
}
SGLANG = {
    "GET /v1/models": MODELS,
    "GET /server_info": said(
        {
            "page_size": 1,
            "dp_size": 1,
            "version": "0.5.23",
            "internal_states": [
                {"effective_max_running_requests_per_dp": 16, "memory_usage": {"token_capacity": 20000}}
            ],
        }
    ),
    "GET /metrics": json_answer(b"sglang:num_running_reqs 3.0\nsglang:num_queue_reqs 1.0\nsglang:token_usage 0.25\n"),
    "POST /flush_cache?timeout=0": json_answer(b"Cache flushed."),
    "POST /flush_cache?timeout=1": json_answer(b"Timed out waiting for idle state.", "400 Bad Request"),
}
OTHER = {"GET /v1/models": MODELS}


async def test_kvherd_says_what_it_is() -> None:
    async with RawServer(paths(KVHERD)) as server, worker_at(server.url) as worker:
        facts = await worker.detect()
        assert (facts.kind, facts.models) == (WorkerKind.KVHERD_HTTP, ("smollm2", "lora"))
        assert (facts.block_size, facts.ranks, facts.max_context_tokens) == (16, 2, 8192)
        assert (facts.capacity_tokens, facts.max_running, facts.version) == (65536, 32, "0.1.0")
        assert facts.events_url == "grpc://127.0.0.1:51100"
        assert await worker.load() == WorkerLoad(running=11, waiting=22, used_tokens=33, capacity_tokens=44)


async def test_adapters_are_models_after_their_base_and_known_as_what_they_are() -> None:
    cards = [
        {"id": "tuned", "parent": "smollm2", "root": "/adapters/tuned"},
        {"id": "smollm2", "parent": None, "max_model_len": 2048},
        {"id": "alias", "parent": None},
    ]
    listed = {"GET /v1/models": said({"object": "list", "data": cards})}
    async with RawServer(paths(VLLM | listed)) as server, worker_at(server.url) as worker:
        facts = await worker.detect()
    assert (facts.models, facts.adapters) == (("smollm2", "alias", "tuned"), ("tuned",))


async def test_vllm_is_known_by_its_version_and_its_cache_by_its_metrics() -> None:
    async with RawServer(paths(VLLM)) as server, worker_at(server.url) as worker:
        facts = await worker.detect()
        assert (facts.kind, facts.version, facts.models) == (WorkerKind.VLLM_HTTP, "0.32.0", ("smollm2",))
        assert (facts.block_size, facts.ranks, facts.capacity_tokens) == (32, 1, 91 * 32)
        assert (facts.max_context_tokens, facts.events_url) == (1024, None)
        load = await worker.load()
        assert (load.running, load.waiting, load.capacity_tokens) == (1, 0, 91 * 32)
        assert 0 < load.used_tokens <= 121 + 32
        await worker.probe()


async def test_vllm_is_not_asked_what_it_needs_seconds_to_answer() -> None:
    async with RawServer(paths(VLLM)) as server, worker_at(server.url) as worker:
        await worker.detect()
        assert "/server_info" not in [request.target for request in server.requests]


async def test_vllm_behind_a_proxy_that_renames_its_owner_is_known_all_the_same() -> None:
    async with RawServer(paths(VLLM | {"GET /v1/models": MODELS})) as server, worker_at(server.url) as worker:
        assert (await worker.detect()).kind is WorkerKind.VLLM_HTTP


async def test_the_ranks_of_vllm_are_added_up() -> None:
    async with RawServer(paths(VLLM_TWO_RANKS)) as server, worker_at(server.url) as worker:
        facts = await worker.detect()
        assert (facts.block_size, facts.ranks, facts.capacity_tokens) == (32, 2, 960)
        load = await worker.load()
        assert load == WorkerLoad(running=3, waiting=4, used_tokens=240, capacity_tokens=960)
        assert sorted(load.ranks) == [0, 1]
        for name in ("running", "waiting", "used_tokens", "capacity_tokens"):
            assert sum(getattr(one, name) for one in load.ranks.values()) == getattr(load, name)


async def test_what_an_answer_of_vllm_cost_is_read_in_passing() -> None:
    stream = recorded("chat_stream.txt")
    for answer in (
        [json_answer(recorded("chat.json"))],
        [SSE_HEAD, chunk(stream[:900]), chunk(stream[900:]) + LAST_CHUNK],
    ):
        told: list[Usage] = []
        async with RawServer(saying(*answer)) as server, worker_at(server.url) as worker:
            responder = FakeResponder()
            await worker.forward(call(news=NewsTo(on_usage=told.append)), responder)
        assert responder.body in (recorded("chat.json"), stream)
        assert [(usage.prompt_tokens, usage.completion_tokens) for usage in told] == [(37, 8)]


async def test_sglang_is_known_by_its_server_info() -> None:
    async with RawServer(paths(SGLANG)) as server, worker_at(server.url) as worker:
        facts = await worker.detect()
        assert (facts.kind, facts.block_size, facts.ranks) == (WorkerKind.SGLANG_HTTP, 1, 1)
        assert (facts.capacity_tokens, facts.max_running, facts.version) == (20000, 16, "0.5.23")
        assert facts.health_s == 20, "it answers between two steps"
        assert await worker.load() == WorkerLoad(running=3, waiting=1, used_tokens=5000, capacity_tokens=20000)


async def test_what_sglang_says_of_one_rank_s_slots_is_counted_for_all() -> None:
    state = {"effective_max_running_requests_per_dp": 16}
    info = {"page_size": 1, "dp_size": 3, "version": "0.5.23", "internal_states": [state] * 3}
    async with RawServer(paths(SGLANG | {"GET /server_info": said(info)})) as server, worker_at(server.url) as worker:
        facts = await worker.detect()
        assert (facts.ranks, facts.max_running) == (3, 48)


async def test_any_other_server_that_lists_models_will_do() -> None:
    async with RawServer(paths(OTHER)) as server, worker_at(server.url) as worker:
        facts = await worker.detect()
        assert (facts.kind, facts.models, facts.block_size) == (WorkerKind.OPENAI_HTTP, ("smollm2", "lora"), 0)
        await worker.probe()
        with pytest.raises(WorkerUnsupported, match="does not support telling its load"):
            await worker.load()
        with pytest.raises(WorkerUnsupported, match="does not support flush"):
            await worker.flush(timeout_s=1)


async def test_a_server_that_lists_no_models_is_no_worker() -> None:
    async with RawServer(paths({})) as server, worker_at(server.url) as worker:
        with pytest.raises(WorkerRefused, match="GET /v1/models gave HTTP 404: Not Found"):
            await worker.detect()


async def test_ill_health_is_told_in_the_workers_words() -> None:
    sick = {"GET /health": json_answer(b"engine is dead", "500 Internal Server Error")}
    async with RawServer(paths(sick)) as server, worker_at(server.url) as worker:
        with pytest.raises(WorkerRefused, match=r"not healthy \(HTTP 500\): engine is dead"):
            await worker.probe()


# --- flushing --------------------------------------------------------------------------------------------------


async def test_kvherd_is_flushed_by_its_route_and_tells_of_each_rank() -> None:
    async with RawServer(paths(KVHERD)) as server, worker_at(server.url) as worker:
        opened: list[bool] = []
        answer = await worker.flush(timeout_s=2.5, opened=lambda: opened.append(True))
        ranks = tuple(
            RankOutcome(rank, done=done, message=why)  # type: ignore[arg-type]
            for rank, done, why in ((0, True, "cleared"), (1, False, "busy"))
        )
        assert answer == FlushAnswer(done=False, message="rank 1 is busy", ranks=ranks)
        assert opened == [True]
        answer = await worker.flush(timeout_s=7)
        assert (answer.done, answer.timed_out, answer.ranks[0].message) == (False, True, "no answer")


async def test_sglang_is_flushed_by_its_route_and_may_refuse() -> None:
    async with RawServer(paths(SGLANG)) as server, worker_at(server.url) as worker:
        assert await worker.flush(timeout_s=0) == FlushAnswer(done=True, message="Cache flushed.")
        assert await worker.flush(timeout_s=1) == FlushAnswer(
            done=False, message="Timed out waiting for idle state.", timed_out=True
        )
        with pytest.raises(WorkerUnsupported, match="no /flush_cache"):
            await worker.flush(timeout_s=9)


async def test_only_kvherd_is_told_to_hold_new_requests_and_the_others_say_that_they_do_not() -> None:
    held = KVHERD | {"POST /flush_cache?timeout=3&hold=1": json_answer(b'{"success": true, "message": "cleared"}')}
    async with RawServer(paths(held)) as server, worker_at(server.url) as worker:
        assert await worker.flush(timeout_s=3, hold=True) == FlushAnswer(done=True, message="cleared")
    async with RawServer(paths(SGLANG)) as server, worker_at(server.url) as worker:
        answer = await worker.flush(timeout_s=0, hold=True)
        assert answer == FlushAnswer(done=True, message=f"Cache flushed.; {NOT_HELD}")
    reset = VLLM | {"POST /reset_prefix_cache": json_answer(recorded("reset_done.json"))}
    async with RawServer(paths(reset)) as server, worker_at(server.url) as worker:
        assert NOT_HELD in (await worker.flush(timeout_s=0, hold=True)).message


async def test_vllm_is_asked_until_it_could() -> None:
    tries = 0

    async def busy_twice(request: RawRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal tries
        if request.target == "/reset_prefix_cache":
            tries += 1
            writer.write(json_answer(recorded("reset_done.json" if tries > 2 else "reset_busy.json")))
        else:
            await paths(VLLM)(request, reader, writer)

    async with RawServer(busy_twice) as server, worker_at(server.url) as worker:
        opened: list[bool] = []
        answer = await worker.flush(timeout_s=5, opened=lambda: opened.append(True))
        assert (answer.done, tries, opened) == (True, 3, [True])


async def test_only_an_order_that_waits_for_its_answer_and_cannot_be_taken_back_is_in_doubt() -> None:
    """vLLM answers each time that it is asked; SGLang waits, and kvherd does but forgets who leaves."""
    busy_once = iter(("reset_busy.json", "reset_done.json"))

    async def busy(request: RawRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if request.target == "/reset_prefix_cache":
            writer.write(json_answer(recorded(next(busy_once))))
        else:
            await paths(VLLM)(request, reader, writer)

    expected: tuple[tuple[Callable[..., Any], float, list[bool]], ...] = (
        (busy, 5.0, [True, False, True, False]),
        (paths(SGLANG), 0.0, [True]),
        (paths(KVHERD), 2.5, []),
    )
    for engine, timeout_s, doubts in expected:
        told: list[bool] = []
        async with RawServer(engine) as server, worker_at(server.url) as worker:
            await worker.flush(timeout_s=timeout_s, in_doubt=told.append)
        assert told == doubts


async def test_vllm_that_stays_busy_times_out_on_time() -> None:
    busy = VLLM | {"POST /reset_prefix_cache": json_answer(recorded("reset_busy.json"))}
    async with RawServer(paths(busy)) as server, worker_at(server.url) as worker:
        begin_s = asyncio.get_running_loop().time()
        answer = await worker.flush(timeout_s=0.2)
        assert answer == FlushAnswer(done=False, message="still busy after 0.2 s", timed_out=True)
        assert asyncio.get_running_loop().time() - begin_s < 2
        assert await worker.flush(timeout_s=0) == FlushAnswer(
            done=False, message="busy; give it time to wait until it is idle"
        )


async def test_vllm_outside_its_development_mode_says_what_it_needs() -> None:
    async with RawServer(paths(VLLM)) as server, worker_at(server.url) as worker:
        with pytest.raises(WorkerUnsupported, match="VLLM_SERVER_DEV_MODE=1"):
            await worker.flush(timeout_s=1)


async def test_a_worker_that_dies_during_a_flush_fails_it() -> None:
    async def die(request: RawRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if request.method == "POST":
            writer.transport.abort()
        else:
            await paths(SGLANG)(request, reader, writer)

    async with RawServer(die) as server, worker_at(server.url) as worker:
        with pytest.raises(WorkerError):
            await worker.flush(timeout_s=1)


# --- addresses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("ftp://h", "must begin with http://"),
        ("http://", "names no host"),
        ("http://h:0", "port 0"),
        ("http://h:99999", "no URL"),
        ("http://user@h", "only a host"),
        ("http://h?x", "only a host"),
        ("http://169.254.169.254", "link-local"),
        ("http://[fe80::1]:80", "link-local"),
        ("http://[::ffff:169.254.1.1]", "link-local"),
    ],
)
def test_a_url_that_names_no_worker_is_refused(url: str, why: str) -> None:
    with pytest.raises(OptionInvalid, match=why):
        HttpWorker(ANN, url)


async def test_what_is_added_to_one_answer_is_not_in_the_next() -> None:
    async with RawServer(saying(json_answer(b"{}"))) as server, worker_at(server.url) as worker:
        for name in ("a", "b", "c"):
            responder = FakeResponder()
            await worker.forward(call(extra_headers=[(b"x-" + name.encode(), b"1")]), responder)
            assert [header for header in responder.headers if header.startswith("x-")] == ["x-" + name]


async def test_an_answer_too_large_to_keep_fails_though_it_came_in_one_piece() -> None:
    async with RawServer(saying(json_answer(b"x" * 200))) as server:
        address = http_address(server.url)
        pool = pool_to(address, None)
        asker = HttpAsker(ANN, address, pool, api_key=None, limit_bytes=100)
        for _ in range(2):
            with pytest.raises(WorkerFailed, match="larger than 100 bytes"):
                await asker.ask("GET", "/metrics")
        await pool.close()


async def test_a_worker_that_takes_a_large_body_slowly_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    body = b'{"prompt":"' + b"x" * 20_000_000 + b'"}'

    async def slowly(request: RawRequest, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(json_answer(b"%d" % len(request.body)))

    async with RawServer(slowly) as server, worker_at(server.url) as worker:
        responder = FakeResponder()
        await worker.forward(call().changed(body=body), responder)
    assert responder.body == b"%d" % len(body)
    assert caplog.records == []
