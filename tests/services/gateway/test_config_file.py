"""A configuration file that changes under a running gateway."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvherd.core.errors import OptionInvalid
from kvherd.core.fleet.keyring import DataKey, key_digest
from kvherd.core.fleet.spec import ConfigInvalid
from kvherd.services.gateway.fleet.config_file import ConfigFile
from kvherd.testing.raw_http import until
from kvherd.wire.gateway_toml import GatewayFile

pytestmark = pytest.mark.net  # files are read off the loop, which takes real time


class Applied:
    def __init__(self) -> None:
        self.files: list[GatewayFile] = []
        self.keys: list[DataKey] = []
        self.refuses = ""
        self.breaks = False

    def __call__(self, told: GatewayFile, keys: list[DataKey]) -> None:
        if self.breaks:
            raise RuntimeError("a defect")
        if self.refuses:
            raise OptionInvalid("url", self.refuses)
        self.files.append(told)
        self.keys = keys


@asynccontextmanager
async def watched(path: Path, text: str, **environment: str) -> AsyncIterator[tuple[ConfigFile, Applied]]:
    await asyncio.to_thread(path.write_text, text)
    applied = Applied()
    async with ConfigFile(path, applied, environment, period_s=0.02) as file:
        yield file, applied


async def test_a_change_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "herd.toml"
    async with watched(path, 'models = ["a"]') as (file, applied):
        path.write_text('models = ["a", "b"]')
        await until(lambda: file.reads == 2, "the file was read again")
        assert [told.models for told in applied.files] == [("a",), ("a", "b")]


async def test_a_file_that_turns_wrong_leaves_all_as_it_was(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "herd.toml"
    async with watched(path, 'models = ["a"]') as (file, applied):
        path.write_text('models = ["a"]\nworkers = 5')
        await until(lambda: file.problem != "", "the problem was seen")
        problem = f"{path}, line 2: workers: must be a list, not a whole number; each begins with [[workers]]"
        assert file.problem == problem
        path.unlink()
        await until(lambda: "cannot be read" in file.problem, "the file is gone")
        path.write_text('models = ["c"]')
        await until(lambda: file.problem == "", "the file is right again")
        assert [told.models for told in applied.files] == [("a",), ("c",)]
    assert f"the configuration stays as it was: {problem}" in caplog.messages


async def test_what_cannot_be_applied_is_a_problem_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "herd.toml"
    async with watched(path, "") as (file, applied):
        applied.refuses = "is wrong"
        path.write_text("models = []")
        await until(lambda: file.problem == f"{path}: url: is wrong", "the problem was seen")


@pytest.mark.parametrize("text", ["models = 5", "models ="])
async def test_a_gateway_does_not_start_with_a_wrong_file(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigInvalid, match=r"herd\.toml, line 1: "):
        async with watched(tmp_path / "herd.toml", text):
            pass


async def test_keys_come_from_the_environment_and_from_files_that_may_change(tmp_path: Path) -> None:
    secret = tmp_path / "b"
    secret.write_text("secret-b-1\n")
    text = f'[[keys]]\nname = "a"\nenv = "A"\n[[keys]]\nname = "b"\nfile = "{secret}"'
    async with watched(tmp_path / "herd.toml", text, A="secret-a") as (_, applied):
        assert [key.digest for key in applied.keys] == [key_digest("secret-a"), key_digest("secret-b-1")]
        secret.write_text("secret-b-2\n")
        await until(lambda: applied.keys[1].digest == key_digest("secret-b-2"), "the new key is valid")


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ({}, "key 'a': the environment's A must hold 8 or more printable characters without spaces"),
        ({"A": "short"}, "must hold 8 or more"),
        ({"A": "with spaces in it"}, "must hold 8 or more"),
        ({"A": "one-and-the-same", "B": "one-and-the-same"}, "these keys are one and the same: a, b"),
    ],
)
async def test_a_key_that_cannot_be_is_named_and_not_shown(
    tmp_path: Path, environment: dict[str, str], problem: str
) -> None:
    text = '[[keys]]\nname = "a"\nenv = "A"\n[[keys]]\nname = "b"\nenv = "B"'
    with pytest.raises(ConfigInvalid) as refused:
        async with watched(tmp_path / "herd.toml", text, **environment):
            pass
    assert problem in str(refused.value)
    assert not any(secret in str(refused.value) for secret in environment.values())


async def test_a_defect_in_taking_a_file_over_costs_that_change_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "herd.toml"
    async with watched(path, "") as (file, applied):
        applied.breaks = True
        await asyncio.to_thread(path.write_text, 'models = ["a"]')
        await until(lambda: "unforeseen" in file.problem, "the defect was seen")
        applied.breaks = False
        await asyncio.to_thread(path.write_text, 'models = ["a", "b"]')
        await until(lambda: file.problem == "", "the next file is taken")
        assert applied.files[-1].models == ("a", "b")
    assert any("failed unforeseen" in line for line in caplog.messages)
