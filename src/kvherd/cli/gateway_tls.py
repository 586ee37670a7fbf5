"""TLS of the gateway to its clients and to its workers, by files that may be renewed while it runs."""

from pathlib import Path
from typing import Annotated, Final

import typer

from kvherd.adapters.tls import ClientTls, FileServerTls, TlsFiles, TlsOptions
from kvherd.core.errors import OptionInvalid

OWN: Final = TlsOptions("--tls-cert", "--tls-key", "--tls-client-ca")
WORKERS: Final = TlsOptions("--worker-cert", "--worker-key", "--worker-ca")

CertOption = Annotated[
    Path | None,
    typer.Option(
        "--tls-cert", metavar="FILE", help="Certificate chain (PEM): all that is served here is served over TLS."
    ),
]
KeyOption = Annotated[Path | None, typer.Option("--tls-key", metavar="FILE", help="Its private key (PEM).")]
ClientCaOption = Annotated[
    Path | None,
    typer.Option(
        "--tls-client-ca", metavar="FILE", help="Authorities (PEM): only clients with a certificate of theirs may come."
    ),
]
WorkerCaOption = Annotated[
    Path | None,
    typer.Option(
        "--worker-ca",
        metavar="FILE",
        help="Authorities (PEM) of the certificates of https:// and grpcs:// workers; by default this machine's.",
    ),
]
WorkerCertOption = Annotated[
    Path | None,
    typer.Option("--worker-cert", metavar="FILE", help="Certificate (PEM) that such workers get to see, if they ask."),
]
WorkerKeyOption = Annotated[Path | None, typer.Option("--worker-key", metavar="FILE", help="Its private key (PEM).")]
WorkerNameOption = Annotated[
    str | None,
    typer.Option(
        "--worker-tls-name",
        metavar="NAME",
        help="What workers' certificates are for, if not the host of their URL: those found by address, for one.",
    ),
]


def own_tls(certificate: Path | None, key: Path | None, client_ca: Path | None) -> FileServerTls | None:
    """None: in the clear. Raises `OptionInvalid`."""
    if certificate is None and key is None:
        if client_ca is not None:
            raise OptionInvalid(OWN.authorities, f"asks clients for certificates, which needs {OWN.certificate}")
        return None
    return FileServerTls(TlsFiles(certificate, key, client_ca), OWN)


def worker_tls(certificate: Path | None, key: Path | None, ca: Path | None, name: str | None) -> ClientTls:
    """Raises `OptionInvalid`."""
    return ClientTls(TlsFiles(certificate, key, ca, name), WORKERS)
