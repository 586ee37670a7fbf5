"""What tests with real processes need: commands that leave nothing behind unseen, conditions with a deadline, ports."""

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

MARK = "KVHERD_TEST_MARK"
ENGINE_OFFSETS = (0, 1, 2, 10, 30)


def wait_until(condition: Callable[[], bool], *, within_s: float, what: str) -> None:
    """Return as soon as `condition()` holds; raise AssertionError naming `what` if it does not in time."""
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {within_s:g} s: {what}"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that ended and is not yet reaped does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (ProcessLookupError, FileNotFoundError):
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


def can_bind(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def free_ports(offsets: Iterable[int] = ENGINE_OFFSETS) -> int:
    """A port below the kernel's own choices that is free, as are those at the offsets from it."""
    wanted = tuple(offsets)
    for _ in range(1000):
        base = random.randrange(12_000, 31_000, 2)
        if all(can_bind(base + offset) for offset in wanted):
            return base
    raise AssertionError("no free ports")


class OwnedProcess:
    """A command as a process; leaving it kills whatever descends from it and removes its folder.

    Its log, its state and its temporary files are in a folder of its own, so that what it forgot can be seen.
    `says_to`: a descriptor that gets its output and its errors; then it has said nothing.
    """

    def __init__(
        self, command: Sequence[str], *, environment: Mapping[str, str] | None = None, says_to: int | None = None
    ) -> None:
        self.command = tuple(command)
        # Short, because the path of a Unix socket may have 107 bytes only.
        self.folder = Path(tempfile.mkdtemp(prefix="kht-", dir="/tmp"))
        self.temporary = self.folder / "tmp"
        self.temporary.mkdir()
        self.output = self.folder / "output"
        self._mark = uuid.uuid4().hex
        places = {"TMPDIR": str(self.temporary), "XDG_STATE_HOME": str(self.folder / "state")}
        # A title set by setproctitle would overwrite the environment, and with it the mark.
        marks = {MARK: self._mark, "SPT_NOENV": "1"}
        with self.output.open("wb") as output:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output if says_to is None else says_to,
                stderr=subprocess.STDOUT,
                env=os.environ | places | dict(environment or {}) | marks,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            error.add_note(f"{' '.join(self.command)} said:\n{self.said}")
        for pid in self.family():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait(timeout=10)
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def said(self) -> str:
        return self.output.read_text(errors="replace")

    def family(self) -> set[int]:
        """Every process that runs and descends from this command, itself included, whoever its parent is now."""
        wanted = f"{MARK}={self._mark}".encode()
        found = set()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):
                    if wanted in (entry / "environ").read_bytes().split(b"\0") and is_alive(int(entry.name)):
                        found.add(int(entry.name))
        return found

    def member(self, word: str) -> int:
        """The one process of the family with `word` in its command line."""
        found = [pid for pid in self.family() if word in command_line(pid)]
        assert len(found) == 1, f"{len(found)} processes with {word!r}: {[command_line(pid) for pid in self.family()]}"
        return found[0]

    def kill_member(self, word: str) -> None:
        os.kill(self.member(word), signal.SIGKILL)

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self, *, within_s: float) -> int:
        """The exit status; AssertionError with what it said if it does not end in time."""
        try:
            return self._process.wait(timeout=within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {within_s:g} s:\n{self.said}") from None

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def wait_for(self, condition: Callable[[], bool], *, within_s: float = 60.0, what: str) -> None:
        """`wait_until`, given up at once when the process ends."""

        def holds() -> bool:
            assert not self.has_ended(), f"ended before {what}:\n{self.said}"
            return condition()

        wait_until(holds, within_s=within_s, what=what)

    def assert_nothing_left(self, *, ports: Iterable[int] = (), within_s: float = 5.0) -> None:
        """Neither a process, nor a port, nor a temporary file."""
        wait_until(lambda: not self.family(), within_s=within_s, what=f"no process of {self.command} is left")
        taken = [port for port in ports if not can_bind(port)]
        assert taken == []
        assert [path.name for path in self.temporary.iterdir()] == []


class KvherdProcess(OwnedProcess):
    """A `kvherd` command."""

    def __init__(self, *words: str, says_to: int | None = None) -> None:
        super().__init__([sys.executable, "-m", "kvherd.cli.main", *words], says_to=says_to)


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
