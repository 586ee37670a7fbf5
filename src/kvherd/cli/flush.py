"""`kvherd flush`: clear the KV caches of a whole fleet."""

import json
import math
from contextlib import nullcontext
from typing import Annotated, Any
from urllib.parse import urlencode

import typer

from kvherd.cli.gateway_client import DEFAULT_GATEWAY, AdminKeyOption, GatewayOption, JsonOption, ask_json
from kvherd.cli.tables import print_table
from kvherd.cli.watching import watching
from kvherd.core.errors import OptionInvalid

GRACE_S = 15.0
"""Beyond the engines' time: the gateway's own 5 s for each worker, and the way there and back."""

HEADINGS = ("WORKER", "KIND", "OUTCOME", "SECONDS", "MESSAGE")


def command(
    *,
    timeout: Annotated[
        float, typer.Option(min=0, help="Seconds an engine may wait until it is idle; 0 is now or refused.")
    ] = 0.0,
    hold: Annotated[
        bool,
        typer.Option("--hold", help="Let requests that come meanwhile wait behind the flush: it cannot starve."),
    ] = False,
    gateway: GatewayOption = DEFAULT_GATEWAY,
    admin_key: AdminKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Clear the KV cache of every worker, with one outcome for each.

    An engine clears its cache when it is idle. With --timeout it waits for that moment, and the terminal shows
    meanwhile what each worker is busy with; without, a busy engine refuses and says so. A worker that stalls or is
    dead costs its own entry and no more, and the answer comes within the timeout plus 5 seconds.

    Outcomes: done, refused, unsupported, unreachable, timed_out, failed.

    Exit code 0 if every worker is done, 1 if some are not or there is none, 3 if no gateway answers.
    """
    if not math.isfinite(timeout):
        raise OptionInvalid("--timeout", "must be a finite number of seconds")
    query = urlencode({"timeout": f"{timeout:g}", **({"hold": "1"} if hold else {})})
    with watching(gateway, admin_key=admin_key) if timeout and not as_json else nullcontext():
        _, answer = ask_json("POST", gateway, f"/flush_cache?{query}", timeout_s=timeout + GRACE_S, admin_key=admin_key)
    if as_json:
        print(json.dumps(answer, indent=2))
    else:
        if answer.get("workers"):
            print_table(HEADINGS, map(_row, answer["workers"]), numeric=frozenset({"SECONDS"}))
        print(answer.get("message"))
    if answer.get("success") is not True:
        raise typer.Exit(1)


def _row(worker: dict[str, Any]) -> list[object]:
    return [
        *(worker.get(name) for name in ("url", "kind", "outcome")),
        f"{worker.get('seconds', 0):.2f}",
        worker.get("message"),
    ]
