"""A stock SGLang with two data-parallel ranks, and one with pages of one token, its default on CUDA.

`make test-sglang` installs it and runs these tests.
"""

from collections.abc import Iterator

import pytest

from kvherd.testing.doctors import running
from kvherd.testing.processes import free_ports
from kvherd.testing.stock_engines import StockServer, sglang
from kvherd.testing.stock_ranks import StockTalks

pytestmark = [pytest.mark.peers, pytest.mark.timeout(600)]


class TestSglangRanks(StockTalks):
    ranks = 2

    @pytest.fixture(scope="class")
    def server(self) -> Iterator[StockServer]:
        port = free_ports((0, 1, 2, 3, 4))
        events, replay = f"tcp://127.0.0.1:{port + 1}", f"tcp://127.0.0.1:{port + 3}"
        with running(sglang(port, events=events, replay=replay, ranks=2)) as one:
            yield one


class TestSglangOneTokenPages(StockTalks):
    block = 16

    @pytest.fixture(scope="class")
    def server(self) -> Iterator[StockServer]:
        port = free_ports((0, 1, 2))
        events, replay = f"tcp://127.0.0.1:{port + 1}", f"tcp://127.0.0.1:{port + 2}"
        with running(sglang(port, events=events, replay=replay, page_size=1)) as one:
            yield one
