"""Why a candidate is ruled out. A filter answers with a reason in words, or None to let it pass."""

from collections.abc import Callable

from kvherd.core.routing.candidate import Ask, Candidate

Filter = Callable[[Candidate, Ask], str | None]


def able(candidate: Candidate, ask: Ask) -> str | None:
    """It serves the model and takes requests. An ask without a model is for any."""
    if ask.model and ask.model not in candidate.models:
        return f"serves {', '.join(candidate.models) or 'no model'}"
    return candidate.unavailable or None


DEFAULT: tuple[Filter, ...] = (able,)
