"""The door of the data path: a client's API key, and how much it may ask for at a time."""

import asyncio
from typing import Final

from kvherd.core.fleet.keyring import Account, KeyLimitReached, Keyring, KeyUnknown
from kvherd.ports.worker import Flight, Landed, Responder
from kvherd.services.gateway.relay.edge import DataHandler, DataRequest, Launch
from kvherd.services.gateway.turns.access import AccessLog
from kvherd.services.gateway.waiting.passage import Passage, launch_none, launch_within
from kvherd.wire.http_heads import first, without

_HEADER: Final = b"authorization"


class _Use(Passage):
    """Of a key, by one request."""

    __slots__ = ("_account",)

    def __init__(self, landed: Landed, account: Account) -> None:
        super().__init__(landed)
        self._account = account

    def leave(self) -> None:
        self._account.end()

    def undo(self) -> None:
        self._account.take_back()


class KeyedPath:
    """A `DataHandler` and `Launch` before others. Raises `KeyUnknown` and `KeyLimitReached`.

    Where keys are wanted, the client's own ends here: an engine gets the gateway's key for it, or none.
    """

    def __init__(self, inner: DataHandler, keyring: Keyring, access: AccessLog, launch: Launch = launch_none) -> None:
        self._inner = inner
        self._launch = launch
        self._access = access
        self._keyring = keyring

    async def __call__(self, request: DataRequest, responder: Responder) -> None:
        if self._keyring.open:
            await self._inner(request, responder)
            return
        account, request = self._admit(request)
        try:
            await self._inner(request, responder)
        finally:
            account.end()

    def launch(self, request: DataRequest, responder: Responder, landed: Landed) -> Flight | None:
        if self._keyring.open:
            return self._launch(request, responder, landed)
        account, request = self._admit(request)
        return launch_within(self._launch, request, responder, _Use(landed, account))

    def judge(self, request: DataRequest) -> None:
        """Whose body may be read. Raises `KeyUnknown`."""
        if not self._keyring.open:
            self._account(request)

    def _admit(self, request: DataRequest) -> tuple[Account, DataRequest]:
        """Who asks; `Account.end` must follow. The request without the key, with its name."""
        account = self._account(request)
        try:
            account.begin(asyncio.get_running_loop().time())
        except KeyLimitReached as error:
            self._access.refused(request.changed(key=error.name), error)
            raise
        return account, request.changed(headers=without(request.headers, _HEADER), key=account.name)

    def _account(self, request: DataRequest) -> Account:
        try:
            return self._keyring.account(first(request.headers, _HEADER) or b"")
        except KeyUnknown as error:
            self._access.refused(request, error)
            raise
