"""Real processes on the tiny model. Whatever a test starts is gone when it ends, however it ends."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvherd.testing.doors import Door, open_door
from kvherd.testing.herds import BeginOdd, HerdProcess, OddWorkerProcess, Start, begin_herd
from kvherd.testing.processes import KvherdProcess, OwnedProcess, free_ports


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts `kvherd` commands."""
    with ExitStack() as stack:
        yield lambda *words: stack.enter_context(KvherdProcess(*words))


@pytest.fixture
def begin() -> Iterator[BeginOdd]:
    """Starts workers of `kvherd.testing.odd_worker`, and waits until they listen."""
    with ExitStack() as stack:

        def odd(mood: str, port: int | None = None) -> OddWorkerProcess:
            chosen = port or free_ports((0,))
            command = [sys.executable, "-m", "kvherd.testing.odd_worker", str(chosen), mood]
            worker = OddWorkerProcess(stack.enter_context(OwnedProcess(command)), chosen)
            worker.process.wait_for(lambda: "listening" in worker.process.said, what="the worker listens")
            return worker

        yield odd


@pytest.fixture(scope="module")
def herd() -> Iterator[HerdProcess]:
    """A herd that is up, for tests that leave it as they found it."""
    with ExitStack() as stack:
        herd = begin_herd(lambda *words: stack.enter_context(KvherdProcess(*words)))
        herd.process.wait_for(lambda: herd.is_up, what="the herd is up")
        yield herd


@pytest.fixture(scope="module", params=["grpc", "http"])
def door(request: pytest.FixtureRequest) -> Iterator[Door]:
    """A gateway over one engine, in turn of either kind."""
    with open_door(request.param) as door:
        yield door
