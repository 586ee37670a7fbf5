"""What the gateway may rely on from certificates that are renewed while it runs."""

import ssl
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Pem:
    """A certificate chain and its key, empty if there is none, and whom the other side's must come from, if it must."""

    certificate: bytes
    key: bytes = field(repr=False)
    authorities: bytes | None


class Renewed(Protocol):
    """Certificates that may change."""

    def refresh(self) -> bool:
        """Read the files if they have changed; whether something new holds from now on. May block for a moment.

        What cannot be used is logged with its reason, and what was before still holds.
        """
        ...


class WorkerTls(Renewed, Protocol):
    """TLS to workers."""

    @property
    def expires_at_s(self) -> float | None:
        """When the certificate that workers are shown expires, in seconds since 1970; None without one."""
        ...

    def peer_expires_at_s(self, url: str) -> float | None:
        """The same of the certificate that the worker at this URL showed last; None if it showed none yet."""
        ...


class ServerTls(Renewed, Protocol):
    """Connections that are open keep the certificate they began with; new ones get the newest."""

    @property
    def context(self) -> ssl.SSLContext: ...

    @property
    def expires_at_s(self) -> float:
        """When the certificate expires, in seconds since 1970."""
        ...

    def pem(self) -> Pem:
        """What the files said when they were read last, for libraries with a TLS of their own."""
        ...
