"""Who is to serve a request: what each worker may hold of it, what it would cost there, whose turn it is."""

from collections.abc import Callable, Sequence
from typing import Final

from kvherd.core.errors import (
    KvherdError,
    NoWorker,
    Unsupported,
    WorkerFailed,
    WorkerUnreachable,
    WorkerUnsupported,
)
from kvherd.core.fleet.roster import Member, Roster
from kvherd.core.ids import Rank, WorkerId
from kvherd.core.routing.candidate import Ask
from kvherd.core.routing.pickers import InTurn
from kvherd.core.routing.policy import Explanation, Policy
from kvherd.services.gateway.turns.credit import NO_MATCH, Credit, Match
from kvherd.services.gateway.turns.turn import Turn
from kvherd.wire.fleet_json import explanation_header

RANKED_PATHS: Final = frozenset({"/v1/chat/completions", "/v1/completions", "/generate"})
"""Of which engines can be told the rank that is to serve them."""


_MOST_SAID: Final = 1024


class Choice:
    """`explanation` is None where nothing was weighed, for it was simply the member's turn."""

    __slots__ = ("explanation", "match", "member", "rank")

    def __init__(
        self,
        member: Member | None,
        rank: Rank | None = None,
        match: Match = NO_MATCH,
        explanation: Explanation | None = None,
    ) -> None:
        self.member = member
        self.rank = rank
        self.match = match
        self.explanation = explanation


class Chooser:
    def __init__(self, roster: Roster, policy: Policy, credit: Credit, dice: Callable[[], float]) -> None:
        self._roster = roster
        self._policy = policy
        self._in_turn = policy.in_turn
        self._credit = credit
        self._dice = dice
        self._said: dict[tuple[WorkerId, Rank | None, int | None], tuple[tuple[bytes, bytes], ...]] = {}

    def choose(self, turn: Turn, now_s: float) -> Choice:
        if self._in_turn is not None and not turn.explain:
            member = self._next_in_turn(self._in_turn, turn, now_s)
            if member is not None:
                return Choice(member)
        return self._weigh(turn, now_s)

    def name(self, turn: Turn, member: Member, choice: Choice) -> None:
        """Note who serves it, and say so in the answer's headers, with what is expected to be cached there."""
        turn.member, turn.rank, turn.match = member, choice.rank, choice.match
        if choice.explanation is None:
            turn.headers = self._served_by(member.worker, None, None)
            return
        turn.headers = self._served_by(member.worker, turn.rank, turn.predicted)
        if turn.explain:
            turn.explanation = explanation_header(choice.explanation, turn.held_s).encode("latin-1")
            turn.headers = (*turn.headers, (b"x-kvherd-explain", turn.explanation))

    def _served_by(self, worker: WorkerId, rank: Rank | None, predicted: int | None) -> tuple[tuple[bytes, bytes], ...]:
        """Mostly one that was made before: what is written for it is known again, at once if it is the same object."""
        said = self._said.get((worker, rank, predicted))
        if said is None:
            headers = [(b"x-kvherd-worker", worker.encode("latin-1"))]
            if rank is not None:
                headers.append((b"x-kvherd-rank", b"%d" % rank))
            if predicted is not None:
                headers.append((b"x-kvherd-predicted-cached-tokens", b"%d" % predicted))
            if len(self._said) >= _MOST_SAID:
                self._said.clear()
            said = self._said[worker, rank, predicted] = tuple(headers)
        return said

    def nobody(self, turn: Turn, choice: Choice) -> KvherdError:
        """Why nobody serves it: a worker's own refusal if one was asked, else what rules each of them out."""
        for error in turn.tried.values():
            if not isinstance(error, WorkerUnreachable | WorkerFailed | WorkerUnsupported):
                return error
        able = [one for one in self._roster if turn.model in one.models]
        unable = [turn.tried.get(one.worker) for one in able]
        if able and all(isinstance(error, WorkerUnsupported) for error in unable):
            return Unsupported(next(error.what for error in unable if isinstance(error, WorkerUnsupported)))
        ruled_out = choice.explanation.ruled_out if choice.explanation is not None else ()
        reasons = [f"{one.candidate.worker} {one.reason}" for one in ruled_out]
        return NoWorker(turn.model, (*map(str, turn.tried.values()), *reasons))

    def _next_in_turn(self, in_turn: InTurn, turn: Turn, now_s: float) -> Member | None:
        """Of workers that all count alike, without a candidate's being made of any; None: they must be weighed."""
        able = []
        for member in self._roster:
            if member.weight != 1.0 or (member.addressable and member.ranks > 1) or turn.keeper is not None:
                return None
            if turn.model in member.models and member.worker not in turn.tried and not member.unavailable(now_s):
                able.append(member.worker)
        return self._roster.get(in_turn.next_of(able)) if able else None

    def _weigh(self, turn: Turn, now_s: float) -> Choice:
        members = [one for one in self._roster if one.worker not in turn.tried]
        if turn.keeper is not None:
            members = [one for one in members if one.worker == turn.keeper]
        matches = self._credit.matches(turn.prompt, members) if self._policy.remembers_prompts else {}
        tokens = turn.prompt.tokens
        candidates = []
        for member in members:
            for rank in _targets(turn, member):
                match = matches.get((member.worker, rank), NO_MATCH)
                candidates.append(
                    member.candidate(now_s, matched_tokens=match.tokens, prompt_tokens=tokens, kv=match.kv, rank=rank)
                )
        ask = Ask(turn.model, tokens, turn.asked.user or "")
        explanation = self._policy.choose(ask, candidates, self._dice)
        chosen = explanation.chosen
        if chosen is None:
            return Choice(None, explanation=explanation)
        match = matches.get((chosen.worker, chosen.rank), NO_MATCH)
        return Choice(self._roster.get(chosen.worker), chosen.rank, match, explanation)


def _targets(turn: Turn, member: Member) -> Sequence[Rank | None]:
    """The worker, or those of its ranks that may serve the request. Of a rank that it lacks it tells the client."""
    if turn.incoming.path not in RANKED_PATHS:
        return (None,)
    if turn.wanted_rank is None:
        return member.targets
    return (turn.wanted_rank,) if turn.wanted_rank in member.targets else (None,)
