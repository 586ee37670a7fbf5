"""What a relay may rely on from one rank's publisher of KV events."""

from contextlib import AbstractAsyncContextManager
from typing import Protocol

from kvherd.core.kv.frames import Connected, Disconnected, Received, Replayed


class FrameFeed(AbstractAsyncContextManager["FrameFeed"], Protocol):
    """One rank's publisher: live frames, and replays of past ones. Entering it opens it, leaving it closes it.

    Frames may be lost and come from a publisher that was restarted in between; `Connected` is told before the first
    frame of every new connection, and frames that were queued when it was made are thrown away. While there is no
    connection, or several publishers at once, no frame is given: `Disconnected` says so.
    """

    @property
    def can_replay(self) -> bool: ...

    @property
    def bad_frames(self) -> int:
        """Messages of no known form so far, which were passed over."""
        ...

    async def next(self, *, within_s: float) -> Received | Connected | Disconnected | None:
        """The next thing that happens, or None if nothing does in time. Safe to cancel: nothing is lost by it."""
        ...

    async def replay(self, start: int, *, silence_s: float) -> Replayed:
        """Ask for the frames from `start` on, and give as many as come without a hole, at most a bounded number.

        Ends when the publisher says so, at a hole, at the bound, or after `silence_s` without a frame. Never raises.
        """
        ...
