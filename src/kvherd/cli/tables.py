"""Tables for people."""

import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

PIPE_COLUMNS = 240


def print_table(headings: Sequence[str], rows: Iterable[Sequence[object]], *, numeric: frozenset[str]) -> None:
    """Print without borders; None becomes a dash. In a pipe a row keeps to its line, for grep and awk."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right" if heading in numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*("-" if cell in (None, "") else str(cell) for cell in row))
    Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS, markup=False, highlight=False).print(table)
