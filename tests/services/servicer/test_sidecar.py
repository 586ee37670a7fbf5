"""The sidecar: HTTP for operators beside gRPC, over a scheduler that does what a test says."""

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc
import httpx
import pytest
from smg_grpc_proto.generated import common_pb2

from kvherd.core.engine.profile import Activity, Stage
from kvherd.core.ids import Rank
from kvherd.testing.patience import until
from kvherd.testing.processes import can_bind
from kvherd.testing.scheduler import FakeScheduler, rank_facts

pytestmark = pytest.mark.net

Opened = Callable[..., AbstractAsyncContextManager[Any]]

LONG = {"model": "letters", "prompt": "once", "max_tokens": 900}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """None of our own settings reaches a test."""
    for name in ("WITH_STACK", "RECORD_SHAPES", "DIR"):
        monkeypatch.delenv(f"KVHERD_PROFILE_{name}", raising=False)
        monkeypatch.delenv(f"SGLANG_PROFILE_{name}", raising=False)
    monkeypatch.delenv("SGLANG_TORCH_PROFILER_DIR", raising=False)
    return monkeypatch


# --- profiles --------------------------------------------------------------------------------------------------------


async def test_a_profile_starts_with_no_body_at_all_and_stops(doors: Opened) -> None:
    async with doors() as at:
        begun = await at.sidecar.post("/start_profile")
        assert begun.status_code == 200
        wanted = at.scheduler.profile
        assert re.fullmatch(r"profile-[0-9a-f]{32}", wanted.profile_id)
        assert begun.json()["profile_id"] == wanted.profile_id
        assert begun.json()["files"] == [f"/traces/{wanted.profile_id}-rank0.trace.json"]
        assert (wanted.activities, wanted.num_steps, wanted.stages) == ((Activity.CPU,), None, tuple(Stage))
        assert wanted.output_dir.endswith("/kvherd-profiles")
        ended = await at.sidecar.post("/stop_profile", json={})
        assert ended.status_code == 200
        assert ended.json()["files"] == begun.json()["files"]
        assert [(one["rank"], one["done"]) for one in ended.json()["ranks"]] == [(0, True)]


async def test_every_field_arrives(doors: Opened) -> None:
    body = {
        "output_dir": "/some/where",
        "start_step": "7",
        "num_steps": "5",
        "activities": ["cpu", "MEM"],
        "with_stack": True,
        "record_shapes": True,
        "profile_by_stage": True,
        "merge_profiles": True,
        "profile_prefix": "mine",
        "profile_stages": ["decode"],
        "profile_id": "profile-9",
    }
    async with doors(FakeScheduler([rank_facts(0), rank_facts(1)])) as at:
        assert (await at.sidecar.post("/start_profile", json=body)).status_code == 200
        wanted = at.scheduler.profile
    assert (wanted.output_dir, wanted.start_step, wanted.num_steps) == ("/some/where", 7, 5)
    assert wanted.activities == (Activity.CPU, Activity.MEM)
    assert (wanted.with_stack, wanted.record_shapes, wanted.by_stage, wanted.merged_ranks) == (True, True, True, 2)
    assert (wanted.prefix, wanted.stages, wanted.profile_id) == ("mine", (Stage.DECODE,), "profile-9")


async def test_what_sglang_s_own_clients_send_is_taken(doors: Opened) -> None:
    """Its defaults name a GPU; here that records nothing, and the answer says so."""
    body = {
        "output_dir": "/x",
        "num_steps": "5",
        "activities": ["CPU", "GPU"],
        "profile_by_stage": False,
        "profile_stages": None,
        "merge_profiles": False,
        "profile_prefix": None,
    }
    async with doors() as at:
        answer = await at.sidecar.post("/start_profile", json=body)
        assert answer.status_code == 200
        assert answer.json()["notes"] == ["activities: GPU records nothing, as this engine computes on the processor"]
        assert at.scheduler.profile.num_steps == 5


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"num_steps": 5,\n "x" 1}', ("not JSON", "line 2, column 6")),
        (b"[]", ("body", "must be a JSON object, not a list")),
        (b'{"step": 5}', ("step: is not known here", "num_steps")),
        (b'{"detailed_annotations": true}', ("detailed_annotations: is not known here",)),
        (b'{"num_steps": "five"}', ("num_steps: must be a whole number",)),
        (b'{"num_steps": "-5"}', ("num_steps: must be a whole number",)),
        (b'{"num_steps": 0}', ("num_steps: must be between 1 and",)),
        (b'{"num_steps": 2.5}', ("num_steps: must be a whole number, not 2.5",)),
        (b'{"num_steps": true}', ("num_steps: must be a whole number, not a boolean",)),
        (b'{"num_steps": [5]}', ("num_steps: must be a whole number, not a list",)),
        (b'{"start_step": "9999999999"}', ("start_step: must be between 0 and",)),
        (b'{"start_step": -1}', ("start_step: must be between 0 and",)),
        (b'{"output_dir": 5}', ("output_dir: must be a string, not a number",)),
        (b'{"output_dir": " "}', ("output_dir: must be the path of a directory",)),
        (b'{"activities": "CPU"}', ("activities: must be a list, not a string",)),
        (b'{"activities": ["CPU", 5]}', ("activities[1]: must be a string",)),
        (b'{"activities": ["CPU", "RPD"]}', ("activities[1]: 'RPD' cannot be recorded here", "CPU and MEM")),
        (b'{"activities": ["GPU"]}', ("activities[0]: 'GPU' cannot be recorded here",)),
        (b'{"with_stack": "yes"}', ("with_stack: must be true or false",)),
        (b'{"record_shapes": 1}', ("record_shapes: must be true or false",)),
        (b'{"profile_by_stage": 1}', ("profile_by_stage: must be true or false",)),
        (b'{"profile_stages": ["extend"]}', ("profile_stages[0]: must be prefill or decode",)),
        (b'{"profile_prefix": "../x"}', ("profile_prefix: is a part of file names",)),
        (b'{"profile_id": "a/b"}', ("profile_id: is a part of file names",)),
    ],
)
async def test_a_wrong_body_is_a_400_that_says_where_and_never_reaches_the_scheduler(
    doors: Opened, body: bytes, words: tuple[str, ...]
) -> None:
    async with doors() as at:
        answer = await at.sidecar.post("/start_profile", content=body)
        assert answer.status_code == 400
        assert all(word in answer.json()["error"]["message"] for word in words), answer.text
        assert at.scheduler.profile is None


async def test_a_stop_takes_no_field(doors: Opened) -> None:
    async with doors() as at:
        answer = await at.sidecar.post("/stop_profile", json={"profile_id": "x"})
        assert answer.status_code == 400
        assert "profile_id: is not known here" in answer.json()["error"]["message"]


@pytest.mark.parametrize("prefix", ["SGLANG", "KVHERD"])
@pytest.mark.parametrize("value", ["0", "False", "off"])
async def test_the_environment_can_turn_stacks_and_shapes_off(
    doors: Opened, environment: pytest.MonkeyPatch, prefix: str, value: str
) -> None:
    environment.setenv(f"{prefix}_PROFILE_WITH_STACK", value)
    async with doors() as at:
        answer = await at.sidecar.post("/start_profile", json={"with_stack": True, "record_shapes": True})
        assert (at.scheduler.profile.with_stack, at.scheduler.profile.record_shapes) == (False, True)
        assert answer.json()["notes"] == [
            f"with_stack is turned off by {prefix}_PROFILE_WITH_STACK in the engine's environment"
        ]


async def test_the_environment_cannot_turn_them_on(doors: Opened, environment: pytest.MonkeyPatch) -> None:
    environment.setenv("SGLANG_PROFILE_RECORD_SHAPES", "1")
    async with doors() as at:
        await at.sidecar.post("/start_profile")
        assert not at.scheduler.profile.record_shapes


@pytest.mark.parametrize("name", ["KVHERD_PROFILE_DIR", "SGLANG_TORCH_PROFILER_DIR"])
async def test_the_environment_names_the_directory(doors: Opened, environment: pytest.MonkeyPatch, name: str) -> None:
    environment.setenv(name, "/named/here")
    async with doors() as at:
        await at.sidecar.post("/start_profile")
        assert at.scheduler.profile.output_dir == "/named/here"


async def test_a_second_start_and_a_stop_of_none_are_409(doors: Opened) -> None:
    async with doors() as at:
        assert (await at.sidecar.post("/stop_profile")).status_code == 409
        assert (await at.sidecar.post("/start_profile")).status_code == 200
        second = await at.sidecar.post("/start_profile")
        assert second.status_code == 409
        assert second.json()["error"]["message"] == "one is on"


async def test_a_rank_that_refuses_is_a_400_with_its_reason(doors: Opened) -> None:
    scheduler = FakeScheduler([rank_facts(0), rank_facts(1)])
    scheduler.refusals[Rank(1)] = "cannot write into /x: Read-only file system"
    async with doors(scheduler) as at:
        answer = await at.sidecar.post("/start_profile")
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "rank 1: cannot write into /x: Read-only file system"
        told = [(one["rank"], one["done"]) for one in answer.json()["ranks"]]
        assert told == [(0, True), (1, False)]
        assert answer.json()["ranks"][1]["message"] == "cannot write into /x: Read-only file system"


async def test_a_rank_that_is_silent_is_a_504(doors: Opened) -> None:
    scheduler = FakeScheduler([rank_facts(0), rank_facts(1)])
    scheduler.silent.add(Rank(1))
    async with doors(scheduler, order_timeout_s=0.1) as at:
        answer = await at.sidecar.post("/start_profile")
        assert answer.status_code == 504
        assert answer.json()["error"]["message"] == "no answer from rank 1 within 0.1 s"
        assert answer.json()["ranks"] == [{"rank": 1, "done": False, "message": "no answer"}]


async def test_what_nobody_foresaw_is_a_500_without_internals(
    doors: Opened, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("secret")

    async with doors() as at:
        monkeypatch.setattr(at.scheduler, "start_profile", broken)
        answer = await at.sidecar.post("/start_profile")
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert "secret" in caplog.text


async def test_a_client_that_leaves_withdraws_its_order(doors: Opened) -> None:
    scheduler = FakeScheduler()
    scheduler.silent.add(Rank(0))
    async with doors(scheduler) as at:
        asking = asyncio.ensure_future(at.sidecar.post("/start_profile"))
        await until(lambda: scheduler.open_orders == 1)
        asking.cancel()
        await until(lambda: scheduler.withdrawn == 1)


# --- bodies ----------------------------------------------------------------------------------------------------------


async def pieces(*them: bytes) -> AsyncIterator[bytes]:
    for each in them:
        yield each


async def test_a_body_in_chunks_is_read(doors: Opened) -> None:
    async with doors() as at:
        answer = await at.sidecar.post("/start_profile", content=pieces(b'{"num_', b'steps": 3}'))
        assert answer.status_code == 200
        assert at.scheduler.profile.num_steps == 3


@pytest.mark.parametrize("path", ["/start_profile", "/stop_profile", "/flush_cache"])
async def test_a_huge_body_is_refused_by_its_length_before_it_is_sent(doors: Opened, path: str) -> None:
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {100 * 2**20}\r\n\r\n".encode()
    async with doors() as at:
        reader, writer = await asyncio.open_connection("127.0.0.1", at.config.sidecar_port)
        writer.write(head)
        async with asyncio.timeout(5):
            assert b" 413 " in await reader.readline()
        writer.close()
        assert at.scheduler.profile is None
        assert at.scheduler.flush_calls == []


async def test_a_huge_body_in_chunks_is_refused_at_the_limit(doors: Opened) -> None:
    async with doors() as at:
        reader, writer = await asyncio.open_connection("127.0.0.1", at.config.sidecar_port)
        writer.write(b"POST /start_profile HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n")
        status = asyncio.ensure_future(reader.readline())
        sent = 0
        try:
            while not status.done() and sent < 100:
                writer.write(b"100000\r\n" + b" " * 2**20 + b"\r\n")
                sent += 1
                await writer.drain()
        except ConnectionError:
            pass
        assert b" 413 " in await status
        assert sent < 50
        writer.close()


# --- flush and the rest ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_an_idle_engine_flushes(doors: Opened, method: str) -> None:
    async with doors() as at:
        answer = await at.sidecar.request(method, "/flush_cache?timeout=3")
        assert (answer.status_code, answer.json()["success"]) == (200, True)
        assert at.scheduler.flush_calls == [(3.0, False)]


async def test_a_busy_engine_says_with_what_and_whether_it_expired(doors: Opened) -> None:
    scheduler = FakeScheduler(step_s=0.01)
    async with doors(scheduler) as at:
        busy = asyncio.ensure_future(at.http.post("/v1/completions", json=LONG))
        await until(lambda: scheduler.running == 1)
        now = await at.sidecar.post("/flush_cache")
        expired = await at.sidecar.post("/flush_cache?timeout=0.05")
        busy.cancel()
    assert (now.status_code, now.json()["timed_out"], now.json()["message"]) == (400, False, "1 running")
    assert (expired.status_code, expired.json()["timed_out"]) == (400, True)
    assert "1 running" in expired.json()["message"]


@pytest.mark.parametrize("seconds", ["nan", "inf", "-1", "3601", "1e12", "soon"])
async def test_a_time_that_nobody_can_wait_is_a_400(doors: Opened, seconds: str) -> None:
    async with doors() as at:
        answer = await at.sidecar.post(f"/flush_cache?timeout={seconds}")
        assert answer.status_code == 400
        assert "timeout" in answer.json()["error"]["message"]
        assert at.scheduler.flush_calls == []


async def test_a_dead_scheduler_is_a_503_for_orders_and_health(doors: Opened) -> None:
    async with doors() as at:
        at.scheduler.die("killed by SIGKILL")
        await at.servicer.fail(at.scheduler.failure)
        for method, path in [("POST", "/flush_cache"), ("POST", "/start_profile"), ("POST", "/stop_profile")]:
            answer = await at.sidecar.request(method, path)
            assert answer.status_code == 503, path
            assert "SIGKILL" in answer.json()["error"]["message"]
        assert (await at.sidecar.get("/health")).status_code == 503
        assert (await at.sidecar.get("/metrics")).status_code == 200


async def test_it_tells_what_the_engine_s_own_http_tells(doors: Opened) -> None:
    async with doors() as at:
        for path in ("/health", "/metrics", "/server_info"):
            here, there = await at.sidecar.get(path), await at.http.get(path)
            assert here.status_code == there.status_code == 200
            assert len(here.content) > 10
        info = (await at.sidecar.get("/server_info")).json()
        assert info["kvherd"]["sidecar_port"] == at.config.sidecar_port


async def test_it_generates_nothing(doors: Opened) -> None:
    async with doors() as at:
        answer = await at.sidecar.post("/v1/completions", json=LONG)
        assert answer.status_code == 404
        assert "is not served here" in answer.json()["error"]["message"]
        assert (await at.sidecar.get("/start_profile")).status_code == 405


async def test_the_engine_s_own_http_starts_and_stops_profiles_too(doors: Opened) -> None:
    async with doors() as at:
        assert (await at.http.post("/start_profile", json={"num_steps": "2"})).status_code == 200
        assert (await at.http.post("/stop_profile", json={})).status_code == 200


async def test_without_a_port_there_is_no_sidecar(doors: Opened) -> None:
    async with doors(sidecar_port=0) as at:
        assert can_bind(at.config.port + 1)
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", at.config.port + 1))
        with pytest.raises(httpx.HTTPError):
            await at.sidecar.get("/health")


# --- gRPC ----------------------------------------------------------------------------------


async def test_grpc_starts_and_stops_a_profile_with_the_fields_it_has(doors: Opened) -> None:
    request = common_pb2.StartProfileRequest(
        output_dir="/x", start_step=3, num_steps=4, activities=["CPU", "MEM"], with_stack=True, profile_by_stage=True
    )
    async with doors() as at:
        answer = await at.stub.StartProfile(request)
        assert answer.success
        wanted = at.scheduler.profile
        assert (wanted.output_dir, wanted.start_step, wanted.num_steps) == ("/x", 3, 4)
        assert (wanted.with_stack, wanted.record_shapes, wanted.by_stage) == (True, False, True)
        assert wanted.activities == (Activity.CPU, Activity.MEM)
        assert (await at.stub.StopProfile(common_pb2.StopProfileRequest())).success


async def test_grpc_says_what_is_wrong_with_a_profile(doors: Opened) -> None:
    async with doors() as at:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await at.stub.StartProfile(common_pb2.StartProfileRequest(num_steps=0))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await at.stub.StopProfile(common_pb2.StopProfileRequest())
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        at.scheduler.refusals[Rank(0)] = "cannot write there"
        answer = await at.stub.StartProfile(common_pb2.StartProfileRequest())
        assert (answer.success, answer.message) == (False, "cannot write there")


# --- web pages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("door", ["sidecar", "http"])
@pytest.mark.parametrize(
    ("header", "status"),
    [
        ({"host": "evil.test"}, 421),
        ({"origin": "http://evil.test"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"host": "localhost:1", "origin": "http://localhost:1"}, 200),
    ],
)
async def test_a_web_page_of_another_site_orders_nothing_and_reads_nothing(
    doors: Opened, door: str, header: dict[str, str], status: int
) -> None:
    async with doors() as at:
        client = getattr(at, door)
        for method, path in (
            ("GET", "/flush_cache"),
            ("POST", "/flush_cache"),
            ("GET", "/server_info"),
            ("GET", "/metrics"),
        ):
            answer = await client.request(method, path, headers=header)
            assert answer.status_code == status
        assert (await client.post("/start_profile", headers=header)).status_code == status
        assert (await client.get("/health", headers=header)).status_code == 200
        assert len(at.scheduler.flush_calls) == (2 if status == 200 else 0)
