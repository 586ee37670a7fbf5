"""`kvherd doctor` as a process, for tests: what it found, by check."""

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvherd.testing.processes import OwnedProcess
from kvherd.testing.stock_engines import READY_S, StockEngine, StockServer, model_directory

DOCTOR_S = 140.0
PROBLEM, WARNING, UNKNOWN = "problem", "warning", "unknown"
OWN = ("--tokenizer", str(model_directory()))
"""The option with the very directory that stock engines serve."""


@dataclass(frozen=True)
class Told:
    """The exit status, and what was found by check: (verdict, seen, what to do)."""

    status: int
    checks: dict[str, tuple[str, str, str]]

    def but_ok(self) -> dict[str, str]:
        """The verdict of every check that is not fine."""
        return {check: verdict for check, (verdict, _, _) in self.checks.items() if verdict != "ok"}

    def seen(self, check: str) -> str:
        return self.checks[check][1]

    def advice(self, check: str) -> str:
        return self.checks[check][2]


def examined(url: str, *words: str, key: str = "") -> Told:
    """Waits for the process; do not call it in an event loop that serves what is examined."""
    command = [sys.executable, "-m", "kvherd.cli.main", "doctor", url, *words, "--json"]
    with OwnedProcess(command, environment={"KVHERD_ENGINE_API_KEY": key}) as process:
        status = process.wait(within_s=DOCTOR_S)
        document: dict[str, Any] = json.loads(process.said)
    return Told(status, {one["check"]: (one["verdict"], one["seen"], one["do"]) for one in document["checks"]})


@contextmanager
def running(server: StockServer) -> Iterator[StockServer]:
    """The stock server, answering."""
    with ExitStack() as stack:
        StockEngine(server, stack.enter_context).await_ready(within_s=READY_S * server.ranks)
        yield server


def model_with_template(folder: Path) -> Path:
    """A copy of the stock engines' directory, as far as a tokenizer needs it, with another chat template."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((model_directory() / name).read_bytes())
    (folder / "chat_template.jinja").write_text("{% for one in messages %}<{{ one.content }}>{% endfor %}")
    return folder
