"""Listening sockets that are never shared by accident."""

import errno
import socket

from kvherd.core.errors import OptionInvalid, PortInUse

BACKLOG = 2048


def listen(host: str, port: int, *, option: str) -> socket.socket:
    """Bind and listen without SO_REUSEPORT. Raises `PortInUse`, or `OptionInvalid` for an address that is not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(port, option) from None
        raise OptionInvalid(option, f"cannot listen on {host}:{port}: {error.strerror}") from None
    return listener
