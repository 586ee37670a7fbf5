"""A stock SGLang with two data-parallel ranks, and one with pages of one token, its default on CUDA.

`make test-sglang` installs it and runs these tests.
"""

from collections.abc import Iterator

import pytest

from kvherd.testing.doctors import running
from kvherd.testing.processes import free_ports
from kvherd.testing.stock_engines import StockServer, sglang
from kvherd.testing.stock_ranks import StockTalks

pytestmark = [pytest.mark.peers, pytest.mark.timeout(1200)]


@pytest.fixture(scope="class")
def server(request: pytest.FixtureRequest) -> Iterator[StockServer]:
    talks: type[SglangTalks] = request.cls
    port = free_ports((0, 1, 2, 3, 4))
    events, replay = f"tcp://127.0.0.1:{port + 1}", f"tcp://127.0.0.1:{port + 3}"
    with running(sglang(port, events=events, replay=replay, ranks=talks.ranks, page_size=talks.page_size)) as one:
        yield one


class SglangTalks(StockTalks):
    page_size = 16


class TestSglangRanks(SglangTalks):
    ranks = 2


class TestSglangOneTokenPages(SglangTalks):
    page_size = 1
    block = 16
