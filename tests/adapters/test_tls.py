"""TLS by files: what is right, what is wrong, and what is renewed."""

import logging
from datetime import timedelta
from pathlib import Path

import pytest

from kvherd.adapters.tls import ClientTls, FileServerTls, TlsFiles, TlsOptions
from kvherd.core.errors import OptionInvalid
from kvherd.testing.certificates import DAY, Authority

OPTIONS = TlsOptions("--cert", "--key", "--ca")


def directory(root: Path, name: str) -> Path:
    made = root / name
    made.mkdir()
    return made


def test_files_that_are_missing_or_do_not_fit_are_named(tmp_path: Path) -> None:
    ann = Authority().issue(directory(tmp_path, "a"), "ann")
    bob = Authority().issue(directory(tmp_path, "b"), "bob")
    cases = [
        (TlsFiles(ann.certificate, None), "--key: is missing: a certificate and its key come together"),
        (TlsFiles(None, ann.key), "--cert: is missing"),
        (TlsFiles(tmp_path / "no.pem", ann.key), r"--cert: cannot read .*no\.pem: No such file"),
        (TlsFiles(ann.certificate, bob.key), r"--key: .*bob\.key is no key of .*ann\.pem"),
        (TlsFiles(ann.key, ann.key), r"--cert: .*ann\.key is no certificate"),
        (TlsFiles(ann.certificate, ann.key, ann.key), r"--ca: .*ann\.key is no certificate"),
    ]
    for files, problem in cases:
        with pytest.raises(OptionInvalid, match=problem):
            FileServerTls(files, OPTIONS)


def test_a_certificate_that_has_expired_is_an_error_with_its_date(tmp_path: Path) -> None:
    old = Authority().issue(tmp_path, "old", starts=-9 * DAY, ends=-DAY)
    for make in (FileServerTls, ClientTls):
        with pytest.raises(
            OptionInvalid, match=r"the certificate .*old\.pem expired on \d{4}-\d\d-\d\d at .* UTC; renew"
        ):
            make(TlsFiles(old.certificate, old.key), OPTIONS)


def test_one_that_expires_soon_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    soon = Authority().issue(tmp_path, "soon", ends=timedelta(hours=36))
    FileServerTls(TlsFiles(soon.certificate, soon.key), OPTIONS)
    assert any("expires in 1.5 days" in line for line in caplog.messages)


def test_one_that_is_not_valid_yet_is_a_warning_with_its_date(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    early = Authority().issue(tmp_path, "early", starts=DAY, ends=30 * DAY)
    FileServerTls(TlsFiles(early.certificate, early.key), OPTIONS)
    assert any("early.pem is refused before 2" in line for line in caplog.messages)


def test_what_is_renewed_badly_leaves_what_was(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authority = Authority()
    ann = authority.issue(tmp_path, "ann")
    server = FileServerTls(TlsFiles(ann.certificate, ann.key), OPTIONS)
    client = ClientTls(TlsFiles(ann.certificate, ann.key, ann.authority), OPTIONS)
    assert not server.refresh()
    assert not client.refresh()
    before = server.expires_at_s
    ann.certificate.write_text("half a cert")
    with caplog.at_level(logging.WARNING):
        assert not server.refresh()
        assert not client.refresh()
    assert server.expires_at_s == before
    assert sum("stays as it was" in line for line in caplog.messages) == 2
    authority.issue(tmp_path, "ann", ends=20 * DAY)
    assert server.refresh()
    assert client.refresh()
    assert server.expires_at_s > before
