"""`kvherd audit`: is what the gateway believes of the workers' caches true?"""

import json
import time
from typing import Annotated, Any

import typer

from kvherd.cli.gateway_client import DEFAULT_GATEWAY, AdminKeyOption, GatewayOption, JsonOption, ask_json
from kvherd.cli.tables import print_table

TIMEOUT_S = 10.0
COUNTS = ("decided", "wrong", "undecided", "unavailable")
HEADINGS = ("WORKER", *map(str.upper, COUNTS), "ERROR RATE", "REBUILDS", "LAST WRONG", "PROMPTS THAT DIFFER", "ADVICE")
NUMERIC = frozenset({*map(str.upper, COUNTS), "ERROR RATE", "REBUILDS"})


def command(
    *,
    gateway: GatewayOption = DEFAULT_GATEWAY,
    admin_key: AdminKeyOption = None,
    as_json: JsonOption = False,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for the gateway.")] = TIMEOUT_S,
) -> None:
    """Compare what the gateway predicted to be cached with what the workers' answers said.

    Each answer is decided (the prediction was right or wrong), undecided (something else happened at that worker in
    between) or unavailable (it did not say what was cached). ERROR RATE is the share of wrong ones among the last 200
    decided; with a third, what the worker holds is told to the gateway from zero, and counted in REBUILDS.

    Exit code 0 if all is fine, 1 if a worker is above 1 % or nothing could be decided of its answers, or if there are
    none, 3 if no gateway answers.
    """
    _, answer = ask_json("GET", gateway, "/audit", timeout_s=timeout, admin_key=admin_key)
    workers = answer.get("workers", [])
    if as_json:
        print(json.dumps(answer, indent=2))
    elif workers:
        print_table(HEADINGS, map(_row, workers), numeric=NUMERIC)
    else:
        print("no workers")
    if answer.get("fine") is not True:
        raise typer.Exit(1)


def _row(worker: dict[str, Any]) -> list[object]:
    return [
        worker.get("url"),
        *map(worker.get, COUNTS),
        f"{worker.get('error_rate', 0):.1%}" if worker.get("decided") else None,
        worker.get("rebuilds"),
        _wrong(worker.get("last_wrong") or {}),
        ", ".join(worker.get("differing_prompts") or ()),
        worker.get("advice"),
    ]


def _wrong(last: dict[str, Any]) -> str:
    if not last:
        return ""
    at = time.strftime("%H:%M:%S", time.localtime(last.get("at_s", 0)))
    return f"{last.get('predicted_tokens')} predicted, {last.get('reported_tokens')} reported at {at}"
