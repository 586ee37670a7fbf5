"""The page for operators names every option of the gateway, and none that is not there."""

import re
from pathlib import Path

import typer

from kvherd.cli import gateway

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
