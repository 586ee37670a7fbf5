"""What passes from the reading of a command line to the process that serves."""

import os
import sys
from pathlib import Path

import pytest

from kvherd.cli import gateway, handover
from kvherd.cli.gateway_options import GatewayOptions, decode
from kvherd.cli.main import main
from kvherd.services.gateway.settings import HealMode


class Executed(Exception):
    """In place of a process that started over."""


@pytest.fixture(autouse=True)
def logs_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "start_logging", lambda _: None)


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The words that the process started over with."""
    found: list[str] = []

    def execute(_: str, words: list[str]) -> None:
        found.extend(words)
        raise Executed

    monkeypatch.setattr(os, "execv", execute)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "kvherd.cli.main", "gateway"])
    return found


def test_what_was_asked_for_arrives_once_and_not_in_the_words_or_the_environment(
    words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVHERD_API_KEY", "a-key-of-clients")
    key = tmp_path / "key"
    key.write_text("the-key-of-operators")
    with pytest.raises(SystemExit):
        main(["gateway", "--worker", "http://a:1", "--port", "1234", "--heal", "flush", "--admin-key-file", str(key)])
    assert words[1:] == ["-m", "kvherd.cli.main", "gateway"]
    assert not any("the-key-of-operators" in text for text in (*words, *os.environ.values()))
    given = handover.handed_over()
    assert given is not None
    options = decode(given)
    assert (options.workers, options.port, options.heal) == (("http://a:1",), 1234, HealMode.FLUSH)
    assert (options.probe_period_s, options.probe_deadline_s) == (2.0, None)
    assert (options.data_key, options.admin_key) == ("a-key-of-clients", "the-key-of-operators")
    assert "key-of" not in repr(options)
    assert handover.handed_over() is None


def test_what_was_handed_over_to_another_process_says_nothing_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVHERD_HANDED_OVER", f"{os.getppid()}:0")
    assert handover.handed_over() is None


def test_a_system_without_files_in_memory_serves_in_the_process_that_read_the_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served: list[GatewayOptions] = []
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(handover, "serve", lambda data: served.append(decode(data)))
    with pytest.raises(SystemExit):
        main(["gateway", "--policy", "round_robin"])
    assert [options.policy for options in served] == ["round_robin"]
