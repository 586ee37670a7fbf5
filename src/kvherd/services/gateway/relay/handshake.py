"""TLS with a client before it has a connection: who fails here never reaches HTTP, and is told of and counted."""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Final

log = logging.getLogger(__name__)

REASONS: Final = (
    "certificate_expired",
    "certificate_missing",
    "certificate_untrusted",
    "refused_by_client",
    "no_tls",
    "too_slow",
    "left",
    "failed",
)
_SILENT_S: Final = 60.0
"""Whoever fails for one reason can fail often: so long the log is silent about it then."""
_A_TURN: Final = 16
"""So many clients are taken in a turn of the loop; the rest has its turn too."""
_REST_S: Final = 0.2
_OF_OPENSSL: Final = (
    ("PEER_DID_NOT_RETURN_A_CERTIFICATE", "certificate_missing", "it showed no certificate, and must"),
    ("HTTP_REQUEST", "no_tls", "it speaks HTTP in the clear"),
    ("WRONG_VERSION_NUMBER", "no_tls", "it does not speak TLS"),
    ("CERTIFICATE_EXPIRED", "refused_by_client", "it says that our certificate has expired"),
    ("UNKNOWN_CA", "refused_by_client", "it does not trust who signed our certificate"),
    ("ALERT_BAD_CERTIFICATE", "refused_by_client", "it refuses our certificate"),
    ("ALERT_CERTIFICATE_UNKNOWN", "refused_by_client", "it refuses our certificate"),
)


class Handshakes:
    """Clients of one listening socket. `refused` is called with one of `REASONS` for each that fails.

    They are accepted here, and not by a server of the loop: what such a server has read of a connection by the time
    that TLS begins on it is lost.
    """

    def __init__(
        self,
        context: ssl.SSLContext,
        group: asyncio.TaskGroup,
        *,
        make: Callable[[], asyncio.Protocol],
        at_most: int,
        within_s: float,
        refused: Callable[[str], None],
    ) -> None:
        """`make` is what a connection goes on with, once it is secured."""
        self._context = context
        self._group = group
        self._make = make
        self._at_most = at_most
        self._within_s = within_s
        self._refused = refused
        self._silent_until_s: dict[str, float] = {}
        self._under_way: dict[asyncio.Task[None], socket.socket] = {}
        self._door: socket.socket | None = None

    def open(self, door: socket.socket) -> None:
        """Take the clients of this socket, which listens and does not block, until `close`, which closes it."""
        self._door = door
        asyncio.get_running_loop().add_reader(door, self._accept)

    def close(self) -> None:
        """Take no more clients, and let those go who are not done."""
        if self._door is not None:
            asyncio.get_running_loop().remove_reader(self._door)
            self._door.close()
            self._door = None
        for task, client in self._under_way.items():
            _end(client)
            task.cancel()

    def _accept(self) -> None:
        for _ in range(_A_TURN):
            if self._door is None:
                return
            try:
                client, peer = self._door.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError as error:  # no descriptor is left: it would be called again at once, and in vain
                log.warning("no client can be taken for %g s: %s", _REST_S, error.strerror)
                self._rest()
                return
            self._begin(client, peer)

    def _rest(self) -> None:
        loop, door = asyncio.get_running_loop(), self._door
        assert door is not None, "only an open door is read from"
        loop.remove_reader(door)
        loop.call_later(_REST_S, lambda: self.open(door) if self._door is door else None)

    def _begin(self, client: socket.socket, peer: object) -> None:
        if len(self._under_way) >= self._at_most:
            client.close()
            return
        client.setblocking(False)
        task = self._group.create_task(self._greet(client, peer))
        self._under_way[task] = client
        task.add_done_callback(self._under_way.pop)

    async def _greet(self, client: socket.socket, peer: object) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(
                self._make, client, ssl=self._context, ssl_handshake_timeout=self._within_s
            )
        except OSError as error:
            self._tell(error, peer)

    def _tell(self, error: OSError, peer: object) -> None:
        reason, words = why_refused(error)
        self._refused(reason)
        now_s = asyncio.get_running_loop().time()
        if now_s < self._silent_until_s.get(reason, now_s) or reason == "left":
            return
        self._silent_until_s[reason] = now_s + _SILENT_S
        host = peer[0] if isinstance(peer, tuple) else "a client"
        log.warning("%s was turned away at its TLS handshake: %s", host, words)


def _end(client: socket.socket) -> None:
    """The transport has it and closes it; this lets the transport see an end."""
    with contextlib.suppress(OSError):
        client.shutdown(socket.SHUT_RDWR)


def why_refused(error: OSError) -> tuple[str, str]:
    """One of `REASONS`, and words for the log."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if "expired" in error.verify_message:
            return "certificate_expired", "its certificate has expired"
        return "certificate_untrusted", f"its certificate is not trusted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        told = error.reason or str(error)
        for part, reason, words in _OF_OPENSSL:
            if part in told:
                return reason, words
        return "failed", told.lower().replace("_", " ")
    if isinstance(error, TimeoutError) or "longer than" in str(error):
        return "too_slow", "it did not complete the handshake in time"
    return "left", error.strerror or str(error)
