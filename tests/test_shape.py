"""The shape of the source: modules that fit in a head, and names that say what is inside."""

import ast
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parent.parent
GENERATED = ROOT / "src/kvherd/wire/proto"
MODULES = sorted(path for path in (ROOT / "src").rglob("*.py") if GENERATED not in path.parents)
TESTS = sorted((ROOT / "tests").rglob("*.py"))
LONGEST = 400
MEDIAN = 150
NAMES_THAT_SAY_NOTHING = {"utils", "util", "helper", "helpers", "manager", "managers", "common", "misc", "info", "data"}


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_there_are_modules_to_look_at() -> None:
    assert len(MODULES) > 20


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_fits_in_a_head(path: Path) -> None:
    assert lines(path) <= LONGEST


def test_half_of_the_modules_fit_on_three_screens() -> None:
    assert median(lines(path) for path in MODULES if path.name != "__init__.py") <= MEDIAN


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_s_name_says_what_is_in_it(path: Path) -> None:
    parts = path.relative_to(ROOT / "src/kvherd").with_suffix("").parts
    words = {word for part in parts for word in part.lower().split("_")}
    assert not words & NAMES_THAT_SAY_NOTHING


@pytest.mark.parametrize("path", [path for path in MODULES if path.name != "__init__.py"], ids=name_of)
def test_a_module_says_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_names_of_test_files_are_unique() -> None:
    names = [path.name for path in TESTS if path.name.startswith("test_")]
    assert sorted(names) == sorted(set(names))


def test_a_test_is_a_sentence() -> None:
    """Three words at least: what holds, of what, and when."""
    short = [
        f"{path.name}:{node.name}"
        for path in TESTS
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and node.name.count("_") < 3
    ]
    assert short == []
