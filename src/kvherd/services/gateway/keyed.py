"""The door of the data path: a client's API key, and how much it may ask for at a time."""

import asyncio

from kvherd.core.fleet.keyring import KeyLimitReached, Keyring, KeyUnknown
from kvherd.ports.worker import Responder
from kvherd.services.gateway.access import AccessLog
from kvherd.services.gateway.relay.edge import DataHandler, DataRequest

_HEADER = b"authorization"


class KeyedPath:
    """A `DataHandler` before another. Raises `KeyUnknown` and `KeyLimitReached`.

    Where keys are wanted, the client's own ends here: an engine gets the gateway's key for it, or none.
    """

    def __init__(self, inner: DataHandler, keyring: Keyring, access: AccessLog) -> None:
        self._inner = inner
        self._access = access
        self._keyring = keyring

    async def __call__(self, request: DataRequest, responder: Responder) -> None:
        if self._keyring.open:
            await self._inner(request, responder)
            return
        presented = next((value for name, value in request.headers if name == _HEADER), b"")
        try:
            account = self._keyring.account(presented)
            account.begin(asyncio.get_running_loop().time())
        except KeyLimitReached as error:
            self._access.refused(request._replace(key=error.name), error)
            raise
        except KeyUnknown as error:
            self._access.refused(request, error)
            raise
        try:
            headers = [header for header in request.headers if header[0] != _HEADER]
            await self._inner(request._replace(headers=headers, key=account.name), responder)
        finally:
            account.end()
