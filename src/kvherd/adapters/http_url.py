"""Which base URLs name a worker."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from kvherd.core.errors import OptionInvalid
from kvherd.core.fleet.link_local import is_link_local
from kvherd.core.fleet.shown_url import shown_url

_OPTION = "worker URL"


@dataclass(frozen=True, slots=True)
class HttpAddress:
    """`prefix` is empty or a path without its last slash."""

    host: str
    port: int
    prefix: str = ""
    tls: bool = False

    @property
    def authority(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def http_address(url: str) -> HttpAddress:
    """Raises `OptionInvalid` that says what a worker's URL must look like."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise OptionInvalid(_OPTION, f"{shown_url(url)} is no URL") from None
    if parts.scheme not in ("http", "https"):
        raise OptionInvalid(_OPTION, f"{shown_url(url)}: it must begin with http:// or https://")
    if not host or not host.isascii() or any(character.isspace() for character in url):
        raise OptionInvalid(_OPTION, f"{shown_url(url)} names no host")
    if parts.username is not None or parts.query or parts.fragment:
        raise OptionInvalid(_OPTION, f"{shown_url(url)}: only a host, a port and a path are allowed")
    if port == 0:
        raise OptionInvalid(_OPTION, f"{shown_url(url)}: port 0 is none")
    if is_link_local(host):
        raise OptionInvalid(_OPTION, f"{shown_url(url)}: link-local addresses are refused")
    tls = parts.scheme == "https"
    return HttpAddress(host, port or (443 if tls else 80), parts.path.rstrip("/"), tls)
