"""Parts as child processes: what they are told, what is heard of them, and that none is left."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvherd.cli.up_supervisor import Child, Part, Supervisor
from kvherd.core.errors import StartFailed
from kvherd.testing.processes import is_alive, wait_until

pytestmark = pytest.mark.engine

OBEDIENT = "import sys; print('hello', flush=True); sys.stdin.read(); print('bye')"
DEAF = (
    "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
)


class Herd:
    """Collects what the supervisor tells."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines: list[tuple[str, str]] = []
        self.ready: list[str] = []

    def supervisor(self, *, grace_s: float = 5.0) -> Supervisor:
        return Supervisor(on_line=lambda child, line: self.lines.append((child.part.name, line)), grace_s=grace_s)

    def part(self, name: str, program: str, *, answers: Callable[[], bool] | None = None) -> Part:
        said_something = lambda: any(of == name for of, _ in self.lines)  # noqa: E731
        return Part(name, (sys.executable, "-c", program), self.folder / f"{name}.log", answers or said_something)

    def took(self, child: Child) -> None:
        self.ready.append(child.part.name)


@pytest.fixture
def herd(tmp_path: Path) -> Herd:
    return Herd(tmp_path)


async def test_parts_are_ready_when_each_answers_and_gone_at_the_end(herd: Herd) -> None:
    async with herd.supervisor() as supervisor:
        children = [await supervisor.start(herd.part(name, OBEDIENT)) for name in ("a", "b")]
        await supervisor.wait_ready(children, deadline_s=20, ready=herd.took)
        assert sorted(herd.ready) == ["a", "b"]
    assert not any(is_alive(child.process.pid) for child in children)
    assert (herd.folder / "a.log").read_text() == "hello\n"


async def test_a_part_that_cannot_start_is_told_in_its_own_last_words(herd: Herd) -> None:
    program = "import sys; print('INFO x'); print('kvherd: port 1 is in use'); print('bye'); sys.exit(1)"
    async with herd.supervisor() as supervisor:
        good = await supervisor.start(herd.part("good", OBEDIENT))
        bad = await supervisor.start(herd.part("bad", program, answers=lambda: False))
        with pytest.raises(StartFailed) as failed:
            await supervisor.wait_ready([good, bad], deadline_s=20, ready=herd.took)
    assert failed.value.part == "bad"
    assert failed.value.reason == f"port 1 is in use (exit code 1; log: {herd.folder / 'bad.log'})"
    assert not is_alive(good.process.pid)


async def test_a_part_that_never_answers_is_given_up_at_the_deadline(herd: Herd) -> None:
    async with herd.supervisor() as supervisor:
        child = await supervisor.start(herd.part("slow", OBEDIENT, answers=lambda: False))
        with pytest.raises(StartFailed, match=r"slow did not start: no answer within 0\.2 s"):
            await supervisor.wait_ready([child], deadline_s=0.2, ready=herd.took)


async def test_a_part_that_dies_later_is_named_with_the_signal(herd: Herd) -> None:
    async with herd.supervisor() as supervisor:
        child = await supervisor.start(herd.part("a", OBEDIENT))
        await supervisor.wait_ready([child], deadline_s=20, ready=herd.took)
        child.process.kill()
        async with asyncio.timeout(5):
            death = await supervisor.first_death()
    assert str(death).startswith("a died: hello (killed by SIGKILL")


async def test_a_part_that_is_deaf_to_sigterm_is_killed_with_its_own_children(herd: Herd) -> None:
    start_another = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {DEAF!r}])"
    program = f"{start_another}; print(p.pid, flush=True); exec({DEAF!r})"
    async with herd.supervisor(grace_s=0.2) as supervisor:
        child = await supervisor.start(herd.part("deaf", program, answers=lambda: len(herd.lines) == 3))
        await supervisor.wait_ready([child], deadline_s=20, ready=herd.took)
        grandchild = next(int(line) for _, line in herd.lines if line.isdigit())
    assert not is_alive(child.process.pid)
    wait_until(lambda: not is_alive(grandchild), within_s=5, what="the part's own child is gone")


async def test_a_line_without_end_does_not_stop_the_reading(herd: Herd) -> None:
    program = "import sys; sys.stdout.write('x' * 3_000_000 + '\\nhello\\n'); sys.stdout.flush(); sys.stdin.read()"
    async with herd.supervisor() as supervisor:
        child = await supervisor.start(herd.part("a", program, answers=lambda: ("a", "hello") in herd.lines))
        await supervisor.wait_ready([child], deadline_s=20, ready=herd.took)
    assert herd.ready == ["a"]
