"""What ends a process, and that its work cleans up before it does."""

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

pytestmark = pytest.mark.engine

HANGING_UP = "import signal; signal.signal(signal.SIGHUP, signal.%s)\n"
PROGRAM = """
import asyncio, sys
from kvherd.cli.lifetime import until_stopped

async def work():
    try:
        print("up", flush=True)
        if sys.argv[1] == "fails":
            raise ValueError("no luck")
        await asyncio.sleep(60)
    finally:
        try:
            async with asyncio.timeout(0.01):
                await asyncio.sleep(60)
        except TimeoutError:
            print("clean", asyncio.current_task().cancelling(), flush=True)

asyncio.run(until_stopped(work(), supervised=sys.argv[1] == "supervised"))
print("done", flush=True)
"""


def start(mode: str, stdin: int = subprocess.PIPE, *, ignoring: str = "") -> "subprocess.Popen[str]":
    """With `ignoring` it is begun as by nohup, and otherwise not, even where these tests are."""
    return subprocess.Popen(
        [sys.executable, "-c", HANGING_UP % ("SIG_IGN" if ignoring else "SIG_DFL") + PROGRAM, mode],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_work_clean_up_and_ends_with_0(number: signal.Signals) -> None:
    with start("alone") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(number)
        said, _ = process.communicate(timeout=10)
    assert said == "clean 0\ndone\n"
    assert process.returncode == 0


@pytest.fixture
def terminal() -> Iterator[int]:
    """What a process begun at a terminal reads from."""
    ours, theirs = pty.openpty()
    yield theirs
    os.close(ours)
    os.close(theirs)


def test_a_terminal_that_is_gone_ends_what_was_begun_there(terminal: int) -> None:
    with start("alone", terminal) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGHUP)
        said, _ = process.communicate(timeout=10)
    assert (said, process.returncode) == ("clean 0\ndone\n", 0)


@pytest.mark.parametrize("ignoring", ["", "SIGHUP"])
def test_a_process_without_a_terminal_or_under_nohup_lives_on(terminal: int, ignoring: str) -> None:
    with start("alone", terminal if ignoring else subprocess.PIPE, ignoring=ignoring) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=10)
    assert (said, process.returncode) == ("clean 0\ndone\n", 0)


def test_the_end_of_standard_input_ends_a_supervised_process() -> None:
    with start("supervised") as process:
        said, _ = process.communicate(timeout=10)
    assert said == "up\nclean 0\ndone\n"
    assert process.returncode == 0


def test_a_failure_of_the_work_is_not_swallowed() -> None:
    with start("fails") as process:
        said, complaint = process.communicate(timeout=10)
    assert said == "up\nclean 0\n"
    assert "ValueError: no luck" in complaint
    assert process.returncode == 1
