"""Methods and targets of requests, as everything behind the parser names them."""

import re
from typing import Final

from kvherd.core.errors import Unsupported

HOST: Final = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=%\-\[\]:]*")
METHODS = {name.encode(): name for name in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")}


def rare_method(method: bytes) -> str:
    """Raises `Unsupported` for CONNECT, whatever its target: what follows it is for nobody here."""
    if method == b"CONNECT":
        raise Unsupported("CONNECT")
    return method.decode("latin-1")


def path_of(target: str) -> str:
    """The path of a target in absolute form; `*` stays itself."""
    _, scheme, rest = target.partition("://")
    if not scheme:
        return target
    _, slash, path = rest.partition("/")
    return slash + path if slash else "/"


def end_of_target(raw: bytes, begin: int, method: bytes, target: bytes) -> int:
    """Where the target ends in the first line of a request of HTTP with single spaces, one that begins at `begin` or
    later; -1 if there is none. What llhttp took for one may be of RTSP.
    """
    at = raw.find(b"%b %b HTTP/" % (method, target), begin)
    return at if at < 0 else at + len(method) + len(target) + 1
