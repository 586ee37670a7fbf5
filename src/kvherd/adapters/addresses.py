"""Where a host name leads, looked at before anything is sent there: what was checked is what is connected to."""

import asyncio
import socket

from kvherd.core.fleet.link_local import is_address, is_link_local


async def addresses_of(loop: asyncio.AbstractEventLoop, host: str, port: int) -> list[str]:
    """In the order of the resolver. Raises `OSError`: for what has no address, and for what has a link-local one.

    A name that led elsewhere when it was given may lead there now.
    """
    if is_address(host):
        found = [host]
    else:
        answers = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        found = list(dict.fromkeys(str(answer[4][0]) for answer in answers))
    for address in found:
        if is_link_local(address):
            raise OSError(f"it is at {address}, and link-local addresses are refused")
    if not found:
        raise OSError("its name has no address")
    return found
