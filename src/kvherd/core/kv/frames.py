"""What happens to one rank's publisher of KV events, and what is to be done about it: the words of `core/kv/feed`."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Frame:
    """A batch as it was published: its number and its bytes, not yet decoded."""

    sequence: int
    payload: bytes = field(repr=False)

    @property
    def mark(self) -> int:
        return hash(self.payload)


# --- what happens ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Received:
    """A live frame came."""

    frame: Frame


@dataclass(frozen=True, slots=True)
class Connected:
    """A connection to a publisher was made, for the first time or anew; frames queued before it were thrown away."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """There is no connection to one publisher now; frames that were queued, and those that come, are thrown away."""

    reason: str


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing came for a while: the last frames may have been lost without a later one to show it."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """The answer to `AskReplay`. `ended`: the publisher said that there is no more; else it fell silent or was cut."""

    frames: tuple[Frame, ...]
    ended: bool


@dataclass(frozen=True, slots=True)
class Replaced:
    """The publisher's process is a new one, says who started it."""


FeedEvent = Received | Connected | Disconnected | Idle | Replayed | Replaced

# --- what to do --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Forward:
    """Pass this frame on."""

    frame: Frame


@dataclass(frozen=True, slots=True)
class AskReplay:
    """Ask the publisher for everything from this number on, then tell `Replayed`, before any other event."""

    start: int


@dataclass(frozen=True, slots=True)
class EndLife:
    """All that was forwarded is void; the frames that follow belong to a new life."""

    reason: str


@dataclass(frozen=True, slots=True)
class BeginLife:
    """The first frame of this life follows, or nothing was published yet; `unknown_before` frames were never seen."""

    unknown_before: int


Instruction = Forward | AskReplay | EndLife | BeginLife
