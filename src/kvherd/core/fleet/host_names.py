"""By which names a server may be asked where nobody needs a key.

A page in a browser may have its own name resolved to this machine's address, and then reads here as if it were at home.
Its requests still say that name as `Host`, which no page can change. An address as such is no name that could be
resolved anew, so that those are always known.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import Final

from kvherd.core.errors import CallerError, OptionInvalid
from kvherd.core.fleet.link_local import is_address

OPTION: Final = "--host-name"
_MOST_SHOWN: Final = 100
_OF_NAMES: Final = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-._")


@dataclass(eq=False)
class HostUnknown(CallerError):
    """Asked for by a name that nobody gave this server; `mend` says what helps."""

    name: str
    mend: str

    def __str__(self) -> str:
        return f"this server is not known as {self.name[:_MOST_SHOWN]!r}: {self.mend}"


@dataclass(eq=False)
class PageElsewhere(CallerError):
    """A browser sends it for a page of another site."""

    def __str__(self) -> str:
        return "this is not for web pages of other sites"


class HostNames:
    """What a server that listens at `listens` is called. `replace` the names while it runs."""

    def __init__(self, listens: str, names: Iterable[str] = (), *, mend: str | None = None) -> None:
        """Raises `OptionInvalid` for what is no name."""
        self._local = listens == "localhost" or is_loopback(listens)
        self._listens = () if is_address(listens) else (listens.lower(),)
        self._mend = mend or f"ask it by its address, or have its operator name it so ({OPTION})"
        self.replace(names)

    @property
    def closed(self) -> bool:
        """Whether nobody has reason to ask by another name: it listens on this machine alone, or its names are told."""
        return self._local or bool(self._names)

    def replace(self, names: Iterable[str]) -> None:
        """Raises `OptionInvalid`."""
        self._names = frozenset(map(checked_host_name, names))

    def check(self, host: str) -> None:
        """Raise `HostUnknown` unless this `Host`, with or without a port, is the server's; empty is none told."""
        name = name_in(host)
        if name and not is_address(name) and name not in ("localhost", *self._listens) and name not in self._names:
            raise HostUnknown(name, self._mend)

    def check_page(self, *, host: str, origin: str | None, site: str | None) -> None:
        """Raise `PageElsewhere` for what a browser sends on behalf of a page of another site, as its `Origin` and
        `Sec-Fetch-Site` tell. Programs send neither.
        """
        if site == "cross-site":
            raise PageElsewhere
        if origin is None:
            return
        page = name_in(origin.partition("://")[2])
        if page not in ("localhost", name_in(host), *self._names) and not is_loopback(page):
            raise PageElsewhere


def name_in(host: str) -> str:
    """The host of `HOST`, `HOST:PORT` or `[ADDRESS]:PORT`, in lower case; all of it if it is none of these."""
    text = host.strip().lower()
    begin, bracket, rest = text.partition("]")
    if bracket and begin.startswith("[") and (not rest or (rest[0] == ":" and rest[1:].isdecimal())):
        return begin[1:]
    name, colon, port = text.partition(":")
    return name.removesuffix(".") if not colon or port.isdecimal() else text


def checked_host_name(name: str) -> str:
    """In lower case. Raises `OptionInvalid` unless it is a name, without a port."""
    lower = name.strip().lower().removesuffix(".")
    if not lower or not _OF_NAMES.issuperset(lower):
        raise OptionInvalid(OPTION, f"{name[:_MOST_SHOWN]!r} is not a host's name such as gateway.internal")
    return lower


def is_loopback(host: str) -> bool:
    """Whether it is an address of this machine to itself."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.is_loopback
