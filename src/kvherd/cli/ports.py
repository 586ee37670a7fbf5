"""Ports, before anything is started on them."""

import socket
from collections.abc import Iterable

from kvherd.core.errors import OptionInvalid, PortInUse


def require_free(host: str, ports: Iterable[int], *, option: str) -> None:
    """Raise `PortInUse` for the first of `ports` that somebody has, naming the `option` that chooses another."""
    for port in ports:
        if not 0 < port < 65536:
            raise OptionInvalid(option, f"{port} is no port; choose one so that all the ports used are below 65536")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # Connections of an earlier life in TIME_WAIT hold nobody back; a listener still does.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                raise PortInUse(port, option) from error
