"""What the relay hands to the rest of the gateway, and the bounds it keeps."""

import re
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvherd.core.errors import KvherdError
from kvherd.core.ids import RequestId
from kvherd.ports.worker import Flight, Landed, Responder
from kvherd.wire.openai.stored import CONVERSATIONS, RESPONSES


class DataRequest:
    """One request, complete and within bounds.

    Header names are in lower case; headers that concern only the client's own connection are gone. `x-request-id` and
    `traceparent` are always there: the client's, or made here. `query` has no question mark. `key` is the name of the
    client's API key, empty where none is wanted; `waited_s` is what it waited since it was complete, for its turn or
    for its keeper's name. Never changed. No dataclass: one is made for every request, and the
    `__init__` that a dataclass is given cannot be compiled.
    """

    __slots__ = ("body", "headers", "key", "method", "path", "peer", "query", "request", "waited_s")

    def __init__(  # noqa: PLR0917 - what a request is
        self,
        method: str,
        path: str,
        query: str,
        headers: Sequence[tuple[bytes, bytes]],
        body: bytes,
        peer: str,
        request: RequestId,
        key: str = "",
        waited_s: float = 0.0,
    ) -> None:
        self.method = method
        self.path = path
        self.query = query
        self.headers = headers
        self.body = body
        self.peer = peer
        self.request = request
        self.key = key
        self.waited_s = waited_s

    def changed(
        self,
        *,
        headers: Sequence[tuple[bytes, bytes]] | None = None,
        body: bytes | None = None,
        key: str | None = None,
        waited_s: float = 0.0,
    ) -> "DataRequest":
        """The same but for what is given; `waited_s` is added to what it waited before."""
        return DataRequest(
            self.method,
            self.path,
            self.query,
            self.headers if headers is None else headers,
            self.body if body is None else body,
            self.peer,
            self.request,
            self.key if key is None else key,
            self.waited_s + waited_s,
        )

    @property
    def target(self) -> str:
        """Path and query as the client sent them."""
        return f"{self.path}?{self.query}" if self.query else self.path


DataHandler = Callable[[DataRequest, Responder], Awaitable[None]]
"""Answers one request of the data path. Raises a `KvherdError` before `responder.start` to have it answered as an
OpenAI error with its status. Is cancelled when the client leaves.
"""

Launch = Callable[[DataRequest, Responder, Landed], Flight | None]
"""The same without a task, for an answer that is a matter of bytes alone. None: nothing has happened, and the handler
is to be called. May raise a `KvherdError` like the handler; afterwards it lands, once, unless its flight was cancelled.
"""

Judge = Callable[[DataRequest], None]
"""Judges a request by its head, before its body, empty here, is read. Raises a `KvherdError` to have it refused."""

Unread = Callable[[KvherdError, str], None]
"""Told why a client, by its address, was answered in place of a request that was not read whole."""

Message = MutableMapping[str, Any]
AsgiApp = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]

DATA_PATHS: Final = frozenset({"/generate", "/tokenize", "/detokenize", "/v1/chat/completions", "/v1/completions"}) | {
    "/v1/embeddings",
    "/v1/responses",
}
"""Those that are known by name; what else is posted below `/v1/` is data, too."""
_PLAIN: Final = re.compile(r"/v1(?:/[A-Za-z0-9_~:@-][A-Za-z0-9_~:@.-]*)+")
"""Neither dots that lead elsewhere, nor bytes that stand for others, nor what some servers read as a slash."""

STORED: Final[tuple[str, ...]] = (RESPONSES, CONVERSATIONS)
"""Below these, engines keep answers and conversations by name, to be read and deleted."""
_KEPT: Final = tuple(f"{root}/" for root in STORED)


def is_data(method: str, path: str) -> bool:
    """Whether the data handler answers it. A path that could mean another one after decoding is not the data path's:
    what a client may ask of an engine must not depend on how that engine reads `/v1/../flush_cache`.
    """
    if method == "POST":
        return path in DATA_PATHS or _PLAIN.fullmatch(path) is not None
    return method in ("GET", "DELETE") and path.startswith(_KEPT) and _PLAIN.fullmatch(path) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayLimits:
    """Bounds of one gateway's HTTP side. Times are kept to a tick's precision, and so is what all bodies take."""

    head_bytes: int = 32 * 1024
    headers: int = 200
    body_bytes: int = 32 * 1024 * 1024
    bodies_bytes: int = 512 * 1024 * 1024
    write_buffer_bytes: int = 64 * 1024
    connections: int = 8192
    idle_s: float = 75.0
    head_s: float = 10.0
    body_idle_s: float = 20.0
    body_s: float = 300.0
    stalled_write_s: float = 60.0
    linger_s: float = 2.0
    drain_s: float = 20.0
    tick_s: float = 0.25
