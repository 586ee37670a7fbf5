"""Whether a port can be listened on, asked of the kernel."""

import errno
import socket


def port_is_free(host: str, port: int) -> bool:
    """False only if somebody listens there; 0 and addresses that cannot be bound at all are the listener's affair."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # remains of closed connections do not count
        try:
            probe.bind(("0.0.0.0" if host == "*" else host, port))
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True
