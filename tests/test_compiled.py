"""Compiled rooms serve if they are what the sources here would become, and never otherwise."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvherd import compiled
from kvherd.compiled import CompiledRooms, digest, rooms_in, source_of

ROOMS = (Path(__file__).parent.parent / "tools" / "rooms.txt").read_text().split()
ROOM = "kvherd.core.ids"


@pytest.fixture
def built(tmp_path: Path) -> Path:
    """A folder as `make compile` leaves it, of one room."""
    (tmp_path / "room.so").write_bytes(b"native")
    write(tmp_path)
    return tmp_path


def write(folder: Path, **changed: object) -> None:
    told = {"python": sys.version, "sources": {ROOM: digest(source_of(ROOM))}, "files": {ROOM: "room.so"}}
    (folder / compiled.MANIFEST).write_text(json.dumps({**told, **changed}))


def test_a_room_made_from_its_source_is_found(built: Path) -> None:
    assert rooms_in(built) == {ROOM: built / "room.so"}
    spec = CompiledRooms(rooms_in(built)).find_spec(ROOM, None)
    assert spec is not None
    assert spec.origin == str(built / "room.so")


def test_other_modules_are_left_to_their_sources(built: Path) -> None:
    assert CompiledRooms(rooms_in(built)).find_spec("kvherd.core.errors", None) is None


def test_one_source_edited_since_leaves_all_to_the_interpreter(built: Path) -> None:
    write(built, sources={ROOM: digest(source_of(ROOM)), "kvherd.core.errors": "of another day"})
    assert rooms_in(built) == {}


def test_a_source_that_is_gone_leaves_all_to_the_interpreter(built: Path) -> None:
    write(built, sources={"kvherd.core.no_such_room": "whatever"})
    assert rooms_in(built) == {}


def test_what_another_python_built_is_not_used(built: Path) -> None:
    write(built, python="3.11.0 of somebody else")
    assert rooms_in(built) == {}


def test_a_file_that_is_gone_leaves_all_to_the_interpreter(built: Path) -> None:
    (built / "room.so").unlink()
    assert rooms_in(built) == {}


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"python": 1, "sources": 2, "files": 3}', "\0"])
def test_a_broken_manifest_is_none(built: Path, content: str) -> None:
    (built / compiled.MANIFEST).write_text(content)
    assert rooms_in(built) == {}


def test_nothing_built_is_nothing_found(tmp_path: Path) -> None:
    assert rooms_in(tmp_path / "nowhere") == {}


def test_each_room_is_listed_once() -> None:
    assert [room for room in set(ROOMS) if ROOMS.count(room) > 1] == []


def functions(module: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(source_of(module).read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@pytest.mark.parametrize("module", ROOMS)
def test_a_room_has_nothing_that_compiles_to_something_else(module: str) -> None:
    """In a coroutine or a generator a name has one type for good: two errors caught under one name fail at run time.

    What bounds a slice is evaluated twice. And a dataclass that is an error, or has parameters, cannot be made of a
    native class; nor can msgspec's structs.
    """
    for node in ast.walk(ast.parse(source_of(module).read_text())):
        if isinstance(node, ast.ClassDef):
            made = " ".join(map(ast.unparse, node.decorator_list))
            errors = any("Error" in ast.unparse(base) for base in node.bases)
            assert not (errors and "dataclass" in made), f"{module}.{node.name} is an error and a dataclass"
        if isinstance(node, ast.Slice):
            calls = [each for each in ast.walk(node) if isinstance(each, ast.Call) and ast.unparse(each.func) != "len"]
            assert not calls, f"{module}: {ast.unparse(node)} calls what bounds a slice"
    for function in functions(module):
        nodes = list(ast.walk(function))
        if isinstance(function, ast.AsyncFunctionDef) or any(isinstance(n, ast.Yield | ast.YieldFrom) for n in nodes):
            caught = [n.name for n in nodes if isinstance(n, ast.ExceptHandler) and n.name]
            assert len(caught) == len(set(caught)), f"{module}.{function.name} catches two errors as one name"
    source = source_of(module).read_text()
    assert "(msgspec.Struct" not in source
    assert "(asyncio.Protocol)" not in source, "a base that the interpreter has keeps a class from being native"


def in_a_process_of_its_own(switch: str) -> int:
    """How many rooms are native there."""
    program = (
        "import importlib, sys, kvherd.compiled\n"
        "for room in sys.argv[1:]: importlib.import_module(room)\n"
        "print(sum(not sys.modules[room].__file__.endswith('.py') for room in sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, *ROOMS]
    done = subprocess.run(
        command, env={**os.environ, compiled.SWITCH: switch}, capture_output=True, text=True, timeout=60, check=True
    )
    return int(done.stdout)


@pytest.mark.engine
def test_a_process_uses_all_that_is_built_or_nothing() -> None:
    here = len(ROOMS) if rooms_in(compiled.FOLDER) else 0
    assert in_a_process_of_its_own("1") == here
    assert in_a_process_of_its_own("0") == 0
