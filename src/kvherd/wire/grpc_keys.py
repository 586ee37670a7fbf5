"""An API key as metadata of a gRPC call."""

from typing import Final

AUTHORIZATION: Final = "authorization"


def bearer(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """The pair that carries the key; none without one."""
    return ((AUTHORIZATION, f"Bearer {api_key}"),) if api_key else ()
