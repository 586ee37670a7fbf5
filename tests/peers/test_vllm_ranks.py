"""A stock vLLM with two data-parallel ranks, which connect to whoever reads their events.

`make test-vllm` installs it and runs these tests.
"""

from collections.abc import Iterator

import pytest

from kvherd.testing.doctors import running
from kvherd.testing.processes import free_ports
from kvherd.testing.stock_engines import StockServer, vllm
from kvherd.testing.stock_ranks import StockTalks

pytestmark = [pytest.mark.peers, pytest.mark.timeout(1200)]


@pytest.fixture(scope="class")
def server() -> Iterator[StockServer]:
    port = free_ports((0, 1, 2, 3, 4))
    with running(
        vllm(port, events=f"tcp://127.0.0.1:{port + 1}", replay=f"tcp://127.0.0.1:{port + 3}", ranks=2)
    ) as one:
        yield one


class TestVllmRanks(StockTalks):
    ranks = 2
