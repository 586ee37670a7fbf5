"""Which of a worker's KV events still tell of what an obeyed flush wiped out.

Events of before a flush may come after its answer: they were on their way. So from the answer on, a rank's events are
out of date until its clear comes, or a batch that its engine stamped later, or a snapshot with such a batch in it. A
rank whose clear came between the order and the answer is right already, and is not held back. vLLM and SGLang publish
their clear with their next step only, first in its batch; kvherd's engine publishes it at once. Flushes and their
clears are counted: the clear of one may come after the answer to the next.

An order whose answer nobody waits for any more may have been obeyed, or be obeyed yet: an engine that stood still finds
it when it goes on. Its ranks are held back as if it was obeyed. Once their engine has stepped for a while and told no
clear it has not been, and what they hold is told again. A prompt that is cached whole has no events: then it is the
answers of an engine of one rank that tell of its steps.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvherd.core.ids import Rank
from kvherd.core.kv.events import CacheCleared, KvEvent, KvEventBatch


@dataclass(frozen=True, slots=True)
class Current:
    """These events hold. `anew`: beside them the rank holds nothing, whatever was told before."""

    events: tuple[KvEvent, ...]
    anew: bool = False


@dataclass(frozen=True, slots=True)
class Outdated:
    """The events are of before the flush: drop them."""


@dataclass(frozen=True, slots=True)
class Unsure:
    """The events hold, but those dropped since the answer may have held too: what the rank holds is not known."""


Verdict = Current | Outdated | Unsure


@dataclass(slots=True)
class FlushBarrier:
    """One for all ranks of a worker. `skew_s`: how much the engine host's clock may be ahead of ours."""

    skew_s: float = 2.0
    settle_s: float = 1.0
    """How long after its first step since an order was given up an engine may find that order."""
    _answered_s: float | None = None
    """When the last flush was answered or given up, by our wall clock; None: there was none."""
    _in_doubt: bool = False
    """It was given up."""
    _stepped_s: dict[Rank, float] = field(default_factory=dict)
    """The first stamp that each rank's engine gave since then."""
    _first_answer_s: float | None = None
    """When the first answer came to a request that was sent after it."""
    _passed: set[Rank] = field(default_factory=set)
    _dropped: set[Rank] = field(default_factory=set)
    _owed: dict[Rank, int] = field(default_factory=dict)
    """Of ranks that are held back: how many clears of obeyed flushes are still to come. One is enough for one flush
    only: it may have been on its way when the next was ordered."""
    _cleared_s: dict[Rank, float] = field(default_factory=dict)
    """When the last clear came that was not owed."""

    def flushed(self, ranks: Iterable[Rank], *, ordered_s: float, answered_s: float) -> set[Rank]:
        """A flush was obeyed; those of `ranks` whose clear did not come since the order hold nothing from now on.

        `ordered_s` is of the clock of `judge`, `answered_s` of the wall clock.
        """
        early = {rank for rank, cleared_s in self._cleared_s.items() if cleared_s >= ordered_s}
        late = set(ranks) - early
        self._owed = {rank: 1 + self._owed.get(rank, 0) for rank in late}
        self._answered_s, self._passed = answered_s, early
        self._in_doubt = False
        self._dropped.clear()
        return late

    def doubted(self, ranks: Iterable[Rank], *, ordered_s: float, given_up_s: float) -> set[Rank]:
        """A flush was sent, and nobody will know whether it is obeyed: those of `ranks` whose clear did not come since
        may hold nothing from now on, and are credited with nothing. `given_up_s` is of the wall clock.
        """
        late = self.flushed(ranks, ordered_s=ordered_s, answered_s=given_up_s)
        self._in_doubt, self._first_answer_s = True, None
        self._stepped_s.clear()
        self._dropped |= late
        return late

    def answered(self, *, sent_s: float, now_s: float) -> bool:
        """The engine of one rank has answered a request that was sent at `sent_s`; all by our wall clock.

        Whether it was so seen not to have obeyed: nothing is held back any more, and what it holds is to be told again.
        """
        if not self.in_doubt or self._answered_s is None or sent_s <= self._answered_s:
            return False
        if self._first_answer_s is None:
            self._first_answer_s = now_s
        if now_s <= self._first_answer_s + self.settle_s:
            return False
        self._answered_s, self._in_doubt = None, False
        self._dropped.clear()
        self._owed.clear()
        return True

    @property
    def in_doubt(self) -> bool:
        """A flush was sent, and of some rank it has not turned out yet whether it is obeyed."""
        return self._in_doubt and self.owes

    @property
    def owes(self) -> bool:
        """Some rank is held back, and was told of what it may hold after all."""
        return bool(self._dropped - self._passed)

    def holds_back(self, rank: Rank) -> bool:
        return self._answered_s is not None and rank not in self._passed

    def drop(self, rank: Rank) -> None:
        """What the rank holds was told while it was held back, and was not taken."""
        self._dropped.add(rank)

    def judge_snapshot(self, rank: Rank, stamped_s: float) -> bool:
        """Whether a snapshot holds: its last batch, and so the clear before that, is of after the flush."""
        if self._answered_s is None or rank in self._passed:
            return True
        if not self._is_later(rank, stamped_s):
            return False
        self._pass(rank)
        self._dropped.discard(rank)
        return True

    def forget(self, rank: Rank) -> None:
        """What the rank holds is told from zero: what was dropped before counts no more."""
        self._dropped.discard(rank)

    def judge(self, batch: KvEventBatch, *, now_s: float) -> Verdict:
        clears = [number for number, event in enumerate(batch.events) if isinstance(event, CacheCleared)]
        if not self.holds_back(batch.rank):
            if clears:
                self._cleared_s[batch.rank] = now_s
            return Current(batch.events)
        owed = self._owed.get(batch.rank, 1) - len(clears)
        if clears and owed <= 0:
            if owed < 0:
                self._cleared_s[batch.rank] = now_s
            self._pass(batch.rank)
            return Current(batch.events[clears[-1] :])
        self._owed[batch.rank] = owed
        if not self._is_later(batch.rank, batch.timestamp_s):
            self._dropped.add(batch.rank)
            return Outdated()
        self._pass(batch.rank)
        if clears:
            return Current(batch.events[clears[-1] :])
        return Unsure() if self._in_doubt or batch.rank in self._dropped else Current(batch.events, anew=True)

    def _is_later(self, rank: Rank, stamped_s: float) -> bool:
        """Whether what the engine stamped so is of after the flush, as far as clocks can tell; of one in doubt, of when
        it would have been obeyed.
        """
        assert self._answered_s is not None
        if stamped_s <= self._answered_s + self.skew_s:
            return False
        return not self._in_doubt or stamped_s > self._stepped_s.setdefault(rank, stamped_s) + self.settle_s

    def _pass(self, rank: Rank) -> None:
        self._passed.add(rank)
        self._owed.pop(rank, None)
