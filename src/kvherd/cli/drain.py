"""`kvherd drain`: take a worker out of service without cutting a request off."""

import json
from contextlib import nullcontext
from typing import Annotated, Any
from urllib.parse import quote

import typer

from kvherd.cli.gateway_client import DEFAULT_GATEWAY, AdminKeyOption, GatewayOption, JsonOption, ask_json
from kvherd.cli.watching import watching
from kvherd.core.errors import OptionInvalid

GRACE_S = 15.0
ASK_S = 10.0
MOST_NAMED = 3


def command(
    worker: Annotated[str, typer.Argument(metavar="URL|ID", help="The worker, as `kvherd workers` names it.")],
    *,
    timeout: Annotated[
        float, typer.Option(min=0, max=3600, help="Seconds for what is under way; then it is cut off.")
    ] = 600.0,
    keep: Annotated[
        bool, typer.Option("--keep", help="Only send it no new request: it stays a member, and nothing is cut off.")
    ] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Send it requests again, after --keep.")] = False,
    gateway: GatewayOption = DEFAULT_GATEWAY,
    admin_key: AdminKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send a worker no new request, wait for those under way, and let it go.

    A terminal shows meanwhile what still runs there. Drain a worker before its engine is stopped or updated; when it is
    back, add it again (POST /workers, or the gateway's configuration file). Called twice, the nearer end counts.

    Exit code 0 if every request ended by itself, 1 if some were cut off or there is no such worker, 3 if no gateway
    answers.
    """
    if keep and undo:
        raise OptionInvalid("--undo", "is for a worker that --keep drained; give one of the two")
    path = f"/workers/{quote(worker, safe='')}"
    if keep or undo:
        body = json.dumps({"draining": keep}).encode()
        _, answer = ask_json("PATCH", gateway, path, timeout_s=ASK_S, admin_key=admin_key, body=body)
        print(json.dumps(answer, indent=2) if as_json else _kept(answer, keep=keep))
        return
    progress = nullcontext() if as_json else watching(gateway, admin_key=admin_key, path=path, describe=progress_line)
    with progress:
        order = f"{path}?timeout={timeout:g}"
        _, answer = ask_json("DELETE", gateway, order, timeout_s=timeout + GRACE_S, admin_key=admin_key)
    drained = answer.get("drained") is True
    if as_json:
        print(json.dumps(answer, indent=2))
    else:
        ended = "every request there has ended" if drained else f"after {timeout:g} s its last requests were cut off"
        print(f"{answer.get('url')} has left: {ended}")
    if not drained:
        raise typer.Exit(1)


def _kept(answer: dict[str, Any], *, keep: bool) -> str:
    url, left = answer.get("url"), answer.get("outstanding")
    if not keep:
        return f"{url} takes requests again"
    return f"{url} takes no new request; {left} under way there (kvherd drain {url} --undo takes this back)"


def progress_line(worker: dict[str, Any]) -> str:
    """One sentence: what still runs there, the longest first, and for how long that may go on."""
    left, longest = worker.get("outstanding") or 0, (worker.get("under_way") or [])[:MOST_NAMED]
    if not left:
        return f"{worker.get('url')}: nothing is under way"
    named = ", ".join(f"{one.get('request')} for {one.get('seconds', 0):.0f} s" for one in longest)
    more = f" and {left - len(longest)} more" if left > len(longest) else ""
    bound = f"; cut off in {worker['leaves_in_s']:.0f} s" if worker.get("leaves_in_s") is not None else ""
    return f"{worker.get('url')}: {left} under way ({named}{more}){bound}"
