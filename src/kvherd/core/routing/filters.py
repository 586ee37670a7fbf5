"""Why a candidate is ruled out. A filter answers with a reason in words, or None to let it pass."""

from collections.abc import Callable

from kvherd.core.routing.candidate import Ask, Candidate

Filter = Callable[[Candidate, Ask], str | None]


def serves_model(candidate: Candidate, ask: Ask) -> str | None:
    """An ask without a model is for any."""
    if ask.model and ask.model not in candidate.models:
        return f"serves {', '.join(candidate.models) or 'no model'}"
    return None


def takes_requests(candidate: Candidate, _ask: Ask) -> str | None:
    return candidate.unavailable or None


DEFAULT: tuple[Filter, ...] = (serves_model, takes_requests)
