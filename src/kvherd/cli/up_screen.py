"""What `kvherd up` shows: a spinner for each part on a terminal, plain lines anywhere else."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from kvherd.cli.logs import is_important

STARTING = "starting"


class Screen:
    """Progress of the parts until all are ready; important lines of theirs at any time, each with its part's name."""

    def __init__(self, console: Console, parts: tuple[str, ...]) -> None:
        self._console = console
        self._width = max(map(len, parts))
        self._started_s = time.monotonic()
        self._quiet = False
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description}", style="bold"),
            TextColumn("{task.fields[state]}", table_column=None),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks = {name: self._progress.add_task(name, total=1, state=STARTING) for name in parts}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def starting(self, name: str) -> None:
        if not self._console.is_terminal:
            self.say(f"{name:{self._width}}  {STARTING}")

    def ready(self, name: str) -> None:
        self._progress.update(self._tasks[name], completed=1, state="ready")
        if not self._console.is_terminal:
            self.say(f"{name:{self._width}}  ready after {time.monotonic() - self._started_s:.1f} s")

    def all_ready(self, text: str) -> None:
        self._progress.stop()
        self.say(text)

    def stopping(self) -> None:
        """From now on the parts' complaints about each other's end are nobody's news."""
        self._quiet = True
        self._progress.stop()
        self.say("stopping …")

    def line(self, name: str, line: str) -> None:
        """One line of a part's log."""
        if is_important(line) and not self._quiet:
            self.say(f"{name:{self._width}} │ {line}")

    def say(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)
