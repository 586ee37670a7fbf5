"""Whom the certificate of an engine must come from, and be for: options of the commands that ask one engine."""

from pathlib import Path
from typing import Annotated, Final

import typer

from kvherd.adapters.tls import ClientTls, TlsFiles, TlsOptions
from kvherd.core.errors import OptionInvalid

_CA: Final = "--engine-ca"
_NAME: Final = "--engine-tls-name"

EngineCaOption = Annotated[
    Path | None,
    typer.Option(
        _CA,
        metavar="FILE",
        help="Authorities (PEM) that the certificate of an https:// or grpcs:// engine must come from; by default this "
        "machine's.",
    ),
]
EngineTlsNameOption = Annotated[
    str | None,
    typer.Option(_NAME, metavar="NAME", help="What that certificate is for, if not the host of the URL."),
]


def engine_tls(url: str, authorities: Path | None, name: str | None) -> ClientTls | None:
    """None: the engine at `url` is spoken to in the clear. Raises `OptionInvalid`."""
    if url.startswith(("https:", "grpcs:")):
        return ClientTls(TlsFiles(authorities=authorities, server_name=name), TlsOptions("", "", _CA))
    if authorities is not None or name is not None:
        option = _CA if authorities is not None else _NAME
        raise OptionInvalid(option, f"is for engines with TLS: {url} does not begin with https:// or grpcs://")
    return None
