"""The gateway's own keys: what can be one, where it may stand, and that none is repeated."""

from pathlib import Path

import pytest

from kvherd.cli.gateway_keys import DATA_KEY, admin_key_given, require_apart, secret_given
from kvherd.core.errors import OptionInvalid


def test_a_key_loses_what_surrounds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DATA_KEY, " secret-of-clients\n")
    assert secret_given("--api-key", " secret-of-clients\n", DATA_KEY) == "secret-of-clients"


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("", "is empty; leave it out for none"),
        ("  ", "is empty; leave it out for none"),
        ("seven77", "a key has 8 characters or more"),
        ("two words", "without spaces"),
        ("k\u00e9y-of-clients", "printable ASCII"),
    ],
)
def test_what_is_no_key_is_refused_and_not_repeated(monkeypatch: pytest.MonkeyPatch, value: str, problem: str) -> None:
    monkeypatch.delenv(DATA_KEY, raising=False)
    with pytest.raises(OptionInvalid, match=f"--api-key: .*{problem}") as refused:
        secret_given("--api-key", value, DATA_KEY)
    assert not value.strip() or value not in str(refused.value)


def test_a_variable_that_is_empty_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DATA_KEY, "")
    assert secret_given("--api-key", "", DATA_KEY) is None
    assert secret_given("--api-key", None, DATA_KEY) is None


def test_a_file_holds_a_key_as_long_as_any(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("short\n")
    with pytest.raises(OptionInvalid, match="--admin-key-file: a key has 8 characters or more"):
        admin_key_given(None, file)
    file.write_text("long-enough\n")
    assert admin_key_given(None, file) == "long-enough"


def test_a_client_s_key_is_no_operator_s() -> None:
    with pytest.raises(OptionInvalid, match="--admin-key: is the key of clients") as refused:
        require_apart("one-and-the-same", "one-and-the-same")
    assert "same" not in str(refused.value)
    require_apart("one-of-these", "another-one")
    require_apart(None, None)
