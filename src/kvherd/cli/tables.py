"""Tables for people."""

import sys
from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

PIPE_COLUMNS = 240
_GAP = 2
_PROSE_COLUMNS = 24


def print_table(headings: Sequence[str], rows: Iterable[Sequence[object]], *, numeric: frozenset[str]) -> None:
    """Print without borders; None becomes a dash. In a pipe a row keeps to its line, for grep and awk. In a terminal
    that is too narrow for words to stay whole, each row is a paragraph.
    """
    cells = [["-" if cell in (None, "") else str(cell) for cell in row] for row in rows]
    least = [max(map(_least_columns, column)) for column in zip(headings, *cells, strict=True)]
    terminal = sys.stdout.isatty()
    console = Console(width=None if terminal else PIPE_COLUMNS, markup=False, highlight=False)
    if terminal and sum(least) + _GAP * (len(least) - 1) > console.width:
        _print_paragraphs(console, headings, cells)
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading, columns in zip(headings, least, strict=True):
        justify = "right" if heading in numeric else "left"
        table.add_column(heading, justify=justify, overflow="fold", min_width=columns)  # type: ignore[arg-type]
    for row in cells:
        table.add_row(*row)
    console.print(table)


def _least_columns(cell: str) -> int:
    """What a cell must have so that no word of it is cut, and a sentence does not become a column of words."""
    return max((*map(cell_len, cell.split()), min(_PROSE_COLUMNS, cell_len(cell))))


def _print_paragraphs(console: Console, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """The first cell of a row as its title, and the others after their headings, as many on a line as fit."""
    for title, *rest in rows:
        console.print(Text(title, style="bold"), soft_wrap=True)
        line = Text()
        for heading, cell in zip(headings[1:], rest, strict=True):
            told = Text.assemble((heading.lower(), "dim"), " ", cell)
            if line and line.cell_len + _GAP + 1 + told.cell_len > console.width - _GAP:
                console.print(Padding(line, (0, 0, 0, _GAP)))
                line = Text()
            line = Text.assemble(line, "   ", told) if line else told
        console.print(Padding(line, (0, 0, 0, _GAP)))
