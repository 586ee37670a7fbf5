"""Listening sockets of the gateway, that nobody shares by accident."""

import asyncio
import errno
import socket
from collections.abc import Callable, Sequence
from typing import Final

from kvherd.core.errors import OptionInvalid, PortInUse

_TRIES: Final = 8
"""A port that is free at one address may be taken at another, and if any will do, another is looked for."""

_UNSENT_BYTES: Final = 128 * 1024
"""So much of its answer the system keeps for a client that takes nothing: by itself it would be megabytes. What is on
its way to one that is far off is not among it.
"""
_NOTSENT_LOWAT: Final = getattr(socket, "TCP_NOTSENT_LOWAT", None)  # not every system has it

_Found = tuple[
    socket.AddressFamily, socket.SocketKind, int, str, tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]
]


def listen(host: str, port: int, *, backlog: int, port_option: str, host_option: str = "--host") -> list[socket.socket]:
    """Listen at every address of this name that is this machine's, on one port; 0 takes a free one.

    Without SO_REUSEPORT, so that two gateways never share a port. Raises `PortInUse` and `OptionInvalid`.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise OptionInvalid(host_option, f"{host!r} is no address of this machine: {error}") from None
    for left in reversed(range(_TRIES)):
        try:
            return _listen_at(found, port, backlog)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise OptionInvalid(host_option, f"cannot listen on {host}:{port}: {error}") from None
            if port or not left:
                raise PortInUse(port, port_option) from None
    raise AssertionError("the last try returns or raises")


def _listen_at(found: Sequence[_Found], port: int, backlog: int) -> list[socket.socket]:
    """Raises `OSError` if no address is ours, or the port of one is taken."""
    listeners: list[socket.socket] = []
    problem: OSError | None = None
    for family, kind, protocol, _, address in found:
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # past connections in TIME_WAIT do not count
            if family == socket.AF_INET6 and len(found) > 1:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            if _NOTSENT_LOWAT is not None:  # whoever connects inherits it
                listener.setsockopt(socket.IPPROTO_TCP, _NOTSENT_LOWAT, _UNSENT_BYTES)
            listener.bind((address[0], port, *address[2:]))
            listener.listen(backlog)  # now, since two sockets may bind one port as long as neither listens
            listener.setblocking(False)
        except OSError as error:  # a name may have addresses that this machine does not, such as ::1
            listener.close()
            problem = error
            if error.errno == errno.EADDRINUSE:
                break
        else:
            listeners.append(listener)
            port = listener.getsockname()[1]
    if problem is None or (listeners and problem.errno != errno.EADDRINUSE):
        return listeners
    for listener in listeners:
        listener.close()
    raise problem


async def take_callers(
    listener: socket.socket, make: Callable[[], asyncio.BaseProtocol], doors: list[asyncio.Server], *, backlog: int
) -> None:
    """Give whoever connects there a protocol, until the last of `doors`, which this adds, is closed with the listener.

    It is among them before it serves: asyncio forgets a server that serves when its making is cancelled.
    """
    try:
        loop = asyncio.get_running_loop()
        door = await loop.create_server(make, sock=listener, backlog=backlog, start_serving=False)
    except BaseException:
        listener.close()
        raise
    doors.append(door)
    await door.start_serving()
