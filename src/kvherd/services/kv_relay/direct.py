"""An engine's own KV events, followed without a bridge: for networks where its sockets may be reached and trusted.

The gaps, restarts and proofs are the relay's, as in the bridge; only the hop over gRPC is missing, and with it the
cost of its messages. Nothing is known of what happened before this feed was entered, beyond the engine's replay.
"""

from collections.abc import AsyncGenerator, Callable, Mapping
from types import TracebackType
from typing import Self

from kvherd.core.ids import Epoch, Rank
from kvherd.ports.kv_feed import FeedItem, Subscribed
from kvherd.ports.kv_frames import FrameFeed
from kvherd.services.kv_relay.relay import KvRelay, RelayOptions


class DirectKvFeed:
    """Implements `KvFeed` with a relay that lives as long as its context.

    `open_frames` makes a reader for each rank.
    """

    def __init__(
        self, open_frames: Callable[[], Mapping[Rank, FrameFeed]], *, options: RelayOptions | None = None
    ) -> None:
        self._open_frames = open_frames
        self._options = options

    async def __aenter__(self) -> Self:
        self._relay = await KvRelay(self._open_frames(), options=self._options).__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._relay.__aexit__(kind, error, trace)

    async def subscribe(self, cursors: dict[Rank, int], epoch: Epoch | None) -> AsyncGenerator[FeedItem, None]:
        subscription = self._relay.subscribe(cursors=cursors, epoch=epoch)
        yield Subscribed(subscription.epoch)
        async for item in subscription:
            yield item
