"""Whom to trust with an engine is the operator's to say, where there is TLS."""

from pathlib import Path

import pytest

from kvherd.adapters.tls import TlsFiles
from kvherd.cli.engine_tls import engine_tls
from kvherd.core.errors import OptionInvalid


def test_an_engine_in_the_clear_takes_no_authority(tmp_path: Path) -> None:
    assert engine_tls(TlsFiles(), "http://127.0.0.1:1") is None
    with pytest.raises(OptionInvalid, match="--engine-ca: is for engines with TLS"):
        engine_tls(TlsFiles(authorities=tmp_path / "ca.pem"), "grpc://127.0.0.1:1")
    with pytest.raises(OptionInvalid, match="--engine-tls-name: is for engines with TLS"):
        engine_tls(TlsFiles(server_name="engine"), "http://127.0.0.1:1", None)


def test_a_file_that_holds_no_authority_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("nothing")
    with pytest.raises(OptionInvalid, match=r"--engine-ca: .*ca\.pem is no certificate"):
        engine_tls(TlsFiles(authorities=tmp_path / "ca.pem"), "https://127.0.0.1:1")


def test_events_over_tls_are_enough_for_it_and_a_certificate_comes_with_its_key(tmp_path: Path) -> None:
    assert engine_tls(TlsFiles(), "http://127.0.0.1:1", "grpcs://127.0.0.1:2") is not None
    with pytest.raises(OptionInvalid, match="--engine-tls-key: is missing"):
        engine_tls(TlsFiles(certificate=tmp_path / "a.pem"), "https://127.0.0.1:1")
    with pytest.raises(OptionInvalid, match="--engine-tls-key: is for engines with TLS"):
        engine_tls(TlsFiles(key=tmp_path / "a.key"), "grpc://127.0.0.1:1")
