"""What a request is given on its way: a name, a trace, and who it was that asked."""

import asyncio
import itertools
import random
from typing import Final

from kvherd.core.ids import RequestId

Headers = list[tuple[bytes, bytes]]

# Identifiers are half this process's own dice, half a count: one cast for each request would cost more than parsing it.
_OURS: Final = b"%016x" % random.SystemRandom().getrandbits(64)
_counted = itertools.count(random.SystemRandom().getrandbits(63))


def identify(headers: Headers, *, named: bool, traced: bool) -> RequestId:
    """The request's name: what the client calls it if it is `named`, else one that is added; and a trace if none is."""
    mine = b"%016x" % next(_counted)
    if named:
        name = next(value for key, value in headers if key == b"x-request-id")
    else:
        name = _OURS + mine
        headers.append((b"x-request-id", name))
    if not traced:
        headers.append((b"traceparent", b"00-%b%b-%b-01" % (_OURS, mine, mine)))
    return RequestId(name.decode("latin-1"))


def identified_anew(*, traced: bool) -> tuple[bytes, tuple[tuple[bytes, bytes], ...], bytes]:
    """A name for a request that has none, the headers that say it, and these as they are sent."""
    mine = b"%016x" % next(_counted)
    name = _OURS + mine
    if traced:
        return name, ((b"x-request-id", name),), b"x-request-id: %b\r\n" % name
    trace = b"00-%b-%b-01" % (name, mine)
    own = ((b"x-request-id", name), (b"traceparent", trace))
    return name, own, b"x-request-id: %b\r\ntraceparent: %b\r\n" % (name, trace)


def forwarded(peer: str, *, secured: bool = False) -> tuple[tuple[bytes, bytes], ...]:
    """Who is asking, for the worker's log, behind whatever the client itself said: the last line is the one we saw.

    `secured`: over TLS.
    """
    how = b";proto=https" if secured else b""
    host = peer.rpartition(":")[0].strip("[]").encode("ascii", "replace")
    if not host or host == b"unix":
        return ((b"forwarded", b"for=unknown" + how),)
    node = b'"[%b]"' % host if b":" in host else host
    return ((b"forwarded", b"for=" + node + how), (b"x-forwarded-for", host))


def address_of(transport: asyncio.Transport, which: str) -> str:
    """HOST:PORT of one end: `peername` or `sockname`."""
    address = transport.get_extra_info(which)
    return f"{address[0]}:{address[1]}" if isinstance(address, tuple) else "unix:0"
