"""TLS of the gateway to its clients and to its workers, by files that may be renewed while it runs."""

from pathlib import Path
from typing import Final

from kvherd.adapters.tls import ClientTls, FileServerTls, TlsFiles, TlsOptions
from kvherd.core.errors import OptionInvalid

OWN: Final = TlsOptions("--tls-cert", "--tls-key", "--tls-client-ca")
WORKERS: Final = TlsOptions("--worker-cert", "--worker-key", "--worker-ca")


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
