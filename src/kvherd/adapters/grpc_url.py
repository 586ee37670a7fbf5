"""Which URLs name an engine on gRPC."""

from kvherd.core.errors import OptionInvalid
from kvherd.core.fleet.shown_url import shown_url

_SCHEMES = ("grpc://", "grpcs://")


def grpc_address(url: str, *, option: str) -> str:
    """HOST:PORT of `grpc://HOST:PORT` or `grpcs://HOST:PORT`. Raises `OptionInvalid`, naming `option`, for all else."""
    address = next((url.removeprefix(scheme) for scheme in _SCHEMES if url.startswith(scheme)), "")
    host, _, port = address.rpartition(":")
    if not _is_host(host) or not (port.isascii() and port.isdecimal()):
        raise OptionInvalid(option, f"{shown_url(url)} must be grpc://HOST:PORT, as in grpc://127.0.0.1:51000")
    if not 0 < int(port) < 65536:
        raise OptionInvalid(option, f"{shown_url(url)}: {port} is no port; it must be 1 to 65535")
    return address


def grpc_target(url: str) -> tuple[str, bool]:
    """HOST:PORT, and whether it is to be spoken to over TLS."""
    return url.removeprefix("grpcs://").removeprefix("grpc://"), url.startswith("grpcs://")


def _is_host(host: str) -> bool:
    name = host.removeprefix("[").removesuffix("]")
    bracketed = host.startswith("[") and host.endswith("]")
    return bool(name) and name.isascii() and not set(name) & set("/?#@[] \t\n") and bracketed == (":" in name)
