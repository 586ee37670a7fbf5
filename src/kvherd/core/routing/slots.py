"""How long a request waits for a slot: a place among those that an engine computes together.

An engine that has none left lets a request wait however little there is to compute of its prompt. Answers are taken to
end at chance: with all slots in use, one after the other, each a slot's time divided by the slots after the last.
"""

from typing import Final

UNTAUGHT_S: Final = 5.0
"""For how long a request keeps its slot, at the least, where no answer has shown it: some two hundred tokens."""

_SMOOTHING: Final = 0.1
"""Answers differ in length by much more than prefill rates do."""


def slot_wait_s(ahead: int, slots: int, slot_s: float) -> float:
    """Seconds until a request has a slot, with `ahead` others there and each slot kept for `slot_s`.

    0 while one is free, and where how many there are is not known (`slots` 0).
    """
    before = ahead - slots + 1
    return before * slot_s / slots if slots > 0 and before > 0 else 0.0


class SlotTime:
    """How long a request keeps its slot at one worker while all are in use, smoothed.

    Until that was seen it is as at its peers, and until it was seen there, no less than an answer took among fewer:
    an engine computes a few faster than many.
    """

    def __init__(self) -> None:
        self.peers: SlotTime | None = None
        """Of all workers together."""
        self._full_s = self._fewer_s = 0.0
        self._answers = 0

    @property
    def unknown(self) -> bool:
        """Nobody has seen it, here or at its peers."""
        return self._answers == 0 and (self.peers is None or self.peers.unknown)

    @property
    def seconds(self) -> float:
        if self._answers:
            return self._full_s
        return self.peers.seconds if self.peers is not None else max(UNTAUGHT_S, self._fewer_s)

    def observe(self, seconds: float, ahead: int, slots: int) -> None:
        """A whole answer came so many `seconds` after its request was sent, when `ahead` others were there.

        What it waited is a part of that, by the same rule that says how long others will wait.
        """
        if seconds <= 0.0 or slots <= 0:
            return
        if ahead + 1 < slots:
            self._fewer_s += _SMOOTHING * (seconds - self._fewer_s)
        else:
            self._answers += 1
            kept_s = seconds / (1.0 + slot_wait_s(ahead, slots, 1.0))
            self._full_s += max(_SMOOTHING, 1.0 / self._answers) * (kept_s - self._full_s)
        if self.peers is not None:
            self.peers.observe(seconds, ahead, slots)
