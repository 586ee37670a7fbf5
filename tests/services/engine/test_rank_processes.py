"""Rank processes are started, watched, and gone whatever happens."""

import asyncio
import os
import signal
import socket
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvherd.core.errors import PortInUse, StartFailed
from kvherd.services.engine.rank_plan import ipc_directory, rank_configs
from kvherd.services.engine.ranks import RankProcesses
from kvherd.testing.interrupted import interrupted, tasks_left
from kvherd.testing.rank_client import RankClient


def _nobody(_rank: int, reason: str) -> None:
    raise AssertionError(f"a rank ended by itself: {reason}")


def _alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.engine
async def test_ranks_come_up_together_and_are_gone_afterwards() -> None:
    with ipc_directory() as directory:
        configs = rank_configs("tiny", ranks=2, port=0, ipc_dir=directory, pool_blocks=8)
        async with RankClient(directory) as client:
            async with RankProcesses(configs, on_exit=_nobody) as processes:
                pids = dict(processes.pids)
                assert [(await client.ready(rank)).pid for rank in (0, 1)] == [pids[rank] for rank in sorted(pids)]
            assert not any(_alive(pid) for pid in pids.values())


@pytest.mark.engine
async def test_an_error_in_the_body_leaves_no_process() -> None:
    with ipc_directory() as directory:
        configs = rank_configs("tiny", ranks=1, port=0, ipc_dir=directory)
        pids: list[int] = []

        async def body() -> None:
            async with RankProcesses(configs, on_exit=_nobody) as processes:
                pids.extend(processes.pids.values())
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await body()
        assert pids
        assert not any(_alive(pid) for pid in pids)


@pytest.mark.engine
async def test_a_cancellation_leaves_no_process() -> None:
    pids: list[int] = []
    with ipc_directory() as directory:
        configs = rank_configs("tiny", ranks=1, port=0, ipc_dir=directory)

        async def body() -> None:
            async with RankProcesses(configs, on_exit=_nobody) as processes:
                pids.extend(processes.pids.values())
                await asyncio.Event().wait()

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(body(), timeout=0.3)
    assert pids
    assert not any(_alive(pid) for pid in pids)


@pytest.mark.engine
@pytest.mark.parametrize("awaits", [(0, 1), (1, 2), (0, 1, 2)])
async def test_an_end_that_is_cancelled_again_leaves_no_process_and_no_pipe(awaits: tuple[int, ...]) -> None:
    pids: list[int] = []
    with ipc_directory() as directory:
        configs = rank_configs("tiny", ranks=1, port=0, ipc_dir=directory)

        async def whole_life() -> None:
            async with RankProcesses(configs, on_exit=_nobody) as processes:
                pids.extend(processes.pids.values())
                await asyncio.sleep(0.1)

        assert await interrupted(whole_life(), *awaits)
    assert pids
    assert not any(_alive(pid) for pid in pids)
    assert tasks_left() == []


@pytest.mark.engine
async def test_a_rank_that_is_stopped_is_killed_when_its_time_is_over() -> None:
    with ipc_directory() as directory:
        configs = rank_configs("tiny", ranks=1, port=0, ipc_dir=directory)
        async with asyncio.timeout(5), RankProcesses(configs, on_exit=_nobody, stops_within_s=0.2) as processes:
            [pid] = processes.pids.values()
            os.kill(pid, signal.SIGSTOP)
        assert not _alive(pid)


@pytest.mark.engine
async def test_a_second_rank_that_cannot_be_started_takes_the_first_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class OnlyOnce(subprocess.Popen[bytes]):
        def __init__(self, *command: Any, **options: Any) -> None:
            if started:
                raise OSError(11, "Resource temporarily unavailable")
            super().__init__(*command, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", OnlyOnce)
    with ipc_directory() as directory:
        configs = rank_configs("tiny", ranks=2, port=0, ipc_dir=directory)
        with pytest.raises(StartFailed, match="rank 1 did not start: Resource temporarily unavailable"):
            await RankProcesses(configs, on_exit=_nobody).__aenter__()
    assert not _alive(started[0].pid)


@pytest.mark.net
async def test_a_port_in_use_is_named_before_any_process_starts() -> None:
    with ipc_directory() as directory, socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        configs = rank_configs("tiny", ranks=1, port=port - 30, ipc_dir=directory)
        processes = RankProcesses(configs, on_exit=_nobody)
        with pytest.raises(PortInUse) as refusal:
            await processes.__aenter__()
        assert str(refusal.value) == f"port {port} is in use; choose another with --port"
        assert processes.pids == {}


@pytest.mark.engine
async def test_a_model_that_is_not_there_is_the_last_word() -> None:
    with ipc_directory() as directory:
        configs = rank_configs("/nowhere/model.gguf", ranks=1, port=0, ipc_dir=directory)
        reasons: asyncio.Queue[str] = asyncio.Queue()
        async with (
            RankClient(directory) as client,
            RankProcesses(configs, on_exit=lambda _, reason: reasons.put_nowait(reason)),
        ):
            async with asyncio.timeout(20):
                reason = await reasons.get()
            assert reason.startswith("no model at /nowhere/model.gguf")
            assert await client.fatal() == reason


def test_the_directory_of_the_sockets_is_for_its_owner_and_goes_with_what_is_in_it() -> None:
    with ipc_directory() as directory:
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        (directory / "rank0.in").touch()
    assert not directory.exists()


def test_a_long_temporary_directory_is_not_used_for_sockets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with ipc_directory() as directory:
        assert len(str(directory / "rank999.in")) <= 107


def test_ports_are_counted_from_the_engines_and_0_means_any() -> None:
    [first, second] = rank_configs("tiny", ranks=2, port=51000, ipc_dir=Path("/x"))
    assert (first.events_endpoint, first.replay_endpoint) == ("tcp://127.0.0.1:51010", "tcp://127.0.0.1:51030")
    assert (second.events_endpoint, second.replay_endpoint) == ("tcp://127.0.0.1:51011", "tcp://127.0.0.1:51031")
    [anywhere] = rank_configs("tiny", ranks=1, port=0, ipc_dir=Path("/x"))
    assert anywhere.events_endpoint == anywhere.replay_endpoint == "tcp://127.0.0.1:0"
