"""Rooms that were compiled to native code (`make compile`) take the place of their own sources when they are imported.

They do so all together or not at all, and only if every one of them was made from exactly the source that lies here, by
this Python: a source that was edited since is what counts. `KVHERD_COMPILED=0` leaves all to the interpreter.
"""

import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from hashlib import sha256
from importlib.abc import MetaPathFinder
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).parent
FOLDER = PACKAGE / "_compiled" / sys.implementation.cache_tag
MANIFEST = "manifest.json"
SWITCH = "KVHERD_COMPILED"


def source_of(module: str) -> Path:
    """Where the source of one of our modules lies."""
    return PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py")


def digest(source: Path) -> str:
    return sha256(source.read_bytes()).hexdigest()


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
    """The modules built there and their files; none if any of them is not what it would be if it were built now."""
    try:
        told = json.loads((folder / MANIFEST).read_bytes())
        sources, files = dict(told["sources"]), dict(told["files"])
        fresh = told["python"] == sys.version and all(
            digest(source_of(module)) == known for module, known in sources.items()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    found = {module: folder / name for module, name in files.items()}
    return found if fresh and all(file.is_file() for file in found.values()) else {}


def install() -> None:
    """Have them found from now on. Once, before any of them is imported."""
    if os.environ.get(SWITCH) != "0" and (files := rooms_in(FOLDER)):
        sys.meta_path.insert(0, CompiledRooms(files))


def count() -> int:
    """How many rooms are native code in this process."""
    return sum(
        name.startswith("kvherd.")
        for finder in sys.meta_path
        if isinstance(finder, CompiledRooms)
        for name in finder.files
    )
