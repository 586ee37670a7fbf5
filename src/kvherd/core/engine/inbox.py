"""What has come of one generation and was not read yet.

A reader that is slow finds one delta with everything in it: what waits for a reader is bounded by the tokens of one
answer, however slow it is, and nothing is lost.
"""

from dataclasses import replace

from kvherd.core.engine.generation import TokenDelta


def merged(earlier: TokenDelta, later: TokenDelta) -> TokenDelta:
    """One delta that tells what the two tell one after the other."""
    return replace(
        later,
        token_ids=earlier.token_ids + later.token_ids,
        logprobs=earlier.logprobs + later.logprobs,
        finish=later.finish or earlier.finish,
    )


class Inbox:
    """Deltas in, deltas out, in order. After the one with `finish` nothing is taken in."""

    def __init__(self, prompt_tokens: int) -> None:
        self._waiting: TokenDelta | None = None
        self._latest = TokenDelta((), prompt_tokens, 0, 0)
        self.finished = False

    @property
    def latest(self) -> TokenDelta:
        """The counts of the last delta that came."""
        return self._latest

    def put(self, delta: TokenDelta) -> None:
        if self.finished:
            return
        self.finished = delta.finish is not None
        self._latest = delta
        self._waiting = delta if self._waiting is None else merged(self._waiting, delta)

    def take(self) -> TokenDelta | None:
        """What came since the last call; None if nothing did."""
        waiting, self._waiting = self._waiting, None
        return waiting
