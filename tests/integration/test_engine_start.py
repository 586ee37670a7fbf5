"""A start that fails, at any of its steps, has left nothing by the time its error is told. Real processes."""

import asyncio
import os
import signal
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from kvherd.cli.engine import EngineOptions, run_engine
from kvherd.core.errors import ModelMissing, PortInUse, SchedulerDied, StartFailed
from kvherd.ports.scheduler import Scheduler
from kvherd.testing.patience import until
from kvherd.testing.processes import can_bind, command_line, free_ports, is_alive

pytestmark = pytest.mark.engine

OFFSETS = (0, 1, 2, 10, 11, 30, 31)
Facts = Mapping[str, object]


class HookBroke(Exception):
    pass


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the engine's sockets go; the path of a socket must be short."""
    with tempfile.TemporaryDirectory(prefix="kht-", dir="/tmp") as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


def options(port: int, *, model: str = "tiny", sidecar_port: int | None = None) -> EngineOptions:
    return EngineOptions(
        model=model,
        host="127.0.0.1",
        host_names=(),
        port=port,
        sidecar_port=port + 1 if sidecar_port is None else sidecar_port,
        served_model_name=None,
        ranks=2,
        block_size=16,
        kv_tokens=1024,
        host_kv_tokens=0,
        storage_dir=None,
        storage_mb=1,
        max_running=4,
        max_context_tokens=None,
        chunk_tokens=64,
        threads=1,
        seed=0,
    )


def ranks_of_this_process() -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[1]
            if int(parent) == os.getpid() and "kvherd.runtime.process" in command_line(int(entry.name)):
                found.append(int(entry.name))
    return [pid for pid in found if is_alive(pid)]


def listening_unix_sockets(directory: Path) -> list[str]:
    return [line for line in Path("/proc/net/unix").read_text().splitlines() if str(directory) in line]


def assert_nothing_left(temporary: Path, port: int, *, taken: int | None = None) -> None:
    assert ranks_of_this_process() == []
    assert [port + each for each in OFFSETS if port + each != taken and not can_bind(port + each)] == []
    assert list(temporary.iterdir()) == []
    assert listening_unix_sockets(temporary) == []
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


async def test_the_hook_is_called_when_the_ranks_are_ready_and_no_door_is_open(temporary: Path) -> None:
    port = free_ports(OFFSETS)
    heard: list[tuple[int, Facts, Facts]] = []

    async def hook(manager: Scheduler, server_args: Facts, scheduler_info: Facts) -> None:
        assert (await manager.flush(timeout_s=0)).done
        assert all(can_bind(port + each) for each in (0, 1, 2))
        heard.append((len(ranks_of_this_process()), server_args, scheduler_info))

    engine = asyncio.ensure_future(run_engine(options(port), on_ready=hook))
    await until(lambda: not can_bind(port + 1), within_s=30)
    engine.cancel()
    await asyncio.wait([engine])
    assert engine.cancelled()
    [(ranks, server_args, scheduler_info)] = heard
    assert (ranks, server_args["dp_size"], scheduler_info["status"]) == (2, 2, "ready")
    assert_nothing_left(temporary, port)


async def test_a_hook_that_raises_leaves_nothing(temporary: Path) -> None:
    port = free_ports(OFFSETS)

    async def hook(manager: Scheduler, server_args: Facts, scheduler_info: Facts) -> None:
        raise HookBroke

    with pytest.raises(HookBroke):
        await run_engine(options(port), on_ready=hook)
    assert_nothing_left(temporary, port)


async def test_a_hook_under_which_a_rank_dies_leaves_nothing(temporary: Path) -> None:
    port = free_ports(OFFSETS)

    async def hook(manager: Scheduler, server_args: Facts, scheduler_info: Facts) -> None:
        os.kill(manager.ranks[1].pid, signal.SIGKILL)
        await manager.flush(timeout_s=10)

    with pytest.raises(SchedulerDied, match="rank 1 died: killed by SIGKILL"):
        await run_engine(options(port), on_ready=hook)
    assert_nothing_left(temporary, port)


@pytest.mark.parametrize("offset", OFFSETS)
async def test_a_port_that_is_taken_leaves_nothing(temporary: Path, offset: int) -> None:
    """Nobody looked at the ports before: each is missed where it is opened."""
    port = free_ports(OFFSETS)
    with socket.socket() as other:
        other.bind(("127.0.0.1", port + offset))
        other.listen()
        with pytest.raises(PortInUse) as caught:
            await run_engine(options(port))
        assert caught.value.port == port + offset
        assert_nothing_left(temporary, port, taken=port + offset)


async def test_a_port_that_another_step_of_the_start_took_leaves_nothing(temporary: Path) -> None:
    """The sidecar is told to open the port that rank 0 has for its events."""
    port = free_ports(OFFSETS)
    with pytest.raises(PortInUse) as caught:
        await run_engine(options(port, sidecar_port=port + 10))
    assert (caught.value.port, caught.value.option) == (port + 10, "--grpc-http-sidecar-port")
    assert_nothing_left(temporary, port)


async def test_a_model_that_is_missing_leaves_nothing(temporary: Path) -> None:
    port = free_ports(OFFSETS)
    with pytest.raises(ModelMissing):
        await run_engine(options(port, model="/nowhere.gguf"))
    assert_nothing_left(temporary, port)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_rank_that_dies_while_it_starts_leaves_nothing(temporary: Path, number: signal.Signals) -> None:
    port = free_ports(OFFSETS)
    engine = asyncio.ensure_future(run_engine(options(port)))
    await until(lambda: len(ranks_of_this_process()) == 2, within_s=20)
    os.kill(ranks_of_this_process()[0], number)
    with pytest.raises(StartFailed, match="did not start"):
        await engine
    assert_nothing_left(temporary, port)


async def test_a_caller_that_gives_up_while_it_starts_leaves_nothing(temporary: Path) -> None:
    port = free_ports(OFFSETS)
    engine = asyncio.ensure_future(run_engine(options(port)))
    await until(lambda: len(ranks_of_this_process()) == 2, within_s=20)
    engine.cancel()
    await asyncio.wait([engine])
    assert engine.cancelled()
    assert_nothing_left(temporary, port)


async def test_a_hook_that_never_ends_is_given_up(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_ports(OFFSETS)
    monkeypatch.setattr("kvherd.cli.engine.ON_READY_WITHIN_S", 0.2)

    async def hook(manager: Scheduler, server_args: Facts, scheduler_info: Facts) -> None:
        await asyncio.Event().wait()

    with pytest.raises(StartFailed, match=r"on_ready did not start: it was not done within 0\.2 s"):
        await run_engine(options(port), on_ready=hook)
    assert_nothing_left(temporary, port)
