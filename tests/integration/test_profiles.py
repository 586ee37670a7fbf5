"""Profiles of a real engine, over its sidecar: what they record, and what befalls them."""

import json
import os
import resource
import signal
import socket
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb
from smg_grpc_proto.generated.sglang_scheduler_pb2_grpc import SglangSchedulerStub

from kvherd.testing.herds import EngineProcess, Start, begin_engine
from kvherd.testing.processes import command_line, wait_until

pytestmark = pytest.mark.engine

CALL = {"model": "tiny", "prompt": "once upon a time there was", "max_tokens": 8, "ignore_eos": True}
LONG = CALL | {"max_tokens": 1500, "stream": True}


def ask(engine: EngineProcess, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{engine.sidecar_url}{path}", json=body, timeout=20)


def generate(engine: EngineProcess) -> None:
    assert httpx.post(f"{engine.url}/v1/completions", json=CALL, timeout=20).status_code == 200


def steps(path: str | Path) -> list[dict[str, Any]]:
    events = json.loads(Path(path).read_bytes())
    return [event for event in events if event["ph"] == "X" and event["name"].startswith("step ")]


def rank_pids(engine: EngineProcess) -> list[int]:
    return sorted(pid for pid in engine.process.family() if "kvherd.runtime.process" in command_line(pid))


def test_a_profile_of_two_ranks_has_a_trace_each_and_one_of_both(start: Start, tmp_path: Path) -> None:
    engine = begin_engine(start, "--dp-size", "2")
    begun = ask(engine, "/start_profile", output_dir=str(tmp_path / "new"), merge_profiles=True, activities=["CPU"])
    assert begun.status_code == 200, begun.text
    assert len(begun.json()["files"]) == 2
    for _ in range(3):
        generate(engine)
    assert ask(engine, "/start_profile").status_code == 409
    ended = ask(engine, "/stop_profile")
    assert ended.status_code == 200, ended.text
    *traces, merged = ended.json()["files"]
    assert [len(steps(trace)) for trace in traces] == [24, 0]
    assert len(steps(merged)) == 24
    assert ask(engine, "/stop_profile").status_code == 409
    assert sorted(path.suffix for path in (tmp_path / "new").iterdir()) == [".json"] * 3


def test_a_profile_of_so_many_steps_ends_by_itself(start: Start, tmp_path: Path) -> None:
    engine = begin_engine(start)
    begun = ask(engine, "/start_profile", output_dir=str(tmp_path), num_steps="5", with_stack=True)
    [trace] = begun.json()["files"]
    assert not Path(trace).exists()
    generate(engine)
    wait_until(Path(trace).exists, within_s=20, what="it has ended by itself")
    assert [step["args"]["step"] for step in steps(trace)] == [1, 2, 3, 4, 5]
    late = ask(engine, "/stop_profile")
    assert late.status_code == 409
    assert "recorded 5 steps" in late.json()["error"]["message"]
    assert ask(engine, "/start_profile", output_dir=str(tmp_path)).status_code == 200


def test_a_directory_that_cannot_be_written_is_a_400_and_the_engine_serves_on(start: Start, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    engine = begin_engine(start, "--dp-size", "2")
    refused = ask(engine, "/start_profile", output_dir=f"{tmp_path}/file/x")
    assert refused.status_code == 400
    assert f"cannot write into {tmp_path}/file/x: Not a directory" in refused.json()["error"]["message"]
    generate(engine)
    assert ask(engine, "/start_profile", output_dir=str(tmp_path)).status_code == 200


def test_a_disk_that_is_full_ends_the_profile_and_not_the_engine(start: Start, tmp_path: Path) -> None:
    """A limit on the size of files stands in for the disk: the write fails in the same place."""
    engine = begin_engine(start)
    [pid] = rank_pids(engine)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (2**18, resource.RLIM_INFINITY))
    assert ask(engine, "/start_profile", output_dir=str(tmp_path), with_stack=True).status_code == 200
    for _ in range(20):
        generate(engine)
    ended = ask(engine, "/stop_profile")
    assert ended.status_code == 400
    message = ended.json()["error"]["message"]
    assert "was given up: writing into" in message
    assert "File too large" in message
    assert list(tmp_path.iterdir()) == []
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert ask(engine, "/start_profile", output_dir=str(tmp_path)).status_code == 200
    generate(engine)
    assert len(steps(ask(engine, "/stop_profile").json()["files"][0])) == 8


def test_an_engine_killed_during_a_profile_hangs_nobody_and_leaves_a_trace_that_opens(
    start: Start, tmp_path: Path
) -> None:
    engine = begin_engine(start)
    assert ask(engine, "/start_profile", output_dir=str(tmp_path), with_stack=True).status_code == 200
    with httpx.stream("POST", f"{engine.url}/v1/completions", json=LONG, timeout=20) as answer:
        lines = answer.iter_lines()
        next(lines)
        wait_until(lambda: next(tmp_path.iterdir()).stat().st_size > 0, within_s=20, what="something is written")
        engine.kill_rank()
        assert "died" in [line for line in lines if line.startswith("data: {")][-1]
    assert engine.process.wait(within_s=10) == 1
    engine.process.assert_nothing_left(ports=engine.ports)
    [trace] = tmp_path.iterdir()
    assert trace.suffix == ".part"
    whole, _, _ = trace.read_bytes().rpartition(b",\n")
    assert len(json.loads(whole + b"]")) > 100


def test_a_start_whose_caller_left_while_a_rank_was_stopped_leaves_no_profile(start: Start, tmp_path: Path) -> None:
    """
    1. Rank 0 is stopped; both are ordered to start, and rank 1 does.
    2. The caller hangs up: both are told to forget it.
    3. Rank 0 goes on, reads both orders, and has no profile either.
    """
    engine = begin_engine(start, "--dp-size", "2")
    stopped = rank_pids(engine)[0]
    os.kill(stopped, signal.SIGSTOP)
    body = json.dumps({"output_dir": str(tmp_path)})
    with socket.create_connection(("127.0.0.1", engine.port + 1)) as caller:
        head = f"POST /start_profile HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        caller.sendall((head + body).encode())
        wait_until(lambda: len(list(tmp_path.iterdir())) == 1, within_s=10, what="the other rank has begun")
    wait_until(lambda: not list(tmp_path.iterdir()), within_s=10, what="it has forgotten it")
    os.kill(stopped, signal.SIGCONT)
    assert ask(engine, "/stop_profile").status_code == 409
    assert list(tmp_path.iterdir()) == []


def test_steps_go_on_while_files_are_closed_and_merged_and_orders_wait_for_that(start: Start, tmp_path: Path) -> None:
    """
    1. Rank 1 stands still, and something that never ends to be read has the name of its trace: a pipe.
    2. Rank 0 ends its profile, finds that the last file is there, and merges: it reads the pipe.
    3. It generates all the same, and who stops the profile waits until somebody has closed the pipe.
    """
    engine = begin_engine(start, "--dp-size", "2")
    body = {"output_dir": str(tmp_path), "profile_id": "p", "merge_profiles": True, "num_steps": 2}
    begun = ask(engine, "/start_profile", **body)
    assert begun.status_code == 200, begun.text
    os.kill(engine.process.member("rank=1"), signal.SIGSTOP)
    pipe = tmp_path / "p-rank1.trace.json"
    os.mkfifo(pipe)
    with grpc.insecure_channel(f"127.0.0.1:{engine.port}") as channel, ThreadPoolExecutor(1) as pool:
        stub = SglangSchedulerStub(channel)
        for _ in range(3):
            *_, last = stub.Generate(generation(rank=0), timeout=20)
            assert last.complete.completion_tokens == 8
        wait_until((tmp_path / "p-merged.trace.json.part").exists, within_s=20, what="rank 0 merges")
        *_, last = stub.Generate(generation(rank=0), timeout=20)
        assert last.complete.completion_tokens == 8
        os.kill(engine.process.member("rank=1"), signal.SIGCONT)
        stopping = pool.submit(ask, engine, "/stop_profile")
        *_, last = stub.Generate(generation(rank=0), timeout=20)
        assert last.complete.completion_tokens == 8
        assert not stopping.done()
        pipe.open("wb").close()
        assert stopping.result().status_code in {200, 400, 409}, stopping.result().text
    generate(engine)


def generation(*, rank: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=uuid.uuid4().hex,
        tokenized=pb.TokenizedInput(input_ids=[1, 2, 3]),
        sampling_params=pb.SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True),
        data_parallel_rank=rank,
    )
