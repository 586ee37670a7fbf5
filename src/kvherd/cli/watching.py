"""What a person sees while an order waits for engines to be idle: who is busy with what, on standard error."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import typer
from rich.console import Console

from kvherd.cli.gateway_client import ask_json
from kvherd.core.errors import GatewayUnreachable

PERIOD_S = 0.5
ASK_S = 2.0
MOST_NAMED = 4


Describe = Callable[[dict[str, Any]], str]
"""Makes one sentence of what the gateway answers."""


@contextmanager
def watching(
    gateway: str, *, admin_key: str | None, path: str = "/workers", describe: Describe | None = None
) -> Iterator[None]:
    """Show one line that is kept up to date, and nothing where standard error is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    over = threading.Event()
    described = describe or _busy
    with console.status("waiting for the workers") as line:

        def look() -> None:
            while not over.wait(PERIOD_S):
                with suppress(GatewayUnreachable, typer.Exit):  # the order itself says what is wrong
                    _, answer = ask_json("GET", gateway, path, timeout_s=ASK_S, admin_key=admin_key)
                    line.update(described(answer))

        watcher = threading.Thread(target=look, name="watch", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join(ASK_S + PERIOD_S)


def _busy(answer: dict[str, Any]) -> str:
    return busy_line(answer.get("workers") or [])


def busy_line(workers: list[dict[str, object]]) -> str:
    """One sentence: who still runs or queues something."""
    busy = [one for one in workers if one.get("running") or one.get("waiting")]
    if not busy:
        return "waiting for the workers; none says that it is busy"
    named = [f"{one.get('url')}: {one.get('running')} running, {one.get('waiting')} waiting" for one in busy]
    more = f"; and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
    return f"waiting for {len(busy)} of {len(workers)} workers to be idle. {'; '.join(named[:MOST_NAMED])}{more}"
