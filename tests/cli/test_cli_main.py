"""The edge of the command line: what a person reads and what a script gets."""

import re

import pytest

from kvherd.cli import commands
from kvherd.cli import main as cli
from kvherd.core.errors import GatewayUnreachable, OptionInvalid, PortInUse, StartFailed
from kvherd.core.ids import RequestId


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    return int(ended.value.code or 0)


def test_the_first_page_names_every_command_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    page = capsys.readouterr().out
    for name in commands.COMMANDS:
        assert f" {name} " in page
    assert "Exit codes" in page


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(name, "--help") == 0
    assert f"kvherd {name}" in capsys.readouterr().out


def test_the_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert re.fullmatch(r"kvherd 0\.1\.0, (nothing|\d+ rooms) compiled\n", capsys.readouterr().out)


def test_an_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("flsh") == cli.EXIT_USAGE
    assert "flsh" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OptionInvalid("--policy", "no policy of that name"), 2),
        (GatewayUnreachable("http://127.0.0.1:1", "Connection refused"), 3),
        (PortInUse(8080, "--port"), 1),
        (ExceptionGroup("several", [ValueError("a"), StartFailed("engine-a", "no memory")]), 1),
    ],
)
def test_an_error_is_one_sentence_and_an_exit_code(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(commands, "build_app", lambda _: fails)
    assert run("up") == code
    sentence = capsys.readouterr().err
    assert sentence == f"kvherd: {cli.our_error(error)}\n"


def test_a_defect_asks_for_a_report_and_keeps_its_traceback_for_the_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise KeyError(RequestId("r1"))

    monkeypatch.setattr(commands, "build_app", lambda _: fails)
    assert run("workers") == 1
    assert "please report it" in capsys.readouterr().err
    assert caplog.records[-1].exc_info is not None


def test_ctrl_c_before_a_command_has_begun_is_quiet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "import_module", interrupted)
    assert run("workers") == cli.EXIT_INTERRUPTED
    assert capsys.readouterr() == ("", "")
