"""The audit of a fleet as plain JSON values: what was compared of each worker, and what to do about it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kvherd.core.fleet.roster import Member
from kvherd.wire.fleet_json import Json, KvView

_NOTHING_CLAIMED: Final = frozenset({"unfollowed", "unsupported"})
_FLAGS: Final = {
    "vllm": "start it with --enable-prompt-tokens-details",
    "sglang": "start it with --enable-cache-report",
}


@dataclass(frozen=True, slots=True)
class Audited:
    """One worker, and what is known of its cache."""

    member: Member
    kv: KvView

    @property
    def claimed(self) -> bool:
        """Something is predicted of it: it tells what it holds."""
        return self.kv.state not in _NOTHING_CLAIMED

    @property
    def answered(self) -> bool:
        """Something was predicted, and then answered."""
        truth = self.member.truth
        return truth.decided + truth.undecided + truth.unavailable > 0

    @property
    def fine(self) -> bool:
        return self.member.truth.recent > 0 and not self.member.truth.too_wrong


def audit_report(fleet: Iterable[Audited]) -> Json:
    """`fine` if something was decided of every worker that tells what it holds and has answered, and of late at most
    1 % was wrong.
    """
    audited = list(fleet)
    answered = [one for one in audited if one.claimed and one.answered]
    return {"fine": bool(answered) and all(one.fine for one in answered), "workers": [_entry(one) for one in audited]}


def _entry(one: Audited) -> Json:
    truth = one.member.truth
    wrong = truth.last_wrong
    return {
        "url": one.member.worker,
        "kind": one.member.kind,
        "kv": one.kv.state,
        "fine": one.fine,
        "decided": truth.decided,
        "wrong": truth.wrong,
        "undecided": truth.undecided,
        "undecided_by": dict(truth.undecided_by),
        "unavailable": truth.unavailable,
        "error_rate": round(truth.error_rate, 6),
        "rebuilds": truth.rebuilds,
        "last_wrong": wrong
        and {"predicted_tokens": wrong.predicted, "reported_tokens": wrong.reported, "at_s": round(wrong.at_s, 3)},
        "differing_prompts": [each.value for each in one.member.differing],
        "advice": _advice(one),
    }


def _advice(one: Audited) -> str:
    """What stands between this worker and a verdict, or what the verdict asks for; empty if all is well."""
    member, truth = one.member, one.member.truth
    if not one.claimed:
        return "it tells no KV events, so nothing is predicted of it; see docs/kv-events.md"
    if truth.tells is False and not truth.hits_told:
        flag = _FLAGS.get(member.kind.partition("-")[0], "it does not say how many tokens were cached")
        return f"its answers do not say what was cached: {flag}"
    if truth.too_wrong:
        return "too many predictions were wrong; what it holds is told anew within a minute"
    if truth.recent:
        return ""
    if truth.rebuilds:
        return "what it holds was told anew since too many predictions were wrong; nothing was decided since"
    if truth.undecided:
        (why, _), *_ = truth.undecided_by.most_common(1)
        return f"nothing could be decided, most often because of: {why}"
    if truth.unavailable:
        return "no answer carried its usage: stream with include_usage, or let --usage-sample ask for it"
    return "no answer yet"
