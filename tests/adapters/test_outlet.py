"""Lines to whoever reads them, and no waiting for those who do not."""

import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from kvherd.adapters.outlet import Outlet

LINES = b"".join(b"%06d %b\n" % (number, b"x" * 92) for number in range(3000))
assert len(LINES) == 300_000

Ends = tuple[int, int]


def of_a_pipe(stack: ExitStack) -> Ends:
    ends = os.pipe()
    for end in ends:
        stack.callback(os.close, end)
    return ends


def of_a_pipe_that_cannot_be_opened_anew(stack: ExitStack) -> Ends:
    def refuse(*_: object) -> int:
        raise PermissionError

    patch = stack.enter_context(pytest.MonkeyPatch.context())
    patch.setattr("kvherd.adapters.outlet.os.open", refuse)
    return of_a_pipe(stack)


def of_sockets(stack: ExitStack) -> Ends:
    one, other = socket.socketpair()
    return stack.enter_context(one).fileno(), stack.enter_context(other).fileno()


@pytest.fixture(params=[of_a_pipe, of_a_pipe_that_cannot_be_opened_anew, of_sockets])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    """To read from and to write to; whoever writes to the latter by himself waits."""
    begin: Callable[[ExitStack], Ends] = request.param
    with ExitStack() as stack:
        yield begin(stack)


def test_what_nobody_reads_waits_and_is_whole_and_in_order_once_somebody_does(ends: Ends) -> None:
    reads, writes = ends
    outlet = Outlet(writes)
    for at in range(0, len(LINES), 10_000):
        outlet.write(LINES[at : at + 10_000])
    assert 0 < outlet.waiting_bytes < len(LINES)
    assert outlet.waiting_lines == pytest.approx(outlet.waiting_bytes / 100, abs=1)
    got = b""
    while len(got) < len(LINES):
        got += os.read(reads, 65536)
        outlet.write()
    assert got == LINES
    assert (outlet.waiting_bytes, outlet.waiting_lines) == (0, 0)
    outlet.close()
    assert os.get_blocking(writes), "others who have it find it as it was"


def test_a_reader_that_is_gone_is_an_error_and_nothing_waits_for_him() -> None:
    reads, writes = os.pipe()
    outlet = Outlet(writes)
    try:
        outlet.write(LINES)
        os.close(reads)
        with pytest.raises(BrokenPipeError):
            outlet.write(b"more\n")
        assert outlet.waiting_bytes == 0
    finally:
        outlet.close()
        os.close(writes)


def test_a_pipe_with_room_for_little_gets_what_fits() -> None:
    with ExitStack() as stack:
        reads, writes = of_a_pipe_that_cannot_be_opened_anew(stack)
        fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, 4096)
        outlet = Outlet(writes)
        outlet.write(LINES)
        assert outlet.waiting_bytes == len(LINES) - 4096
        assert os.read(reads, 4096) == LINES[:4096]
