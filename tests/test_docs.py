"""The documents speak of what is there."""

import ast
import re
import textwrap
from pathlib import Path
from types import ModuleType

import pytest
from smg_grpc_proto.generated import sglang_scheduler_pb2

from kvherd.wire.gateway_toml import decode_gateway_file
from kvherd.wire.proto import kvherd_gateway_v1_pb2

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
STOP = re.compile(r"`((?:src|tests|bench)/[\w/.]+\.py)(?::([\w.]+))?`")
LINK = re.compile(r"\]\(([^)#]+?)(?:#[^)]*)?\)")
MAKE = re.compile(r"\bmake ([a-z]+)\b")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def stops() -> list[tuple[str, str]]:
    return [(found[1], found[2] or "") for document in DOCUMENTS for found in STOP.finditer(document.read_text())]


def defined_names(path: Path) -> set[str]:
    """Top-level names of a module, and `Class.member` for what its classes hold."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        names |= _names(node)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{member}" for inner in node.body for member in _names(inner)}
    return names


def _names(node: ast.stmt) -> set[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Assign(targets=targets):
            return {target.id for target in targets if isinstance(target, ast.Name)}
        case ast.AnnAssign(target=ast.Name(id=name)):
            return {name}
        case _:
            return set()


def test_the_tour_has_stops() -> None:
    assert len(STOP.findall((ROOT / "docs/tour.md").read_text())) >= 10


@pytest.mark.parametrize(("file", "name"), sorted(set(stops())))
def test_a_stop_exists(file: str, name: str) -> None:
    path = ROOT / file
    assert path.is_file()
    assert not name or name in defined_names(path)


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_a_link_leads_somewhere(document: Path) -> None:
    targets = [target for target in LINK.findall(document.read_text()) if "://" not in target]
    assert [target for target in targets if not (document.parent / target).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_the_make_targets_that_a_document_names_exist(document: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    code = re.findall(r"`[^`\n]+`|^(?: {4}|\t).*$", document.read_text(), re.MULTILINE)
    named = {target for piece in code for target in MAKE.findall(piece)}
    assert named <= targets


def test_the_readme_names_every_command() -> None:
    readme = (ROOT / "README.md").read_text()
    page = (ROOT / "src/kvherd/cli/commands.py").read_text()
    commands = re.search(r"^COMMANDS = \((.*)\)$", page, re.MULTILINE)
    assert commands is not None
    for command in re.findall(r'"(\w+)"', commands[1]):
        assert f"`kvherd {command}`" in readme


def test_a_word_of_the_glossary_has_one_meaning() -> None:
    words = re.findall(r"^\| \*\*(.+?)\*\* \|", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)
    assert len(words) > 20
    assert sorted(words) == sorted(set(words))


def routes(file: str) -> set[str]:
    """The literal paths of an application's routes; a converter such as `{name:path}` is read as `{name}`."""
    found = re.findall(r"\b[Rr]oute\(\s*\"(/[^\"]*)\"", (ROOT / file).read_text())
    return {re.sub(r":\w+}", "}", path) for path in found}


@pytest.mark.parametrize(
    "file",
    [
        "src/kvherd/services/gateway/doors/admin.py",
        "src/kvherd/services/servicer/http_app.py",
        "src/kvherd/services/servicer/operator_door.py",
    ],
)
def test_the_api_page_has_every_route(file: str) -> None:
    page = (ROOT / "docs/api.md").read_text()
    paths = routes(file)
    assert len(paths) >= 7
    assert {path for path in paths if f"{path}`" not in page and f"{path}?" not in page} == set()


@pytest.mark.parametrize("protocol", [sglang_scheduler_pb2, kvherd_gateway_v1_pb2], ids=["engine", "gateway"])
def test_the_api_page_has_every_rpc(protocol: ModuleType) -> None:
    page = (ROOT / "docs/api.md").read_text()
    services = protocol.DESCRIPTOR.services_by_name.values()
    rpcs = {method.name for service in services for method in service.methods}
    assert rpcs
    assert {rpc for rpc in rpcs if f"`{rpc}`" not in page} == set()
    assert all(f"`{service.full_name}`" in page for service in services)


def configurations() -> list[tuple[str, str]]:
    """The gateway's file, wherever a document shows one."""
    block = re.compile(r"(?:^    .*\n|^\n)+", re.MULTILINE)
    found = [(name_of(document), block.findall(document.read_text())) for document in DOCUMENTS]
    return [(name, textwrap.dedent(one)) for name, blocks in found for one in blocks if "[[workers]]" in one]


def test_the_configuration_files_that_documents_show_are_taken() -> None:
    shown = configurations()
    assert {name for name, _ in shown} >= {"docs/api.md", "docs/operations.md"}
    for name, text in shown:
        told = decode_gateway_file(text.encode(), name)
        assert told.workers
        assert told.keys
