"""`kvherd workers`: who is in the fleet and what each holds."""

import json
import time
from typing import Annotated, Any

import typer

from kvherd.cli.gateway_client import DEFAULT_GATEWAY, AdminKeyOption, GatewayOption, JsonOption, ask_json
from kvherd.cli.tables import print_table

TIMEOUT_S = 10.0
SERVING = "up"
HEADINGS = ("WORKER", "KIND", "MODELS", "STATE", "RUNNING", "WAITING", "KV", "EPOCH", "BLOCKS", "LAG MS", "TRUTH")
NUMERIC = frozenset({"RUNNING", "WAITING", "BLOCKS", "LAG MS"})
DAY_S = 86_400.0
WARNS_S = 14 * DAY_S
SHOWN_OF_EPOCH = 8


def command(
    *,
    gateway: GatewayOption = DEFAULT_GATEWAY,
    admin_key: AdminKeyOption = None,
    as_json: JsonOption = False,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for the gateway.")] = TIMEOUT_S,
) -> None:
    """List the workers of a gateway: kind, state, load, and what is known of their KV caches.

    KV is `live` when the gateway follows the worker's KV events, so that its cached blocks count in routing;
    otherwise it names why they do not; `incomplete` if it may hold blocks that nobody told of. LAG MS is how long its
    events take to get here: the last ones, and the worst of the last minute. TRUTH is how often predicted and reported
    cached tokens were compared, and how often they differed of late; `kvherd audit` has more of it. STATE names the
    certificate of a worker over TLS if that expires within 14 days.

    Exit code 0 if every worker is up, 1 if some are not or there is none, 3 if no gateway answers.
    """
    _, answer = ask_json("GET", gateway, "/workers", timeout_s=timeout, admin_key=admin_key)
    workers = answer.get("workers", [])
    if as_json:
        print(json.dumps(answer, indent=2))
    elif workers:
        print_table(HEADINGS, map(_row, workers), numeric=NUMERIC)
    else:
        print("no workers")
    if not workers or any(worker.get("state") != SERVING for worker in workers):
        raise typer.Exit(1)


def _row(worker: dict[str, Any]) -> list[object]:
    kv = worker.get("kv") or {}
    told = f"{kv.get('state')}: {kv['reason']}" if kv.get("reason") else kv.get("state")
    models = ", ".join(worker.get("models") or ())
    state = _certificate(worker.get("certificate_expires_s"), str(worker.get("state")))
    if kv.get("complete") is False:
        told = f"{told}, incomplete"
    epoch = (kv.get("epoch") or "")[:SHOWN_OF_EPOCH]
    lag = "/".join(f"{kv[name] * 1000:.1f}" for name in ("lag_s", "worst_lag_s") if kv.get(name) is not None)
    return [
        *map(worker.get, ("url", "kind")),
        models,
        state,
        *map(worker.get, ("running", "waiting")),
        *(told, epoch, kv.get("blocks"), lag, _truth(worker.get("truth") or {})),
    ]


def _certificate(expires_s: float | None, state: str) -> str:
    """The state, with a word on a certificate that wants renewing."""
    left_s = None if expires_s is None else expires_s - time.time()
    if left_s is None or left_s > WARNS_S:
        return state
    return f"{state}, certificate " + ("expired" if left_s <= 0 else f"expires in {left_s / DAY_S:.1f} days")


def _truth(truth: dict[str, Any]) -> str:
    """Counts in words, without those that are nothing; empty where nothing was ever claimed."""
    counts = [f"{truth[name]} {name}" for name in ("decided", "undecided", "unavailable") if truth.get(name)]
    if truth.get("decided"):
        counts.insert(1, f"{truth.get('error_rate', 0):.1%} wrong")
    return ", ".join(counts)
