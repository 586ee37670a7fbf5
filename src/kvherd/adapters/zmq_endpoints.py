"""Where each rank of an engine publishes, from the one endpoint that the engine was given.

tcp://HOST:PORT    rank r is at PORT + r
ipc://PATH         the only rank is at PATH
"""

import zmq

from kvherd.core.errors import OptionInvalid
from kvherd.core.ids import Rank

_IPC_PATH_BYTES = 107


def rank_endpoints(endpoint: str, ranks: int, *, option: str, listens: bool = False) -> dict[Rank, str]:
    """The endpoint of every rank. `listens`: this side binds it. Raises `OptionInvalid`, naming `option`."""
    if endpoint.startswith("tcp://"):
        found = _tcp(endpoint, ranks, option, listens=listens)
    elif endpoint.startswith("ipc://"):
        found = _ipc(endpoint, ranks, option)
    else:
        raise OptionInvalid(option, f"{endpoint!r} must be tcp://HOST:PORT or ipc://PATH")
    if not listens:
        _require_connectable(found, option)
    return found


def require_apart(events: dict[Rank, str], replay: dict[Rank, str]) -> None:
    """Raises `OptionInvalid` if a rank's events are where a rank's replay is."""
    both = sorted(set(events.values()) & set(replay.values()))
    if both:
        raise OptionInvalid("--replay", f"{both[0]} is an endpoint of --events too; set the two further apart")


def _tcp(endpoint: str, ranks: int, option: str, *, listens: bool) -> dict[Rank, str]:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not host or not port.isascii() or not port.isdigit():
        raise OptionInvalid(option, f"{endpoint!r} must be tcp://HOST:PORT")
    if host == "*" and not listens:
        raise OptionInvalid(
            option,
            f"{endpoint!r} is where an engine listens; name the host to connect to, as in tcp://127.0.0.1:{port}",
        )
    first = int(port)
    if not 0 < first <= 65536 - ranks:
        raise OptionInvalid(option, f"{endpoint!r}: ports {first} to {first + ranks - 1} must be 1 to 65535")
    return {Rank(rank): f"tcp://{host}:{first + rank}" for rank in range(ranks)}


def _ipc(endpoint: str, ranks: int, option: str) -> dict[Rank, str]:
    path = endpoint.removeprefix("ipc://")
    if not path or len(path.encode()) > _IPC_PATH_BYTES:
        raise OptionInvalid(option, f"{endpoint!r}: the path of a socket has 1 to {_IPC_PATH_BYTES} bytes")
    if ranks > 1:
        raise OptionInvalid(option, f"{endpoint!r} has room for one rank; several need a tcp:// endpoint")
    return {Rank(0): endpoint}


def _require_connectable(endpoints: dict[Rank, str], option: str) -> None:
    """ZeroMQ is the judge of hosts; it waits for whoever listens, so that nothing needs to."""
    with zmq.Context() as context, context.socket(zmq.SUB) as probe:
        for endpoint in endpoints.values():
            try:
                probe.connect(endpoint)
            except zmq.ZMQError as error:
                raise OptionInvalid(option, f"cannot connect to {endpoint!r}: {error.strerror}") from None
