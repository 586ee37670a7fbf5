"""Addresses that reach a machine's own neighbourhood, and in clouds its metadata and keys: never an engine."""

from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Final

_CARRIERS: Final = (IPv6Network("64:ff9b::/96"), IPv6Network("::/96"))
"""IPv6 that ends in the IPv4 address it leads to: by NAT64, and as it was once written."""
_METADATA: Final = frozenset({IPv6Address("fd00:ec2::254")})
"""Not link-local by number, and for the same use."""


def is_address(host: str) -> bool:
    """Whether it is an address as such, without a resolver's help."""
    return _address(host) is not None


def is_link_local(host: str) -> bool:
    """Whether it is such an address, in whatever form. Names are not looked up: ask of what they resolve to."""
    address = _address(host)
    if isinstance(address, IPv6Address):
        inner = _carried(address)
        return address.is_link_local or address in _METADATA or (inner is not None and inner.is_link_local)
    return address is not None and address.is_link_local


def _address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host.removeprefix("[").removesuffix("]").partition("%")[0])
    except ValueError:
        return None


def _carried(address: IPv6Address) -> IPv4Address | None:
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if any(address in network for network in _CARRIERS):
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return None
