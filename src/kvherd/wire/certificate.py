"""From when to when a certificate is valid: what Python tells of no certificate but a connected peer's."""

import base64
import binascii
import re
from typing import Final

from kvherd.core.errors import FrameInvalid

_PEM: Final = re.compile(rb"-----BEGIN CERTIFICATE-----\s+(.+?)-----END CERTIFICATE-----", re.DOTALL)
_SEQUENCE: Final = 0x30
_VERSION: Final = 0xA0
_UTC_TIME: Final = 0x17
_FIELDS_BEFORE_VALIDITY: Final = 3  # serial number, algorithm, issuer


def expires_at(pem: bytes) -> str:
    """Of the first certificate, which is the holder's own, as `2026-11-21T11:00:00+00:00`. Raises `FrameInvalid`."""
    return _validity(pem)[1]


def starts_at(pem: bytes) -> str:
    """As `expires_at`."""
    return _validity(pem)[0]


def _validity(pem: bytes) -> tuple[str, str]:
    found = _PEM.search(pem)
    if found is None:
        raise FrameInvalid("PEM", "it holds no certificate")
    try:
        return _read(base64.b64decode(found[1]))
    except (binascii.Error, IndexError, ValueError) as error:
        raise FrameInvalid("X.509", str(error) or "it ends too early") from None


def _read(der: bytes) -> tuple[str, str]:
    _, certificate, _ = _element(der, _SEQUENCE)
    _, told, _ = _element(certificate, _SEQUENCE)
    if told[0] == _VERSION:
        _, _, told = _element(told)
    for _ in range(_FIELDS_BEFORE_VALIDITY):
        _, _, told = _element(told)
    _, validity, _ = _element(told, _SEQUENCE)
    first, first_text, rest = _element(validity)
    last, last_text, _ = _element(rest)
    return _time(first, first_text), _time(last, last_text)


def _time(tag: int, text: bytes) -> str:
    digits = text.decode("ascii").removesuffix("Z")
    if tag == _UTC_TIME:  # two digits of the year, of 1950 to 2049
        digits = ("19" if digits >= "50" else "20") + digits
    if len(digits) != 14 or not digits.isdecimal():
        raise ValueError(f"{digits!r} is no time")
    year, month, day, hour, minute, second = digits[:4], *(digits[at : at + 2] for at in range(4, 14, 2))
    return f"{year}-{month}-{day}T{hour}:{minute}:{second}+00:00"


def _element(data: bytes, wanted: int | None = None) -> tuple[int, bytes, bytes]:
    """Tag and value of the first element, and what follows it. Raises `ValueError` or `IndexError`."""
    tag, size, start = data[0], data[1], 2
    if size & 0x80:
        start += size & 0x7F
        size = int.from_bytes(data[2:start], "big")
    if wanted is not None and tag != wanted:
        raise ValueError(f"tag {tag:#x} stands where {wanted:#x} should")
    if start + size > len(data):
        raise ValueError("it ends too early")
    return tag, data[start : start + size], data[start + size :]
