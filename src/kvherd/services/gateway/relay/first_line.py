"""Methods and targets of requests, as everything behind the parser names them."""

from kvherd.core.errors import Unsupported

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
