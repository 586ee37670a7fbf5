"""What tests with real processes need: conditions with a deadline, free ports, and who is alive."""

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path


def wait_until(condition: Callable[[], bool], *, within_s: float, what: str) -> None:
    """Return as soon as `condition()` holds; raise AssertionError naming `what` if it does not in time."""
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {within_s:g} s: {what}"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that ended and is not yet reaped does not."""
    try:
        os.kill(pid, 0)
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
