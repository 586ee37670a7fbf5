"""When a certificate expires."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from kvherd.core.errors import FrameInvalid
from kvherd.testing.certificates import Authority
from kvherd.wire.certificate import expires_at, starts_at


def test_the_end_of_a_certificate_is_read(tmp_path: Path) -> None:
    files = Authority().issue(tmp_path, "ann", ends=timedelta(hours=5))
    told = datetime.fromisoformat(expires_at(files.certificate.read_bytes()))
    assert abs(told - datetime.now(UTC) - timedelta(hours=5)) < timedelta(minutes=5)


def test_the_beginning_of_a_certificate_is_read(tmp_path: Path) -> None:
    files = Authority().issue(tmp_path, "ann", starts=timedelta(hours=-7))
    told = datetime.fromisoformat(starts_at(files.certificate.read_bytes()))
    assert abs(told - datetime.now(UTC) + timedelta(hours=7)) < timedelta(minutes=5)


@pytest.mark.parametrize(
    "pem",
    [
        b"",
        b"-----BEGIN CERTIFICATE-----\nbm9uc2Vuc2U=\n-----END CERTIFICATE-----\n",
        b"-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n",
        b"-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n",
        b"-----BEGIN PRIVATE KEY-----\nMAA=\n-----END PRIVATE KEY-----\n",
    ],
)
def test_what_is_no_certificate_is_refused(pem: bytes) -> None:
    with pytest.raises(FrameInvalid):
        expires_at(pem)
