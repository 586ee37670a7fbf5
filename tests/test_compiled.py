"""Compiled rooms serve if they are what the sources here would become, and never otherwise."""

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest

from kvherd import compiled
from kvherd.cli.gateway_options import GatewayOptions
from kvherd.compiled import CompiledRooms, Known, Unfit, known, rooms_in, source_of

ROOMS = (Path(__file__).parent.parent / "tools" / "rooms.txt").read_text().split()
ROOM = "kvherd.core.ids"


@pytest.fixture
def built(tmp_path: Path) -> Path:
    """A folder as `make compile` leaves it, of one room."""
    (tmp_path / "room.so").write_bytes(b"native")
    write(tmp_path)
    return tmp_path


def write(folder: Path, *, looked: bool = False, **changed: object) -> None:
    """`looked`: how the files look is told as well."""

    def told_of(file: Path) -> Known:
        return compiled.digest(file), compiled.look(file) if looked else None

    sources, files = {ROOM: told_of(source_of(ROOM))}, {ROOM: ("room.so", *told_of(folder / "room.so"))}
    told = {"python": sys.version, "sources": sources, "files": files}
    (folder / compiled.MANIFEST).write_text(json.dumps({**told, **changed}))


def test_a_room_made_from_its_source_is_found(built: Path) -> None:
    assert rooms_in(built) == {ROOM: built / "room.so"}
    spec = CompiledRooms(rooms_in(built)).find_spec(ROOM, None)
    assert spec is not None
    assert spec.origin == str(built / "room.so")


def test_other_modules_are_left_to_their_sources(built: Path) -> None:
    assert CompiledRooms(rooms_in(built)).find_spec("kvherd.core.errors", None) is None


def test_one_source_edited_since_leaves_all_to_the_interpreter(built: Path) -> None:
    write(built, sources={ROOM: known(source_of(ROOM)), "kvherd.core.errors": ("of another day", None)})
    with pytest.raises(Unfit, match=r"kvherd\.core\.errors was edited since"):
        rooms_in(built)


def test_a_source_that_is_gone_leaves_all_to_the_interpreter(built: Path) -> None:
    write(built, sources={"kvherd.core.no_such_room": ("whatever", None)})
    with pytest.raises(Unfit, match=r"there is no no_such_room\.py"):
        rooms_in(built)


def test_what_another_python_built_is_not_used(built: Path) -> None:
    write(built, python="3.11.0 of somebody else")
    with pytest.raises(Unfit, match="another Python"):
        rooms_in(built)


def test_a_file_that_is_gone_leaves_all_to_the_interpreter(built: Path) -> None:
    (built / "room.so").unlink()
    with pytest.raises(Unfit, match=r"there is no room\.so"):
        rooms_in(built)


@pytest.mark.parametrize("looked", [False, True])
@pytest.mark.parametrize("content", [b"nat", b"", b"nativE"])
def test_a_file_that_is_not_as_it_was_built_leaves_all_to_the_interpreter(
    built: Path, content: bytes, *, looked: bool
) -> None:
    """Truncated or altered it would end the process that imports it."""
    write(built, looked=looked)
    (built / "room.so").write_bytes(content)
    with pytest.raises(Unfit, match="is not as it was built"):
        rooms_in(built)


def test_a_file_of_another_day_is_found_out_though_its_size_and_time_are_the_old_ones(built: Path) -> None:
    """Archives, copies and checkouts set the time of modification; nothing can set that of the last change."""
    file = built / "room.so"
    write(built, looked=True)
    before = file.stat()
    while file.stat().st_ctime_ns == before.st_ctime_ns:  # until the file system's clock has ticked
        file.write_bytes(b"nativE")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    with pytest.raises(Unfit, match="is not as it was built"):
        rooms_in(built)


def test_a_copy_is_read_for_it_looks_different_and_is_the_same(built: Path, tmp_path: Path) -> None:
    write(built, looked=True)
    copy = tmp_path / "copy"
    shutil.copytree(built, copy)
    assert rooms_in(copy) == {ROOM: copy / "room.so"}


def test_a_file_that_still_looks_the_same_is_not_read(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(built, looked=True)
    monkeypatch.setattr(compiled, "digest", None)
    assert rooms_in(built) == {ROOM: built / "room.so"}


def test_a_file_that_was_just_written_has_no_look_to_trust(tmp_path: Path) -> None:
    """It could be written again within the same tick of the file system's clock."""
    file = tmp_path / "fresh"
    file.write_bytes(b"native")
    assert known(file) == (compiled.digest(file), None)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"python": 1, "sources": 2, "files": 3}', "\0"])
def test_a_broken_manifest_is_none(built: Path, content: str) -> None:
    (built / compiled.MANIFEST).write_text(content)
    with pytest.raises(Unfit):
        rooms_in(built)


@pytest.mark.parametrize("told", [2, {ROOM: "a digest alone"}, {ROOM: 5}, [1]])
@pytest.mark.parametrize("part", ["sources", "files"])
def test_a_manifest_of_another_shape_is_none(built: Path, part: str, told: object) -> None:
    write(built, looked=False, **{part: told})
    with pytest.raises(Unfit, match="cannot be read"):
        rooms_in(built)


def test_a_process_is_told_why_what_was_built_is_not_used(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "FOLDER", built)
    monkeypatch.setattr(compiled, "_unused", [])
    monkeypatch.setattr(sys, "meta_path", [])
    monkeypatch.delenv(compiled.SWITCH, raising=False)
    (built / "room.so").write_bytes(b"nat")
    compiled.install()
    assert sys.meta_path == []
    assert compiled.unused() == f"the file of {ROOM} is not as it was built; `make compile` builds them anew"


@pytest.mark.parametrize("switch", ["0", "1"])
def test_nobody_is_told_anything_where_nothing_was_built_or_wanted(
    built: Path, monkeypatch: pytest.MonkeyPatch, switch: str
) -> None:
    (built / "room.so").unlink()
    if switch == "1":
        (built / compiled.MANIFEST).unlink()
    monkeypatch.setattr(compiled, "FOLDER", built)
    monkeypatch.setattr(compiled, "_unused", [])
    monkeypatch.setenv(compiled.SWITCH, switch)
    compiled.install()
    assert compiled.unused() is None


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


def fits(folder: Path) -> bool:
    try:
        return bool(rooms_in(folder))
    except Unfit:
        return False


@pytest.mark.engine
def test_a_process_uses_all_that_is_built_or_nothing() -> None:
    here = len(ROOMS) if fits(compiled.FOLDER) else 0
    assert in_a_process_of_its_own("1") == here
    assert in_a_process_of_its_own("0") == 0


def test_what_options_are_decoded_into_tells_its_types_when_compiled() -> None:
    """mypyc leaves `float | None` of a dataclass's annotations as `type`, which nothing can be decoded into."""
    told = [kind for kind in get_type_hints(GatewayOptions).values() if is_dataclass(kind)]
    assert told
    within = {kind: hints for kind in told if kind.__module__ in ROOMS for hints in [get_type_hints(kind).values()]}
    assert [kind for kind, hints in within.items() if not {*hints} <= {bool, bytes, float, int, str}] == []
