"""The page for operators names every option of the gateway, and none that is not there."""

import re
from pathlib import Path

import pytest
import typer

from kvherd.cli import gateway

DOCS = Path(__file__).parents[2] / "docs"
FLAGS = Path(__file__).parents[1] / "fixtures/router-flags"
PAGE = Path(__file__).parents[2] / "docs/operations.md"


def options() -> set[str]:
    app = typer.Typer(add_completion=False)
    app.command()(gateway.command)
    return {name for each in typer.main.get_command(app).params for name in each.opts if name.startswith("--")}


def test_the_page_has_every_option_of_the_gateway() -> None:
    assert {option for option in options() if f"`{option}" not in PAGE.read_text()} == set()


def test_the_page_s_table_has_no_option_that_is_not_there() -> None:
    own = re.findall(r"^\|([^|]*)\|.*\|.*\|.*\|$", PAGE.read_text().partition("\n## The options")[2], re.MULTILINE)
    named = {option for cell in own for option in re.findall(r"`(--[a-z-]+)", cell)}
    assert len(named) > 15
    assert named <= options()


def flags_told_of(router: int) -> set[str]:
    """The flags in the column of that router, on both pages."""
    table = PAGE.read_text().partition("\n## The options")[2]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("|")]
    rest = [line.split("|") for line in (DOCS / "router-flags.md").read_text().splitlines() if line.startswith("|")]
    cells = [(row[1 + router], row[router]) for row in rows] + [(row[router], row[router - 1]) for row in rest]
    told: set[str] = set()
    for cell, before in cells:
        told |= set(re.findall(r"`(--[a-z0-9-]+)`", f"{cell} {before}" if "the same" in cell else cell))
    return told


@pytest.mark.parametrize(("router", "name"), [(1, "smg-1.13.0"), (2, "vllm-router-0.1.17")])
def test_every_flag_of_the_other_routers_is_told_of_and_none_is_made_up(router: int, name: str) -> None:
    flags = set((FLAGS / f"{name}.txt").read_text().split())
    assert len(flags) > 60
    assert flags_told_of(router) == flags
