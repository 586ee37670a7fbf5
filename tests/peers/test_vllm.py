"""A stock vLLM on a CPU, with `kvherd bridge`, and gateways that follow the bridge and vLLM's own sockets.

`make test-vllm` installs it and runs these tests.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvherd.testing.processes import free_ports
from kvherd.testing.stock_engines import vllm
from kvherd.testing.stock_herds import StockHerd, stock_herd
from kvherd.testing.stock_story import StockStory

pytestmark = [pytest.mark.peers, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def herd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StockHerd]:
    sockets: Path = tmp_path_factory.mktemp("v")
    server = vllm(free_ports((0,)), events=f"ipc://{sockets}/events", replay=f"ipc://{sockets}/replay")
    with stock_herd(server) as herd:
        yield herd


class TestVllm(StockStory):
    kind = "vllm-http"
    block_size = 32
