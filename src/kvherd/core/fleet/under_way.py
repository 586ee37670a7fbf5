"""What is under way at a worker: by our count, and by its own."""

from typing import Final, NamedTuple

from kvherd.core.ids import Rank


class UnderWay:
    """A request at a worker. `since_s` is by the caller's clock; `ahead` others were there before it, and there were
    `slots` for them all, 0 if unknown.
    """

    __slots__ = ("ahead", "prompt_tokens", "rank", "since_s", "slots")

    def __init__(
        self, prompt_tokens: int, since_s: float, rank: Rank | None = None, ahead: int = 0, slots: int = 0
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.since_s = since_s
        self.rank = rank
        self.ahead = ahead
        self.slots = slots

    @property
    def queued(self) -> bool:
        """It found no slot free."""
        return 0 < self.slots <= self.ahead


class Share(NamedTuple):
    """What one rank of a worker said that it does."""

    running: int
    waiting: int
    used_tokens: int


NO_SHARE: Final = Share(0, 0, 0)
