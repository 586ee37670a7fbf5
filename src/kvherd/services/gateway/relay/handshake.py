"""TLS with a client before it has a connection: who fails here never reaches HTTP, and is told of and counted."""

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import Final, cast

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
    """Those that are under way. `refused` is called with one of `REASONS` for each that fails."""

    def __init__(
        self,
        context: ssl.SSLContext,
        group: asyncio.TaskGroup,
        *,
        at_most: int,
        within_s: float,
        refused: Callable[[str], None],
    ) -> None:
        self._context = context
        self._group = group
        self._at_most = at_most
        self._within_s = within_s
        self._refused = refused
        self._silent_until_s: dict[str, float] = {}
        self._under_way: set[asyncio.Task[None]] = set()

    def first(self, make: Callable[[], asyncio.Protocol]) -> asyncio.Protocol:
        """What a new connection begins with; `make` is what it goes on with, once it is secured."""
        return _Arrived(self, make)

    def begin(self, arrived: "_Arrived", transport: asyncio.Transport, make: Callable[[], asyncio.Protocol]) -> None:
        if len(self._under_way) >= self._at_most:
            transport.abort()
            return
        task = self._group.create_task(self._greet(arrived, transport, make))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    def stop(self) -> None:
        for task in self._under_way:
            task.cancel()

    async def _greet(
        self, arrived: "_Arrived", transport: asyncio.Transport, make: Callable[[], asyncio.Protocol]
    ) -> None:
        loop, early = asyncio.get_running_loop(), _Early()
        if transport.is_closing():
            self._tell(ConnectionResetError("it left"), transport.get_extra_info("peername"))
            return
        # Runs once start_tls has put its protocol in place and paused reading, and before it lets reading go on.
        loop.call_soon(arrived.pass_on, transport)
        try:
            secured = await loop.start_tls(
                transport, early, self._context, server_side=True, ssl_handshake_timeout=self._within_s
            )
        except OSError as error:
            self._tell(error, transport.get_extra_info("peername"))
            return
        assert secured is not None
        early.hand_over(secured, make())

    def _tell(self, error: OSError, peer: object) -> None:
        reason, words = why_refused(error)
        self._refused(reason)
        now_s = asyncio.get_running_loop().time()
        if now_s < self._silent_until_s.get(reason, now_s) or reason == "left":
            return
        self._silent_until_s[reason] = now_s + _SILENT_S
        host = peer[0] if isinstance(peer, tuple) else "a client"
        log.warning("%s was turned away at its TLS handshake: %s", host, words)


class _Arrived(asyncio.Protocol):
    """Keeps what comes before the handshake has begun: uvloop reads as soon as this has returned from
    `connection_made`, paused or not, and a client's hello may be there already.
    """

    def __init__(self, handshakes: Handshakes, make: Callable[[], asyncio.Protocol]) -> None:
        self._handshakes = handshakes
        self._make = make
        self._came: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._handshakes.begin(self, cast("asyncio.Transport", transport), self._make)

    def data_received(self, data: bytes) -> None:
        self._came.append(data)

    def pass_on(self, transport: asyncio.Transport) -> None:
        """Give the transport's protocol what came, as if the transport had read it now."""
        protocol = cast("asyncio.BufferedProtocol", transport.get_protocol())
        left = b"".join(self._came)
        while left:
            room = memoryview(protocol.get_buffer(len(left)))
            taken = min(len(room), len(left))
            room[:taken] = left[:taken]
            protocol.buffer_updated(taken)
            left = left[taken:]


class _Early(asyncio.Protocol):
    """Keeps what comes with the handshake's last bytes, before anybody is there to take it."""

    def __init__(self) -> None:
        self._came: list[bytes] = []
        self._ended = self._lost = False

    def data_received(self, data: bytes) -> None:
        self._came.append(data)

    def eof_received(self) -> None:
        self._ended = True

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True

    def hand_over(self, transport: asyncio.Transport, to: asyncio.Protocol) -> None:
        if self._lost:
            return
        transport.set_protocol(to)
        to.connection_made(transport)
        for data in self._came:
            to.data_received(data)
        if self._ended:
            to.eof_received()


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
