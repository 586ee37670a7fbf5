"""Ports, before anything is started on them."""

import errno
import socket
from collections.abc import Iterable

from kvherd.core.errors import OptionInvalid, PortInUse

_LEAST_COMMON = 1024


def require_free(host: str, ports: Iterable[int], *, option: str, host_option: str = "--host") -> None:
    """Raise `PortInUse` for the first of `ports` that somebody has, naming the `option` that chooses another, and
    `OptionInvalid` for what is no port, or no address of this machine.
    """
    for port in ports:
        if not 0 < port < 65536:
            raise OptionInvalid(option, f"{port} is no port; choose one so that all the ports used are below 65536")
        family, address = _address(host, port, host_option)
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # Connections of an earlier life in TIME_WAIT hold nobody back; a listener still does.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                raise _refusal(error, host, port, option, host_option) from error


def _address(host: str, port: int, host_option: str) -> tuple[int, tuple[str | int, ...] | tuple[int, bytes]]:
    """Where the first address of that name is. An empty one would be every address, and nobody means that."""
    if not host:
        raise OptionInvalid(host_option, "is empty; 127.0.0.1 is this machine alone, 0.0.0.0 all its addresses")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise OptionInvalid(host_option, _not_ours(host, getattr(error, "strerror", None) or str(error))) from None
    return found[0][0], found[0][4]


def _refusal(error: OSError, host: str, port: int, option: str, host_option: str) -> OptionInvalid | PortInUse:
    if error.errno == errno.EADDRINUSE:
        return PortInUse(port, option)
    if error.errno == errno.EACCES:
        return OptionInvalid(option, f"this user may not listen on port {port}; choose one from {_LEAST_COMMON} on")
    return OptionInvalid(host_option, _not_ours(host, error.strerror or str(error)))


def _not_ours(host: str, why: str) -> str:
    words = f"{host!r} is no address of this machine ({why[:1].lower()}{why[1:]})"
    return f"{words}; 127.0.0.1 is this machine alone, 0.0.0.0 all its addresses"
