"""The line of the access log. Apart from who fills it in, since a struct of msgspec's cannot be compiled."""

import msgspec


class AccessLine(msgspec.Struct, gc=False):
    """Its names are those of the log."""

    at: str
    request: str
    key: str | None
    path: str
    model: str
    worker: str | None
    rank: int | None
    stream: bool
    outcome: str
    status: int | None
    tries: int
    prompt_tokens: int | None
    completion_tokens: int | None
    predicted_cached_tokens: int | None
    cached_tokens: int | None
    held_s: float | None
    ttft_s: float | None
    itl_s: float | None
    seconds: float | None
    explain: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


encoded = msgspec.json.Encoder().encode
"""A line as JSON, without an end."""

as_it_is = msgspec.Raw
"""JSON that stands in a line as it was given."""
