"""Options that name the files for TLS, to clients and to workers."""

from pathlib import Path
from typing import Annotated

import typer

from kvherd.cli import panels

CertOption = Annotated[
    Path | None,
    typer.Option(
        "--tls-cert",
        metavar="FILE",
        rich_help_panel=panels.TLS,
        help="Certificate chain (PEM): all that is served here is served over TLS.",
    ),
]
KeyOption = Annotated[
    Path | None, typer.Option("--tls-key", metavar="FILE", rich_help_panel=panels.TLS, help="Its private key (PEM).")
]
ClientCaOption = Annotated[
    Path | None,
    typer.Option(
        "--tls-client-ca",
        metavar="FILE",
        rich_help_panel=panels.TLS,
        help="Authorities (PEM): only clients with a certificate of theirs may come.",
    ),
]
WorkerCaOption = Annotated[
    Path | None,
    typer.Option(
        "--worker-ca",
        metavar="FILE",
        rich_help_panel=panels.TLS,
        help="Authorities (PEM) of the certificates of https:// and grpcs:// workers; by default this machine's.",
    ),
]
WorkerCertOption = Annotated[
    Path | None,
    typer.Option(
        "--worker-cert",
        metavar="FILE",
        rich_help_panel=panels.TLS,
        help="Certificate (PEM) that such workers get to see, if they ask.",
    ),
]
WorkerKeyOption = Annotated[
    Path | None, typer.Option("--worker-key", metavar="FILE", rich_help_panel=panels.TLS, help="Its private key (PEM).")
]
WorkerNameOption = Annotated[
    str | None,
    typer.Option(
        "--worker-tls-name",
        metavar="NAME",
        rich_help_panel=panels.TLS,
        help="What workers' certificates are for, if not the host of their URL: those found by address, for one.",
    ),
]
