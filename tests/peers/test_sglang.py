"""A stock SGLang on a CPU, with `kvherd bridge`, and gateways that follow the bridge and SGLang's own sockets.

`make test-sglang` installs it and runs these tests.
"""

from collections.abc import Iterator

import pytest

from kvherd.testing.processes import free_ports
from kvherd.testing.stock_engines import sglang
from kvherd.testing.stock_herds import StockHerd, stock_herd
from kvherd.testing.stock_story import StockStory

pytestmark = [pytest.mark.peers, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def herd() -> Iterator[StockHerd]:
    port = free_ports((0, 1, 2))
    server = sglang(port, events=f"tcp://127.0.0.1:{port + 1}", replay=f"tcp://127.0.0.1:{port + 2}")
    with stock_herd(server) as herd:
        yield herd


class TestSglang(StockStory):
    kind = "sglang-http"
    block_size = 16
