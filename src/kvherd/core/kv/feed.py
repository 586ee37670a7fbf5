"""One rank of an engine as a sequence without gaps: frames, replays and reconnections in, instructions out.

The rules:

1. A frame is forwarded once, in order, and only after its predecessor of the same life.
2. Every replay begins at the last frame forwarded. If that frame comes back the same, the sender is the same publisher
   and what follows belongs to the same life; if it comes back different, or the publisher is not as far, this is
   another life.
3. A connection that was made anew proves nothing: until such a replay, nothing is forwarded.
4. A replay comes over another connection than live frames, perhaps of another life: the first live frame is forwarded
   only once a replay has brought the same one. After that a live frame vouches for a replay that brings it, though it
   does not reach back: a publisher may keep a single batch. Live frames older than all that replays brought are left
   out until then: a publisher that is busy and keeps few batches has moved on before it is asked.
5. What cannot be filled or proved ends the life: everything known is void, and `unknown_before` says how many batches
   of the next life were never seen.

An engine answers a replay from its start to its end and loses from the middle and the end, so an answer counts as far
as it is contiguous, and the rest is asked for again, until an answer brings nothing new: once if nothing is known to be
missing, else `TRIES` times.
"""

from dataclasses import dataclass, field
from typing import Final, assert_never

from kvherd.core.kv.cursor import BIRTH, Admitted, Missing, RankCursor, Repeated, Restarted
from kvherd.core.kv.frames import (
    AskReplay,
    BeginLife,
    Connected,
    Disconnected,
    EndLife,
    FeedEvent,
    Forward,
    Frame,
    Idle,
    Instruction,
    Received,
    Replaced,
    Replayed,
)

TRIES: Final = 3
ANSWERS_AT_ONCE: Final = 100
"""A publisher that is never quiet brings something new in every answer; live frames do as well."""
_LATE: Final = "its events are older than what its replay brings"
_UNANSWERED: Final = "its replay does not answer to the end"


@dataclass(slots=True)
class RankFeed:
    """See the module. `can_replay` False: every gap and every new connection ends the life."""

    can_replay: bool = True
    gaps: int = 0
    """How often a live frame showed that others before it did not come."""
    _cursor: RankCursor = field(default_factory=RankCursor)
    _cut: str = "there was no connection to it yet"
    """Why there is no connection, if there is none."""
    _held: Frame | None = None
    """The live frame that showed a gap, or that is compared with a replay."""
    _linked: bool = False
    """A live frame of this connection is part of this life, so those that follow it are."""
    _late: bool = False
    """A live frame of this connection was older than all that is known, so it tells nothing of whose it is."""
    _torn: bool = False
    """On this connection, a replay and a live frame contradicted each other; no replay is believed until they agree."""
    _unproved: bool = False
    """A connection was made since the last proof."""
    _tries: int = 0
    _answers: int = 0
    """Answers in a row."""
    _asked: bool = False
    _behind: bool = False
    """The last answer began just after what was forwarded: a publisher that keeps few batches had sent more by then."""
    _ended: bool = True
    """The last answer was whole. Live frames do not tell that no later one was lost: they may have waited for long."""

    @property
    def last(self) -> int | None:
        """The number of the last frame forwarded; None if none was, -1 if none was published."""
        return self._cursor.last

    @property
    def doubt(self) -> str:
        """Why the publisher may have sent more than was forwarded, or be another one; empty if nothing speaks for it.

        Doubts are part of every replay and every new connection. Those that last are a fault.
        """
        if self._cut:
            return self._cut
        if self._torn:
            return "its replays are not of the publisher whose events come"
        if self._cursor.last is None:
            return "nothing is known of it yet"
        if self._held is not None or self._unproved:
            return "batches are missing, and its replay does not bring them"
        if self._late:
            return _LATE
        if self._behind:
            return "its replay begins after what was received, and that does not come"
        return _UNANSWERED if self._unanswered else ""

    @property
    def unproved(self) -> str:
        """Why nothing is known, or what was forwarded may be of a publisher that is gone; empty if neither is so."""
        if self._cursor.last is None:
            return self.doubt
        if self._cursor.last == BIRTH:
            return ""
        if self._cut or self._unproved:
            return self._cut or "its connection was made anew and is not proved yet"
        if self._late:
            return _LATE
        return _UNANSWERED if self._unanswered else ""

    @property
    def _unanswered(self) -> bool:
        """A dead publisher's connection may seem whole for as long as it is waited for its answer."""
        return self._asked or not self._ended

    def handle(self, event: FeedEvent) -> list[Instruction]:
        instructions = self._handle(event)
        self._asked = any(isinstance(one, AskReplay) for one in instructions)
        self._answers = self._answers + 1 if self._asked else 0
        return instructions

    def _handle(self, event: FeedEvent) -> list[Instruction]:
        match event:
            case Received(frame):
                return self._received(frame)
            case Connected():
                return self._connected()
            case Disconnected(reason):
                return self._disconnected(reason)
            case Idle():
                return self._idle()
            case Replayed(frames, ended):
                self._ended = ended
                return self._replayed(frames, ended=ended)
            case Replaced():
                return self._new_life("its process was replaced")
            case _:
                assert_never(event)

    # --- live frames and connections ---------------------------------------------------------------------------

    def _received(self, frame: Frame) -> list[Instruction]:
        if self._torn:
            self._held = frame
            return [AskReplay(frame.sequence)]
        if self._cursor.last is None:
            return self._first(frame)
        if self.can_replay and not self._linked and frame.sequence > self._cursor.last:
            self._held = frame
            return [self._ask()]
        if self.can_replay and not self._linked and self._cursor.precedes(frame.sequence):
            self._late = True
            return []
        match self._cursor.judge(frame.sequence, frame.mark):
            case Admitted():
                self._behind = False
                return [Forward(frame)]
            case Repeated():
                self._link()
                return []
            case Missing() as gap:
                self.gaps += 1
                self._held = frame
                return [self._ask()] if self.can_replay else self._skip(gap)
            case Restarted():
                return self._new_life(f"its sequence went back to {frame.sequence}", frame)

    def _first(self, frame: Frame) -> list[Instruction]:
        """Nothing is known of this life and it cannot be asked, or did not answer."""
        self._cursor.judge(frame.sequence, frame.mark)
        self._link()
        return [BeginLife(frame.sequence), Forward(frame)]

    def _link(self) -> None:
        self._linked, self._late = True, False

    def _connected(self) -> list[Instruction]:
        self._cut = ""
        self._forget_connection()
        if self.can_replay:
            self._unproved = self._cursor.last not in (None, BIRTH)
            self._tries = 0
            return [self._ask()]
        if self._cursor.last is None:
            return []
        return self._new_life("its connection was made anew, and it has no replay to prove itself by")

    def _forget_connection(self) -> None:
        self._held, self._linked, self._late, self._torn, self._behind = None, False, False, False, False

    def _disconnected(self, reason: str) -> list[Instruction]:
        self._cut = reason
        self._forget_connection()
        if self.can_replay or self._cursor.last is None:
            return []
        return self._new_life(f"{reason}, and it has no replay to prove itself by")

    def _idle(self) -> list[Instruction]:
        if not self.can_replay or self._torn or (self._cut and self._cursor.last is None):
            return []
        return [self._ask()]

    # --- replays -----------------------------------------------------------------------------------------------

    def _ask(self) -> AskReplay:
        return AskReplay(max(self._cursor.last or 0, 0))

    def _replayed(self, frames: tuple[Frame, ...], *, ended: bool) -> list[Instruction]:
        if self._torn:
            return self._mended(frames)
        if self._contradicted(frames):
            return self._tear()
        if self._cursor.last is None:
            return self._born(frames, ended=ended)
        before = self._cursor.last
        vouched = self._vouched(frames, before)
        if frames and frames[0].sequence > max(before, 0) and not vouched:
            return self._begins_after(before, frames[0].sequence)
        self._behind = False
        verdict = None if vouched else self._compare(before, frames, ended=ended)
        if verdict is not None:
            # Of a publisher whose live frames were known a moment ago, and whose connection stands.
            return self._tear(verdict) if self._linked else self._new_life(verdict)
        forwarded = self._admit(frames)
        if forwarded or (frames and before >= 0):
            self._unproved = False
        return forwarded + self._after_replay(progress=self._cursor.last != before, ended=ended)

    def _vouched(self, frames: tuple[Frame, ...], before: int) -> bool:
        """Whether the answer goes on just after what was forwarded and brings the live frame that waits: if live frames
        of this connection are known to be of this life, so is the answer.
        """
        return self._linked and bool(frames) and frames[0].sequence == before + 1 and self._held in frames

    def _begins_after(self, before: int, first: int) -> list[Instruction]:
        """Nothing in the answer proves that it is of this life, for its publisher keeps no more."""
        if self._held is None and not self._behind and (self._linked or not self._unproved):
            self._behind = True  # those between are on their way over the connection, or the next answer decides
            return []
        if first > before + 1:
            lost = f"batches {before + 1} to {first - 1} are lost and its replay begins after them"
            return self._new_life(lost, self._held)
        return self._new_life(f"its replay begins with batch {first}, which proves nothing", self._held)

    def _contradicted(self, frames: tuple[Frame, ...]) -> bool:
        """Whether the live frame that waits came back as another one."""
        held = self._held
        return held is not None and any(one.sequence == held.sequence and one.mark != held.mark for one in frames)

    def _tear(self, reason: str = "") -> list[Instruction]:
        """Live frames and replays are not of one life: one of them will prove to be of the past, or neither is right.

        A new connection decides, or a live frame that a replay brings too.
        """
        known, self._cursor = self._cursor.last is not None, RankCursor()
        self._forget_connection()
        self._unproved, self._tries, self._torn = False, 0, True
        return [EndLife(reason or "its replay brings other batches than its events were")] if known else []

    def _mended(self, frames: tuple[Frame, ...]) -> list[Instruction]:
        held, self._held = self._held, None
        if held is None or not frames or frames[0] != held:
            return []
        self._torn = False
        self._link()
        return [self._ask()]

    def _born(self, frames: tuple[Frame, ...], *, ended: bool) -> list[Instruction]:
        """The first answer of a life: it may begin in the middle, but what it brings is contiguous or left out."""
        if frames:
            first = frames[0]
            self._cursor.judge(first.sequence, first.mark)
            begun: list[Instruction] = [BeginLife(first.sequence), Forward(first), *self._admit(frames[1:])]
            return begun + self._after_replay(progress=True, ended=ended)
        if ended:
            self._cursor = RankCursor(BIRTH)
            return [BeginLife(0), *self._after_replay(progress=False, ended=True)]
        self._tries += 1
        if self._tries < TRIES:
            return [self._ask()]
        return self._give_up_filling()

    def _compare(self, last: int, frames: tuple[Frame, ...], *, ended: bool) -> str | None:
        """Why the answer comes from another life than the cursor's, if so."""
        if not frames:
            return "it has sent fewer batches than were received" if ended and last != BIRTH else None
        first = frames[0]
        if last != BIRTH and not self._cursor.proves(first.sequence, first.mark):
            return f"batch {first.sequence} is not what it was"
        return None

    def _admit(self, frames: tuple[Frame, ...]) -> list[Instruction]:
        forwarded: list[Instruction] = []
        for frame in frames:
            match self._cursor.judge(frame.sequence, frame.mark):
                case Admitted():
                    forwarded.append(Forward(frame))
                case Repeated():
                    pass
                case Missing() | Restarted():
                    break  # the answer lost something here: what follows is asked for again
        return forwarded

    def _after_replay(self, *, progress: bool, ended: bool) -> list[Instruction]:
        """Go on, ask again, or give up."""
        settled = self._settle_held()
        if settled is None:
            return self._tear()
        more = progress and (not ended or self._answers < ANSWERS_AT_ONCE)
        if self._held is None and not self._unproved and not more:
            self._tries = 0
            return settled
        self._tries = 0 if progress else self._tries + 1
        if self._tries < TRIES:
            return [*settled, self._ask()]
        return settled + self._give_up_filling()

    def _settle_held(self) -> list[Instruction] | None:
        """Forward the frame that waits if all before it has come; None if it is of another life than the replay."""
        held, last = self._held, self._cursor.last
        if held is None or last is None:
            return []
        if self._cursor.precedes(held.sequence):
            self._held, self._late = None, True
            return []
        if held.sequence <= last:
            self._held = None
            self._link()
            return [] if self._cursor.proves(held.sequence, held.mark) else None
        if not self._linked or held.sequence > last + 1:
            return []
        self._held = None
        self._cursor.judge(held.sequence, held.mark)
        return [Forward(held)]

    # --- ends of lives -----------------------------------------------------------------------------------------

    def _give_up_filling(self) -> list[Instruction]:
        held, self._held = self._held, None
        before, self._cursor = self._cursor.last, RankCursor()
        self._unproved, self._tries = False, 0
        ended: list[Instruction] = []
        if before is not None and held is not None:
            lost = f"batches {before + 1} to {held.sequence - 1} are lost and no replay brings them"
            ended.append(EndLife(lost if held.sequence > before + 1 else f"no replay brings batch {held.sequence}"))
        elif before is not None:
            ended.append(EndLife("its connection was made anew, and no replay proved that it is the same"))
        return ended + (self._first(held) if held is not None else [])

    def _skip(self, gap: Missing) -> list[Instruction]:
        held, self._held = self._held, None
        assert held is not None
        self._cursor = RankCursor()
        lost = f"batches {gap.first} to {gap.last} are lost and it has no replay"
        return [EndLife(lost), *self._first(held)]

    def _new_life(self, reason: str, frame: Frame | None = None) -> list[Instruction]:
        """`frame`, if there is one, is of the new life, unless it is a late one of the old: a replay has to tell."""
        known, self._cursor = self._cursor.last is not None, RankCursor()
        self._held, self._linked, self._late, self._behind, self._unproved = None, False, False, False, False
        self._tries = 0
        ended: list[Instruction] = [EndLife(reason)] if known else []
        if not self.can_replay:
            return ended
        self._held = frame
        return [*ended, self._ask()]
