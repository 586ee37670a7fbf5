"""Requests wait here rather than at a worker as long as every worker has more than enough before it.

At a worker they would run in the order in which they came, and be where they are when another worker has nothing left.
Here the shortest goes first, and each goes where it will be answered soonest when that is known.
"""

from collections.abc import Callable

from kvherd.core.fleet.roster import Roster
from kvherd.core.routing.late import LateBounds, least_prefill_s
from kvherd.core.routing.policy import Explanation
from kvherd.services.gateway.turns.turn import Turn
from kvherd.services.gateway.waiting.admission import Admission, Gate

HELD_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/generate"})
"""What begins with a prefill. To count tokens, or to read what an engine keeps, costs none and waits for none."""


class LateBinding:
    """For policies that know what a prompt will cost where; `bounds` may be changed at any time."""

    def __init__(
        self,
        admission: Admission,
        roster: Roster,
        clock: Callable[[], float],
        bounds: LateBounds | None = None,
        *,
        held: Callable[[str, float], None] = lambda *_: None,
    ) -> None:
        """`held` is told how long each request of a model was held."""
        self.bounds = bounds or LateBounds()
        self._admission = admission
        self._roster = roster
        self._clock = clock
        self._held = held
        self._gates: dict[str, Gate] = {}

    def must_wait(self, turn: Turn, explanation: Explanation) -> bool:
        """Whether `wait` is for it: it costs a comparison where nobody waits and its worker has little to do."""
        chosen, bounds = explanation.chosen, self.bounds
        if chosen is None or not bounds.on:
            return False
        if max(chosen.backlog_s, chosen.slot_wait_s) <= bounds.backlog_s and not self._admission.held:
            return False
        if turn.incoming.path not in HELD_PATHS or turn.tried or turn.wanted_rank is not None or self._admission.full:
            return False
        gate = self._gate(turn.model)
        return bool(len(gate.line)) or gate.room_in_s() > 0.0

    async def wait(self, turn: Turn, explanation: Explanation) -> None:
        """Return when it is to be sent on, and choose again then. Raises `WaitedInVain` or `DeadlinePassed`."""
        began_s = self._clock()
        gate = self._gate(turn.model)
        gate.line.ageing = self.bounds.ageing
        ends = None if turn.ends is None else (max(0.0, turn.ends[0] - began_s), turn.ends[1])
        try:
            await self._admission.hold(
                gate,
                turn.incoming.key,
                cost_s=least_prefill_s(explanation, turn.prompt.tokens),
                longest_s=self.bounds.longest_s,
                ends=ends,
            )
        finally:
            turn.held_s = self._clock() - began_s
            self._held(turn.model, turn.held_s)

    def look(self) -> None:
        """A worker may have room."""
        if self._admission.held:
            self._admission.look()

    def _gate(self, model: str) -> Gate:
        gate = self._gates.get(model)
        if gate is None:
            self._gates = {name: each for name, each in self._gates.items() if len(each.line)}
            gate = self._gates[model] = Gate(
                lambda: self._roster.room_in_s(model, self.bounds.backlog_s, self._clock())
            )
        return gate
