"""Who is at the other end, where being on this machine opens a door."""

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from kvherd.core.fleet.host_names import is_loopback

_OF_PROXIES: Final = ("forwarded", "x-forwarded-for", "x-real-ip", "via")


def caller(peer: str, headers: Mapping[str, Any]) -> str:
    """The address of the caller; empty if it cannot be told.

    A proxy on this machine speaks for whoever is behind it, and what it says of them is no proof. A browser speaks for
    the page it shows, which may be anybody's.
    """
    if any(name in headers for name in _OF_PROXIES):
        return ""
    origin = headers.get("origin")
    if origin is not None and not _is_local(str(origin)):
        return ""
    return peer


def _is_local(origin: str) -> bool:
    try:
        host = urlsplit(origin).hostname or ""
    except ValueError:
        return False
    return host == "localhost" or is_loopback(host)
