"""Whom to trust with an engine is the operator's to say, where there is TLS."""

from pathlib import Path

import pytest

from kvherd.cli.engine_tls import engine_tls
from kvherd.core.errors import OptionInvalid


def test_an_engine_in_the_clear_takes_no_authority(tmp_path: Path) -> None:
    assert engine_tls("http://127.0.0.1:1", None, None) is None
    with pytest.raises(OptionInvalid, match="--engine-ca: is for engines with TLS"):
        engine_tls("grpc://127.0.0.1:1", tmp_path / "ca.pem", None)
    with pytest.raises(OptionInvalid, match="--engine-tls-name: is for engines with TLS"):
        engine_tls("http://127.0.0.1:1", None, "engine")


def test_a_file_that_holds_no_authority_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("nothing")
    with pytest.raises(OptionInvalid, match=r"--engine-ca: .*ca\.pem is no certificate"):
        engine_tls("https://127.0.0.1:1", tmp_path / "ca.pem", None)
