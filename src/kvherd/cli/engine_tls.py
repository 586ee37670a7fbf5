"""Whom the certificate of an engine must come from, and be for: options of the commands that ask one engine."""

from pathlib import Path
from typing import Annotated, Final

import typer

from kvherd.adapters.tls import ClientTls, TlsFiles, TlsOptions
from kvherd.core.errors import OptionInvalid

_CERT: Final = "--engine-tls-cert"
_KEY: Final = "--engine-tls-key"
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
EngineCertOption = Annotated[
    Path | None,
    typer.Option(_CERT, metavar="FILE", help="Certificate (PEM) that the engine gets to see, if it asks."),
]
EngineTlsKeyOption = Annotated[Path | None, typer.Option(_KEY, metavar="FILE", help="Its private key (PEM).")]


def engine_tls(files: TlsFiles, *urls: str | None) -> ClientTls | None:
    """None: whatever is at these URLs is spoken to in the clear. Raises `OptionInvalid`."""
    if any(url is not None and url.startswith(("https:", "grpcs:")) for url in urls):
        return ClientTls(files, TlsOptions(_CERT, _KEY, _CA))
    told = {_CA: files.authorities, _NAME: files.server_name, _CERT: files.certificate, _KEY: files.key}
    for option, value in told.items():
        if value is not None:
            raise OptionInvalid(option, f"is for engines with TLS: {urls[0]} does not begin with https:// or grpcs://")
    return None
