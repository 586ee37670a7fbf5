"""What a fake source of KV events needs beside its `subscribe`."""

from types import TracebackType
from typing import Self


class OpenFeed:
    """Entered and left without any effect, as a source that holds nothing between subscriptions."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass
