"""What a request is given on its way: a name, a trace, and who it was that asked."""

import asyncio
import random
import re
from typing import Final

from kvherd.core.ids import RequestId

Headers = list[tuple[bytes, bytes]]

REQUEST_ID: Final = re.compile(rb"[!#$%&'()*+,\-./0-9:;<=>?@A-Z\[\]^_`a-z{|}~]{1,128}")
"""As a client may call its request: no space, quote or backslash."""

# Identifiers are half this process's own dice, half a count: one cast for each request would cost more than parsing it.
_OURS: Final = b"%016x" % random.SystemRandom().getrandbits(64)
_LOW: Final = [b"%02x" % low for low in range(256)]


class _Count:
    """Sixteen hexadecimal digits that go up by one; all but the last two are written once for 256 of them."""

    __slots__ = ("_high", "_high_digits", "_low")

    def __init__(self, start: int) -> None:
        self._high = start
        self._high_digits = b"%014x" % start
        self._low = 0

    def next(self) -> bytes:
        low = self._low
        if low == 256:
            self._high += 1
            self._high_digits = b"%014x" % self._high
            low = 0
        self._low = low + 1
        return self._high_digits + _LOW[low]


_counted: Final = _Count(random.SystemRandom().getrandbits(55))


def identify(headers: Headers, *, named: bool, traced: bool) -> RequestId:
    """The request's name: what the client calls it if it is `named`, else one that is added; and a trace if none is."""
    mine = _counted.next()
    if named:
        name = next(value for key, value in headers if key == b"x-request-id")
    else:
        name = _OURS + mine
        headers.append((b"x-request-id", name))
    if not traced:
        headers.append((b"traceparent", b"00-%b%b-%b-01" % (_OURS, mine, mine)))
    return RequestId(name.decode("latin-1"))


def identified_anew(*, traced: bool) -> tuple[bytes, bytes]:
    """A name for a request that has none, and the headers that say it, with a trace unless it has one."""
    mine = _counted.next()
    name = _OURS + mine
    if traced:
        return name, b"x-request-id: %b\r\n" % name
    return name, b"x-request-id: %b\r\ntraceparent: 00-%b-%b-01\r\n" % (name, name, mine)


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
