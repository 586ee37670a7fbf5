"""What comes out of a client's bytes: requests, and refusals in their place."""

from dataclasses import dataclass
from enum import Enum

from kvherd.core.errors import KvherdError
from kvherd.services.gateway.relay.edge import DataRequest
from kvherd.wire.http_heads import Block, KnownHead


class Stage(Enum):
    """Where in a message the bytes so far end."""

    IDLE = "between requests"
    HEAD = "headers"
    BODY = "body"


class Incoming:
    """A request and what its connection must know to answer it. `name` is the request's, as it is sent."""

    __slots__ = ("http10", "is_data", "keep_alive", "name", "request")

    def __init__(
        self, request: DataRequest, *, keep_alive: bool, http10: bool, is_data: bool, name: bytes = b""
    ) -> None:
        self.request = request
        self.name = name or request.request.encode("latin-1")
        self.keep_alive = keep_alive
        self.http10 = http10
        self.is_data = is_data


@dataclass(frozen=True, slots=True)
class Refusal:
    """No request but an error to answer in its place; the connection ends after it."""

    error: KvherdError


@dataclass(frozen=True, slots=True)
class Usual:
    """A request with a head that may come again, without what is of its own."""

    head: KnownHead
    method: str
    path: str
    query: str
    block: Block
    is_data: bool
    has_traceparent: bool
