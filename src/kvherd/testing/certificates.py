"""X.509 certificates for tests, without a library or a program: ECDSA on P-256 by hand, good for nothing but tests.

authority = Authority("test authority")
files = authority.issue(directory, "gateway", names=("localhost",), addresses=("127.0.0.1",))
"""

import base64
import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

_P = 2**256 - 2**224 + 2**192 + 2**96 - 1
_N = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_G = (
    0x6B17D1F2E12C4247F8BCE6E563A440F277037D812DEB33A0F4A13945D898C296,
    0x4FE342E2FE1A7F9B8EE7EB4A7C0F9E162BCE33576B315ECECBB6406837BF51F5,
)
_Point = tuple[int, int] | None
DAY = timedelta(days=1)


@dataclass(frozen=True)
class IssuedFiles:
    certificate: Path
    key: Path
    authority: Path


@dataclass
class Authority:
    """Signs certificates and is trusted by who has its own."""

    name: str = "kvherd test authority"
    _secret: int = field(default_factory=lambda: secrets.randbelow(_N - 1) + 1)

    @property
    def pem(self) -> bytes:
        rules = _seq(_oid("2.5.29.19"), b"\x01\x01\xff", _tlv(4, _seq(b"\x01\x01\xff")))  # it may sign others
        now = datetime.now(UTC)
        return _pem("CERTIFICATE", self._certificate(self.name, self._secret, [rules], now - DAY, now + 30 * DAY))

    def issue(
        self,
        directory: Path,
        name: str,
        *,
        names: Sequence[str] = ("localhost",),
        addresses: Sequence[str] = ("127.0.0.1",),
        starts: timedelta = -DAY,
        ends: timedelta = DAY,
    ) -> IssuedFiles:
        """Write NAME.pem, NAME.key and ca.pem; valid from `starts` to `ends`, counted from now."""
        secret = secrets.randbelow(_N - 1) + 1
        known_as = [_tlv(0x82, one.encode()) for one in names]
        known_as += [_tlv(0x87, ip_address(one).packed) for one in addresses]
        extension = _seq(_oid("2.5.29.17"), _tlv(4, _seq(*known_as)))
        now = datetime.now(UTC)
        signed = self._certificate(name, secret, [extension], now + starts, now + ends)
        files = IssuedFiles(directory / f"{name}.pem", directory / f"{name}.key", directory / "ca.pem")
        for path, data in (
            (files.certificate, _pem("CERTIFICATE", signed)),
            (files.key, _pem("PRIVATE KEY", _private_key(secret))),
            (files.authority, self.pem),
        ):
            path.write_bytes(data)
        return files

    def _certificate(
        self, subject: str, secret: int, extensions: list[bytes], starts: datetime, ends: datetime
    ) -> bytes:
        algorithm = _seq(_oid("1.2.840.10045.4.3.2"))  # ECDSA with SHA-256
        told = _seq(
            _tlv(0xA0, _integer(2)),
            _integer(secrets.randbits(120) + 1),
            algorithm,
            _name(self.name),
            _seq(_time(starts), _time(ends)),
            _name(subject),
            _public_key(secret),
            _tlv(0xA3, _seq(*extensions)),
        )
        return _seq(told, algorithm, _tlv(3, b"\0" + _sign(told, self._secret)))


# --- DER ------------------------------------------------------------------------------------------------------


def _tlv(tag: int, value: bytes) -> bytes:
    size = len(value)
    if size < 128:
        return bytes((tag, size)) + value
    length = size.to_bytes((size.bit_length() + 7) // 8, "big")
    return bytes((tag, 0x80 | len(length))) + length + value


def _seq(*parts: bytes) -> bytes:
    return _tlv(0x30, b"".join(parts))


def _integer(value: int) -> bytes:
    return _tlv(2, value.to_bytes(value.bit_length() // 8 + 1, "big"))


def _oid(dotted: str) -> bytes:
    first, second, *rest = map(int, dotted.split("."))
    out = bytes((40 * first + second,))
    for number in rest:
        digits = [number & 127]
        while number := number >> 7:
            digits.append(number & 127 | 128)
        out += bytes(reversed(digits))
    return _tlv(6, out)


def _name(common_name: str) -> bytes:
    return _seq(_tlv(0x31, _seq(_oid("2.5.4.3"), _tlv(12, common_name.encode()))))


def _time(when: datetime) -> bytes:
    return _tlv(0x17, when.strftime("%y%m%d%H%M%SZ").encode())


def _pem(label: str, der: bytes) -> bytes:
    text = base64.encodebytes(der).decode()
    return f"-----BEGIN {label}-----\n{text}-----END {label}-----\n".encode()


# --- P-256 ----------------------------------------------------------------------------------------------------


def _add(one: _Point, other: _Point) -> _Point:
    if one is None or other is None:
        return one or other
    (x1, y1), (x2, y2) = one, other
    if x1 == x2 and (y1 + y2) % _P == 0:
        return None
    slope = (3 * x1 * x1 - 3) * pow(2 * y1, -1, _P) if one == other else (y2 - y1) * pow(x2 - x1, -1, _P)
    x = (slope * slope - x1 - x2) % _P
    return x, (slope * (x1 - x) - y1) % _P


def _times(number: int) -> tuple[int, int]:
    """The base point, so many times."""
    total: _Point = None
    double: _Point = _G
    while number:
        if number & 1:
            total = _add(total, double)
        double = _add(double, double)
        number >>= 1
    assert total is not None
    return total


def _sign(message: bytes, secret: int) -> bytes:
    digest = int.from_bytes(hashlib.sha256(message).digest(), "big")
    once = secrets.randbelow(_N - 1) + 1
    r = _times(once)[0] % _N
    s = pow(once, -1, _N) * (digest + r * secret) % _N
    return _seq(_integer(r), _integer(s))


def _point_bytes(secret: int) -> bytes:
    x, y = _times(secret)
    return b"\x04" + x.to_bytes(32, "big") + y.to_bytes(32, "big")


def _curve() -> bytes:
    return _seq(_oid("1.2.840.10045.2.1"), _oid("1.2.840.10045.3.1.7"))


def _public_key(secret: int) -> bytes:
    return _seq(_curve(), _tlv(3, b"\0" + _point_bytes(secret)))


def _private_key(secret: int) -> bytes:
    inner = _seq(_integer(1), _tlv(4, secret.to_bytes(32, "big")), _tlv(0xA1, _tlv(3, b"\0" + _point_bytes(secret))))
    return _seq(_integer(0), _curve(), _tlv(4, inner))
