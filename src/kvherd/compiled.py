"""Rooms that were compiled to native code (`make compile`) take the place of their own sources when they are imported.

They do so all together or not at all, and only if every one of them was made from exactly the source that lies here, by
this Python, and lies as it was built: a source that was edited since is what counts, and half a file would end the
process. `KVHERD_COMPILED=0` leaves all to the interpreter.
"""

import importlib.util
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from hashlib import sha256
from importlib.abc import MetaPathFinder
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Final, TypeAlias

PACKAGE: Final = Path(__file__).parent
FOLDER: Final = PACKAGE / "_compiled" / sys.implementation.cache_tag
MANIFEST: Final = "manifest.json"
SWITCH: Final = "KVHERD_COMPILED"
SETTLED_S: Final = 2.0
"""No file system tells times more coarsely: who writes twice within it may leave the same times behind."""

Known: TypeAlias = tuple[str, Sequence[int] | None]
"""A file as it was: its digest, and how it looked if it had settled by then."""


class Unfit(Exception):
    """What was built is not what it would be if it were built now; says why."""


def source_of(module: str) -> Path:
    """Where the source of one of our modules lies."""
    return PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py")


def digest(file: Path | str) -> str:
    return sha256(Path(file).read_bytes()).hexdigest()


def look(file: Path | str) -> list[int]:
    """What no write leaves as it was. Contents and modification time can be set, the time of the last change cannot."""
    seen = os.stat(file)  # noqa: PTH116 - a Path costs as much as the look, and there are 150
    return [seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns, seen.st_ino]


def known(file: Path) -> Known:
    """As it is now."""
    before = look(file)
    of_it = digest(file)
    settled = look(file) == before and max(before[1:3]) < time.time_ns() - SETTLED_S * 1e9
    return of_it, before if settled else None


class CompiledRooms(MetaPathFinder):
    """Finds modules, by name, in the files that were built from them."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self.files = dict(files)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = self.files.get(fullname)
        if file is None:
            return None
        loader = ExtensionFileLoader(fullname, str(file))
        return importlib.util.spec_from_file_location(fullname, file, loader=loader)


def rooms_in(folder: Path) -> dict[str, Path]:
    """The modules built there and their files. Raises `Unfit` if any of them is not what it would be if built now."""
    try:
        told = json.loads((folder / MANIFEST).read_bytes())
        python, sources, files = told["python"], dict(told["sources"]), dict(told["files"])
        if python != sys.version:
            raise Unfit("they were built by another Python")
        for module, (of_it, looked) in sources.items():
            if _changed(f"{PACKAGE}/{'/'.join(module.split('.')[1:])}.py", of_it, looked):
                raise Unfit(f"{module} was edited since")
        for module, (name, of_it, looked) in files.items():
            if _changed(f"{folder}/{name}", of_it, looked):
                raise Unfit(f"the file of {module} is not as it was built")
    except FileNotFoundError as error:
        raise Unfit(f"there is no {Path(error.filename).name}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unfit(f"what was built cannot be read: {error}") from None
    return {module: folder / name for module, (name, *_) in files.items()}


def _changed(file: str, of_it: str, looked: list[int] | None) -> bool:
    """Reading them all takes ten times as long as looking, and is done where they were copied, say into an image."""
    return look(file) != looked and digest(file) != of_it


def install() -> None:
    """Have them found from now on. Once, before any of them is imported."""
    if os.environ.get(SWITCH) == "0" or not (FOLDER / MANIFEST).exists():
        return
    try:
        sys.meta_path.insert(0, CompiledRooms(rooms_in(FOLDER)))
    except Unfit as why:
        _unused.append(str(why))


_unused: list[str] = []


def unused() -> str | None:
    """Why what was built is not used in this process, for people; None if it is, or nothing was."""
    return f"{_unused[0]}; `make compile` builds them anew" if _unused else None


def count() -> int:
    """How many rooms are native code in this process."""
    return sum(
        name.startswith("kvherd.")
        for finder in sys.meta_path
        if isinstance(finder, CompiledRooms)
        for name in finder.files
    )
