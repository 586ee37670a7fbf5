"""TLS by files that may change: certificates are renewed while a gateway runs, and old connections live on."""

import asyncio
import contextlib
import logging
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, TypeVar, cast
from urllib.parse import urlsplit

from kvherd.adapters.addresses import addresses_of
from kvherd.core.errors import FrameInvalid, OptionInvalid
from kvherd.ports.tls import Pem
from kvherd.wire.certificate import expires_at, starts_at

log = logging.getLogger(__name__)

DAY_S: Final = 86_400.0
_WARNS_S: Final = 14 * DAY_S
_FAREWELL_S: Final = 2.0
"""Servers of grpc answer no goodbye of TLS; waiting for one longer would only keep the connection."""
_SILENT_S: Final = 1.0
"""Whoever connects has a deadline: one address from which nothing comes must not take all of it."""
_MOST_PEERS: Final = 4096
HTTP_1: Final = "http/1.1"
HTTP_2: Final = "h2"

_REFUSALS: Final = {
    "alert_certificate_required": "it wants a certificate from us, and was shown none",
    "alert_certificate_expired": "it refuses our certificate: it has expired",
    "alert_certificate_revoked": "it refuses our certificate: it was revoked",
    "alert_unknown_ca": "it refuses our certificate: it does not know who signed it",
    "alert_certificate_unknown": "it refuses our certificate",
    "alert_bad_certificate": "it refuses our certificate",
}
"""What the other side's alerts mean to people, by how OpenSSL calls them."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of this machine. `authorities` are whom the other side's certificate must come from; None: for a server
    nobody's is asked for, for a client those that this machine trusts. `server_name` is what a server's certificate
    must be for, if not the name it is reached by.
    """

    certificate: Path | None = None
    key: Path | None = None
    authorities: Path | None = None
    server_name: str | None = None


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """How the options that name the files are called, for messages."""

    certificate: str
    key: str
    authorities: str


@dataclass(frozen=True, slots=True)
class _Held:
    """What the files said when they were read last."""

    pem: Pem
    expires: datetime | None


class _Files:
    def __init__(self, files: TlsFiles, options: TlsOptions) -> None:
        self.files = files
        self._options = options
        self._seen: object = None

    def changed(self) -> bool:
        """Since they were read last."""
        return self._look() != self._seen

    def read(self) -> _Held:
        """Raises `OptionInvalid` for what is missing, does not belong together, or has expired."""
        files, options = self.files, self._options
        self._seen = self._look()
        if (files.certificate is None) != (files.key is None):
            missing = options.key if files.key is None else options.certificate
            raise OptionInvalid(missing, "is missing: a certificate and its key come together")
        certificate = _bytes_of(files.certificate, options.certificate)
        key, authorities = _bytes_of(files.key, options.key), _bytes_of(files.authorities, options.authorities)
        expires = self._expiry(certificate) if certificate is not None else None
        if authorities is not None:
            self._expiry(authorities, options.authorities, files.authorities)
        return _Held(Pem(certificate or b"", key or b"", authorities), expires)

    def load(self, context: ssl.SSLContext) -> None:
        """Give the context what the files hold. Raises `OptionInvalid`."""
        files, options = self.files, self._options
        if files.certificate is not None and files.key is not None:
            try:
                # Without a password here OpenSSL would ask the terminal for one.
                context.load_cert_chain(files.certificate, files.key, password=lambda: "")
            except (ssl.SSLError, OSError, ValueError) as error:
                why = getattr(error, "reason", None) or str(error)
                problem = f"{files.key} is no key of {files.certificate}, or is encrypted ({why})"
                raise OptionInvalid(options.key, problem) from None
        if files.authorities is not None:
            try:
                context.load_verify_locations(files.authorities)
            except (ssl.SSLError, OSError) as error:
                raise OptionInvalid(options.authorities, f"{files.authorities} holds no authorities: {error}") from None

    def _expiry(self, pem: bytes, option: str | None = None, path: Path | None = None) -> datetime:
        option, path = option or self._options.certificate, path or self.files.certificate
        try:
            starts, expires = map(datetime.fromisoformat, (starts_at(pem), expires_at(pem)))
        except (FrameInvalid, ValueError) as error:
            raise OptionInvalid(option, f"{path} is no certificate: {error}") from None
        left_s = expires.timestamp() - time.time()
        if left_s <= 0:
            raise OptionInvalid(option, f"the certificate {path} expired on {expires:%Y-%m-%d at %H:%M} UTC; renew it")
        if starts.timestamp() > time.time():
            log.warning("the certificate %s is refused before %s UTC", path, f"{starts:%Y-%m-%d at %H:%M}")
        if left_s < _WARNS_S:
            log.warning("the certificate %s expires in %.1f days", path, left_s / DAY_S)
        return expires

    def _look(self) -> object:
        return tuple(_signature(one) for one in (self.files.certificate, self.files.key, self.files.authorities))


class FileServerTls:
    """Implements `ports.tls.ServerTls`. Raises `OptionInvalid` for files that cannot be used.

    With `authorities`, a client without a certificate from one of them is turned away.
    """

    def __init__(self, files: TlsFiles, options: TlsOptions) -> None:
        self._files = _Files(files, options)
        if files.certificate is None:
            raise OptionInvalid(options.certificate, "is missing: a server has a certificate and its key")
        self._held = self._files.read()
        self._newest = self._made()
        self._context = self._made()
        # Every handshake asks; the context that a listener was given at its start stands for whichever is newest.
        self._context.sni_callback = self._give_newest

    @property
    def context(self) -> ssl.SSLContext:
        return self._context

    @property
    def expires_at_s(self) -> float:
        return self._held.expires.timestamp() if self._held.expires else 0.0

    def pem(self) -> Pem:
        return self._held.pem

    def refresh(self) -> bool:
        if not self._files.changed():
            return False
        try:
            held = self._files.read()
            newest = self._made()
        except OptionInvalid as error:
            log.warning("TLS stays as it was: %s", error)
            return False
        self._held, self._newest = held, newest
        log.info("read the certificate %s again", self._files.files.certificate)
        return True

    def _made(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols([HTTP_1])
        self._files.load(context)
        if self._files.files.authorities is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _give_newest(self, connection: ssl.SSLObject | ssl.SSLSocket, _name: str | None, _: ssl.SSLContext) -> None:
        connection.context = self._newest


class ClientTls:
    """Implements `ports.tls.WorkerTls`, over HTTP and gRPC. Raises `OptionInvalid` for files that cannot be used."""

    def __init__(self, files: TlsFiles, options: TlsOptions) -> None:
        self._files = _Files(files, options)
        self._contexts: dict[str, ssl.SSLContext] = {}
        self._pem: Pem | None = None
        self._peers: dict[tuple[str, int], float] = {}
        self._take()

    @property
    def server_name(self) -> str | None:
        return self._files.files.server_name

    @property
    def expires_at_s(self) -> float | None:
        """When our own certificate expires, in seconds since 1970; None without one."""
        return self._held.expires.timestamp() if self._held.expires else None

    def peer_expires_at_s(self, url: str) -> float | None:
        """As `ports.tls.WorkerTls.peer_expires_at_s`."""
        parts = urlsplit(url)
        return self._peers.get((parts.hostname or "", parts.port or 443))

    def saw(self, host: str, port: int, certificate: Mapping[str, Any]) -> None:
        """What a server showed, which was found good."""
        peer, told = (host.lower(), port), str(certificate.get("notAfter", ""))
        expires_at_s = float(ssl.cert_time_to_seconds(told)) if told else 0.0
        left_s = expires_at_s - time.time()
        if left_s < _WARNS_S and self._peers.get(peer) != expires_at_s:
            log.warning("the certificate of %s:%d expires in %.1f days", host, port, left_s / DAY_S)
        self._peers.pop(peer, None)
        self._peers[peer] = expires_at_s
        if len(self._peers) > _MOST_PEERS:
            del self._peers[next(iter(self._peers))]

    def refresh(self) -> bool:
        """As `ports.tls.Renewed.refresh`; connections that are made from now on use what is new."""
        if not self._files.changed():
            return False
        try:
            self._take()
        except OptionInvalid as error:
            log.warning("TLS to workers stays as it was: %s", error)
            return False
        return True

    def context(self, protocol: str) -> ssl.SSLContext:
        """For connections that speak this protocol, as ALPN names it. Another one once something was renewed."""
        context = self._contexts.get(protocol)
        if context is None:
            context = self._contexts[protocol] = self._made(protocol)
        return context

    def pem(self) -> Pem:
        """For libraries with a TLS of their own; with the authorities that this machine trusts, if no others are named:
        they would take a list of theirs. The same until something was renewed.
        """
        if self._pem is None:
            own = self._held.pem
            authorities = own.authorities or _authorities_of(self.context(HTTP_2))
            self._pem = Pem(own.certificate, own.key, authorities)
        return self._pem

    def _take(self) -> None:
        held = self._files.read()
        # Files are loaded now, while they are known to be whole; who trusts this machine mostly never needs a context.
        named = self._files.files.certificate or self._files.files.authorities
        contexts = {protocol: self._made(protocol) for protocol in (HTTP_1, HTTP_2)} if named else {}
        self._held, self._contexts, self._pem = held, contexts, None

    def _made(self, protocol: str) -> ssl.SSLContext:
        trusts_machine = self._files.files.authorities is None
        context = ssl.create_default_context() if trusts_machine else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.set_alpn_protocols([protocol])
        self._files.load(context)
        return context


def _authorities_of(context: ssl.SSLContext) -> bytes | None:
    """Whom this machine trusts."""
    return "".join(map(ssl.DER_cert_to_PEM_cert, context.get_ca_certs(binary_form=True))).encode() or None


def trusting_this_machine() -> ClientTls:
    """No certificate of one's own, and the authorities that this machine trusts."""
    return ClientTls(TlsFiles(), TlsOptions("", "", ""))


_Made = TypeVar("_Made")
_Reached = TypeVar("_Reached")


async def connected(
    loop: asyncio.AbstractEventLoop,
    make: Callable[[], _Made],
    host: str,
    port: int,
    tls: ClientTls | None,
    *,
    protocol: str = HTTP_1,
) -> _Made:
    """A protocol of the event loop's, connected. Raises `OSError`, which `why_untrusted` explains. It need not inherit
    from `asyncio.Protocol`: a class that does cannot be compiled.

    A server that does not say over TLS that it speaks HTTP/2 is not spoken to in it.
    """
    making = cast("Callable[[], asyncio.Protocol]", make)
    if tls is None:
        _, plain = await _reached(loop, host, port, lambda address: loop.create_connection(making, address, port))
        return cast("_Made", plain)
    context, server_name = tls.context(protocol), tls.server_name or host
    transport, made = await _reached(
        loop,
        host,
        port,
        lambda address: loop.create_connection(
            making, address, port, ssl=context, server_hostname=server_name, ssl_shutdown_timeout=_FAREWELL_S
        ),
    )
    session = transport.get_extra_info("ssl_object")
    tls.saw(host, port, session.getpeercert() or {})
    if protocol == HTTP_2 and session.selected_alpn_protocol() != HTTP_2:
        transport.abort()
        raise OSError("it does not speak HTTP/2 over TLS (no h2 in ALPN), which gRPC needs")
    return cast("_Made", made)


async def _reached(
    loop: asyncio.AbstractEventLoop, host: str, port: int, reach: Callable[[str], Awaitable[_Reached]]
) -> _Reached:
    """At the first of its addresses that answers, soon if it is not the last."""
    *others, last = await addresses_of(loop, host, port)
    for address in others:
        with contextlib.suppress(OSError):  # silence is one, too
            async with asyncio.timeout(_SILENT_S):
                return await reach(address)
    return await reach(last)


def why_untrusted(error: OSError) -> str:
    """What a connection that failed says of the other side, for people."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message.rstrip('.')}"
    if isinstance(error, ssl.SSLError):
        reason = (error.reason or str(error)).lower()
        refusal = next((words for alert, words in _REFUSALS.items() if alert in reason), None)
        return refusal or f"TLS with it failed: {reason.replace('_', ' ')}"
    return error.strerror or str(error)


def _bytes_of(path: Path | None, option: str) -> bytes | None:
    if path is None:
        return None
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise OptionInvalid(option, f"cannot read {path}: it is no regular file")
        return path.read_bytes()
    except OSError as error:
        raise OptionInvalid(option, f"cannot read {path}: {error.strerror}") from None


def _signature(path: Path | None) -> tuple[int, int, int] | None:
    try:
        seen = path.stat() if path is not None else None
    except OSError:
        return None
    return (seen.st_mtime_ns, seen.st_size, seen.st_ino) if seen else None
