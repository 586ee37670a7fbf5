"""Compile the rooms that every request goes through, from their own sources: `make compile`.

mypyc makes classes into structs and calls into calls; what the modules promise stays. It wants a C compiler and the
headers of this Python. What it builds lies in `src/kvherd/_compiled`, and is used as long as the sources are the same
(`kvherd/compiled.py`). docs/decisions has why these rooms, and what they may not contain.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from kvherd.compiled import FOLDER, MANIFEST, PACKAGE, SETTLED_S, Known, known, source_of

ROOT = PACKAGE.parent.parent
BUILD = ROOT / "build" / "rooms"
GROUP = "kvherd_rooms"
ROOMS = tuple((Path(__file__).parent / "rooms.txt").read_text().split())
_SLOTS = re.compile(r"^(@dataclass\()(.*)\)$", re.MULTILINE)


def without_slots(source: str) -> str:
    """A native class has slots of its own, and cannot be made anew with others as `dataclass(slots=True)` does."""

    def plain(found: re.Match[str]) -> str:
        options = [option for option in found[2].split(", ") if option != "slots=True"]
        return f"@dataclass({', '.join(options)})" if options else "@dataclass"

    return _SLOTS.sub(plain, source)


def copied(into: Path) -> list[str]:
    """A copy of the package in which the rooms can be compiled; their files, relative to it."""
    shutil.rmtree(into, ignore_errors=True)
    shutil.copytree(PACKAGE, into / PACKAGE.name, ignore=shutil.ignore_patterns("_compiled", "__pycache__"))
    files = []
    for module in ROOMS:
        file = into.joinpath(*module.split(".")).with_suffix(".py")
        file.write_text(without_slots(file.read_text()))
        files.append(str(file.relative_to(into)))
    return files


def build(files: list[str]) -> None:
    """In the current directory, in a process of its own: setuptools reads `sys.argv` and mypyc changes the world."""
    from mypyc.build import mypycify  # noqa: PLC0415 - takes a second, and only this process needs it
    from setuptools import setup  # noqa: PLC0415

    options = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(BUILD / "cache")]
    extensions = mypycify(
        [*options, *files], opt_level="2", debug_level="0", multi_file=True, group_name=GROUP, target_dir="c"
    )
    sys.argv = ["compile_rooms", "-q", "build_ext", "--inplace", f"--parallel={os.cpu_count() or 1}"]
    setup(name=GROUP, ext_modules=extensions, packages=[])


def kept(built: Path, sources: dict[str, Known]) -> None:
    """Put what was built from these sources where it is found, the manifest last."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    files = {}
    for module in (f"{GROUP}__mypyc", *ROOMS):
        source = built.joinpath(*module.split(".")).with_suffix(suffix)
        files[module] = module + suffix
        shutil.copy(source, FOLDER / files[module])
    time.sleep(SETTLED_S)  # what was just written could be written again without looking different
    found = {module: (name, *known(FOLDER / name)) for module, name in files.items()}
    told = {"python": sys.version, "sources": sources, "files": found}
    (FOLDER / MANIFEST).write_text(json.dumps(told, indent=1))


def lacking() -> str | None:
    """What this machine lacks to compile anything, for people."""
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        return f"no C compiler ({compiler}) is here (Debian, Ubuntu: apt-get install gcc libc6-dev)"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "the headers of this Python are missing (Debian, Ubuntu: apt-get install python3-dev)"
    return None


def unusable() -> str | None:
    """Whether a process that imports them all fails; its last words."""
    program = f"import importlib\nfor room in {ROOMS!r}: importlib.import_module(room)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else (done.stderr.splitlines() or [f"it ended with {done.returncode}"])[-1]


def main() -> int:
    if sys.argv[1:2] == ["--build"]:
        build(sys.argv[2:])
        return 0
    if (why := lacking()) is not None:
        print(f"nothing was compiled: {why}", file=sys.stderr)
        return 1
    source = BUILD / "source"
    sources = {room: known(source_of(room)) for room in ROOMS}  # before they are copied: one edited later does not fit
    command = [sys.executable, __file__, "--build", *copied(source)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    (BUILD / "log").write_text(done.stdout + done.stderr)
    if done.returncode:
        print(f"nothing was compiled; the last lines of {BUILD / 'log'}:", file=sys.stderr)
        print("\n".join((done.stdout + done.stderr).splitlines()[-15:]), file=sys.stderr)
        return 1
    kept(source, sources)
    if (why := unusable()) is not None:
        shutil.rmtree(FOLDER)
        print(f"nothing was compiled, for what came of it cannot be imported: {why}", file=sys.stderr)
        return 1
    print(f"{len(ROOMS)} rooms are native code now; KVHERD_COMPILED=0 leaves them to the interpreter")
    return 0


if __name__ == "__main__":
    sys.exit(main())
