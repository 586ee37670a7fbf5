"""Filter → score → pick: which worker gets a request, and why.

A policy is made by name from a configuration:

    policy = make_policy("kv", Weights(beta=2.0))
    decision = policy.choose(ask, candidates, dice)

To add one, write its filters, scorers or picker and give it a line in `_POLICIES`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvherd.core.errors import OptionInvalid
from kvherd.core.routing import filters as rules
from kvherd.core.routing import pickers, scorers
from kvherd.core.routing.candidate import Ask, Candidate
from kvherd.core.routing.pickers import Costed, Dice

Named = tuple[str, scorers.Scorer]


@dataclass(frozen=True, slots=True)
class Weights:
    """The constants of the `kv` cost: see `scorers.py`."""

    beta: float = 2.0
    gamma: float = 1.0
    tau_s: float = 300.0


class RuledOut:
    __slots__ = ("candidate", "reason")

    def __init__(self, candidate: Candidate, reason: str) -> None:
        self.candidate = candidate
        self.reason = reason


class Explanation:
    """Every candidate with its costs or the reason why it was none, and the one that was taken."""

    __slots__ = ("chosen", "costed", "policy", "ruled_out")

    def __init__(self, policy: str, costed: list[Costed], ruled_out: list[RuledOut], chosen: Candidate | None) -> None:
        self.policy = policy
        self.costed = costed
        self.ruled_out = ruled_out
        self.chosen = chosen


@dataclass(frozen=True, slots=True)
class Policy:
    """Chooses a worker. Not pure where its picker remembers (round robin remembers whose turn it was).

    `needs_tokens` says whether `Candidate.matched_tokens` matters to it, so that a prompt is tokenized only then.
    """

    name: str
    scorers: tuple[Named, ...]
    picker: pickers.Picker
    needs_tokens: bool = False
    remembers_prompts: bool = False
    filters: tuple[rules.Filter, ...] = rules.DEFAULT

    @property
    def in_turn(self) -> pickers.InTurn | None:
        """The picker of a policy that asks nothing of candidates but whose turn it is."""
        return self.picker if isinstance(self.picker, pickers.InTurn) and not self.scorers else None

    def choose(self, ask: Ask, candidates: Sequence[Candidate], dice: Dice) -> Explanation:
        """Explain a choice; `chosen` is None when every candidate is ruled out."""
        costed: list[Costed] = []
        ruled_out: list[RuledOut] = []
        for candidate in candidates:
            for rule in self.filters:
                reason = rule(candidate, ask)
                if reason:
                    ruled_out.append(RuledOut(candidate, reason))
                    break
            else:
                costs, total_s = [], 0.0
                for name, score in self.scorers:
                    cost_s = score(candidate, ask)
                    total_s += cost_s
                    costs.append((name, cost_s))
                costed.append(Costed(candidate, costs, total_s / candidate.weight))
        chosen = self.picker(costed, ask, dice).candidate if costed else None
        return Explanation(self.name, costed, ruled_out, chosen)


def _kv(weights: Weights) -> tuple[Named, ...]:
    return (
        ("backlog", scorers.backlog_s),
        ("slots", scorers.slots_s),
        ("uncached", scorers.UncachedPrefill(weights.beta)),
        ("evicted", scorers.EvictedPrefill(weights.gamma, weights.tau_s)),
    )


_LOAD = (("load", scorers.Load()), ("backlog", scorers.backlog_s))

_POLICIES: dict[str, Callable[[Weights], Policy]] = {
    "kv": lambda weights: Policy("kv", _kv(weights), pickers.best, needs_tokens=True, remembers_prompts=True),
    "prefix_tree": lambda weights: Policy("prefix_tree", _kv(weights), pickers.best, remembers_prompts=True),
    "least_load": lambda _: Policy("least_load", _LOAD, pickers.best),
    "power_of_two": lambda _: Policy("power_of_two", _LOAD, pickers.two_choices),
    "consistent_hash": lambda _: Policy("consistent_hash", _LOAD, pickers.by_affinity),
    "round_robin": lambda _: Policy("round_robin", (), pickers.InTurn()),
}

POLICY_NAMES: Final = tuple(_POLICIES)


def make_policy(name: str, weights: Weights | None = None) -> Policy:
    """Make the policy of that name. Raises `OptionInvalid` naming those there are."""
    if name not in _POLICIES:
        raise OptionInvalid("--policy", f"{name!r} is none of {', '.join(POLICY_NAMES)}")
    return _POLICIES[name](weights or Weights())
