"""What a fake source of KV events needs beside its `subscribe`, and a follower that follows none."""

from types import TracebackType
from typing import Self

from kvherd.core.ids import WorkerId


class OpenFeed:
    """Entered and left without any effect, as a source that holds nothing between subscriptions."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class NoFollowing:
    """What a fleet needs of who follows the KV events of its workers, where nobody does."""

    def add(self, worker: WorkerId, feed: object, *, model: str) -> None:
        pass

    def remove(self, worker: WorkerId) -> None:
        pass

    def returned(self, worker: WorkerId) -> None:
        pass
