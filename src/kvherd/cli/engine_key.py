"""The key that engines on HTTP want: an option of every command that asks them something."""

from typing import Annotated

import typer

from kvherd.core.errors import OptionInvalid

ENGINE_KEY = "KVHERD_ENGINE_API_KEY"
OPTION = "--engine-api-key"

EngineKeyOption = Annotated[
    str | None,
    typer.Option(
        OPTION,
        envvar=ENGINE_KEY,
        show_envvar=True,
        metavar="KEY",
        help="What an engine on HTTP wants as Authorization: Bearer KEY; better given by the environment.",
    ),
]


def engine_key(given: str | None) -> str | None:
    """The key as it can stand in a header; None for none. Raises `OptionInvalid`, which does not repeat it."""
    key = (given or "").strip()
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise OptionInvalid(OPTION, "a key is of printable ASCII characters, without spaces")
    return key or None
