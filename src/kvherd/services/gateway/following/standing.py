"""What may be believed of what is known of one worker's cache."""

import math
from collections.abc import Callable
from typing import Final

from kvherd.core.kv.reactions import FollowState
from kvherd.core.routing.candidate import KvKnowledge
from kvherd.services.gateway.following.follow_stream import Following

_LIVE: Final = FollowState.LIVE
_KNOWN: Final = KvKnowledge.KNOWN
_QUARANTINED: Final = KvKnowledge.QUARANTINED
_UNTOLD: Final = KvKnowledge.UNTOLD


class Standing:
    """Kept by who follows the worker, and asked for every worker at every request: a plain class, for it is compiled.

    `told` is the state that the stream is in. `broken_s`: when its connection broke, None while there is one; what is
    known is believed for `grace_s` more. `accepted_s`: when its epoch began here; for `settle_s` from then on it may
    turn out that something happened before it.
    """

    __slots__ = ("_clock", "_following", "_grace_s", "_settle_s", "_settled", "accepted_s", "broken_s", "told")

    def __init__(self, following: Following, clock: Callable[[], float], *, grace_s: float, settle_s: float) -> None:
        self._following = following
        self._clock = clock
        self._grace_s = grace_s
        self._settle_s = settle_s
        self._settled = False
        self.told = FollowState.SUBSCRIBING
        self.broken_s: float | None = None
        self.accepted_s = -math.inf

    def take(self, told: FollowState) -> None:
        """Its stream is in this state, and its connection whole or of no matter."""
        self.told, self.broken_s = told, None

    def accepted(self) -> None:
        """Its epoch begins now."""
        self.accepted_s, self._settled = self._clock(), False

    @property
    def state(self) -> FollowState:
        """What outlived its connection for too long is quarantined by the clock alone."""
        if self.broken_s is not None and self._clock() - self.broken_s >= self._grace_s:
            return FollowState.QUARANTINED
        return self.told

    @property
    def knowledge(self) -> KvKnowledge:
        """The same, as routing puts it."""
        if self.told is _LIVE and self.broken_s is None:  # nearly always
            return _KNOWN
        state = self.state
        if state is _LIVE:
            return _KNOWN
        return _UNTOLD if state is FollowState.UNSUPPORTED else _QUARANTINED

    @property
    def incomplete(self) -> bool:
        """Whether the worker may hold blocks that nobody told of: what is believed is true, and may lack some."""
        return self._following.incomplete

    @property
    def settling(self) -> bool:
        """Whether its epoch has just begun here: that something happened before it may not be known yet."""
        if self._settled:
            return False
        self._settled = self._clock() - self.accepted_s >= self._settle_s
        return not self._settled
