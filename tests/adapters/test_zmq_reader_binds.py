"""A reader of KV events that listens takes nobody's place."""

from collections.abc import Iterator
from socket import AF_UNIX, SOCK_STREAM, socket
from tempfile import TemporaryDirectory

import pytest

from kvherd.adapters.zmq_kv_feed import ZmqFrameFeed
from kvherd.core.errors import StartFailed
from kvherd.core.kv.frames import Connected
from kvherd.testing.publisher import FakePublisher

pytestmark = pytest.mark.net


@pytest.fixture
def endpoint() -> Iterator[str]:
    # Short, because the path of a Unix socket may have 107 bytes only.
    with TemporaryDirectory(prefix="kht-", dir="/tmp") as folder:
        yield f"ipc://{folder}/events"


async def test_a_path_where_an_engine_listens_is_left_to_it(endpoint: str) -> None:
    async with FakePublisher(events_endpoint=endpoint):
        with pytest.raises(StartFailed, match="in use"):
            await ZmqFrameFeed(endpoint, bind_events=True).__aenter__()
        async with ZmqFrameFeed(endpoint) as feed:
            assert isinstance(await feed.next(within_s=10), Connected)


async def test_a_path_that_someone_left_behind_is_taken(endpoint: str) -> None:
    with socket(AF_UNIX, SOCK_STREAM) as gone:
        gone.bind(endpoint.removeprefix("ipc://"))
    async with ZmqFrameFeed(endpoint, bind_events=True), FakePublisher(events_endpoint=endpoint, connects=True):
        pass
