"""What a follower does when its stream ends: one row a kind of end."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kvherd.core.kv.stream import (
    EpochEnded,
    EventsUnsupported,
    KvStreamError,
    ResumeOutOfRange,
    StreamForbidden,
    StreamUntranslatable,
    SubscriberTooSlow,
)


class FollowState(StrEnum):
    """How well a worker's cache is known."""

    SUBSCRIBING = "subscribing"  # not yet
    LIVE = "live"  # as its events tell it
    REPLAYING = "replaying"  # being told again; what is known may be behind
    QUARANTINED = "quarantined"  # not; it gets no credit until it is told again
    UNSUPPORTED = "unsupported"  # it publishes no events


class Pause(StrEnum):
    """How soon to subscribe again."""

    NONE = "none"
    BACK_OFF = "back off"
    LONG = "long"


@dataclass(frozen=True, slots=True)
class Reaction:
    """`forget`: all that is known is void, and `state` is what the worker is in until it is subscribed to again."""

    forget: bool
    pause: Pause
    state: FollowState


_START_OVER: Final = Reaction(forget=True, pause=Pause.NONE, state=FollowState.SUBSCRIBING)
_FAIL_CLOSED: Final = Reaction(forget=True, pause=Pause.LONG, state=FollowState.QUARANTINED)
_DO_WITHOUT: Final = Reaction(forget=True, pause=Pause.LONG, state=FollowState.UNSUPPORTED)
_RESUME: Final = Reaction(forget=False, pause=Pause.BACK_OFF, state=FollowState.SUBSCRIBING)


def reaction_to(end: KvStreamError) -> Reaction:
    """What this end asks for; a broken connection proves nothing about the state, so it is resumed from."""
    match end:
        case EventsUnsupported():
            return _DO_WITHOUT
        case ResumeOutOfRange() | EpochEnded() | SubscriberTooSlow():
            return _START_OVER
        case StreamForbidden() | StreamUntranslatable():
            return _FAIL_CLOSED
        case _:
            return _RESUME


@dataclass(slots=True)
class BackOff:
    """Pauses that double while nothing succeeds; `dice` in 0..1 takes up to half away, so that a fleet spreads out."""

    first_s: float
    most_s: float
    failures: int = 0

    def pause_s(self, dice: float) -> float:
        pause = min(self.most_s, self.first_s * 2.0 ** min(self.failures, 30))
        self.failures += 1
        return pause * (1 - dice / 2)

    def succeeded(self) -> None:
        self.failures = 0
