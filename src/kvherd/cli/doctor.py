"""`kvherd doctor`: what stands between one server and right KV routing, and how to mend it."""

import asyncio
import json
import logging
import secrets
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer
import uvloop

from kvherd.adapters.grpc_kv_feed import GrpcKvFeed
from kvherd.adapters.grpc_methods import engine_methods
from kvherd.adapters.grpc_url import grpc_address, grpc_target
from kvherd.adapters.grpc_worker import GrpcWorker
from kvherd.adapters.http_exchange import HttpAsker, pool_to
from kvherd.adapters.http_url import http_address
from kvherd.adapters.http_worker import HttpWorker
from kvherd.adapters.tls import ClientTls, TlsFiles, trusting_this_machine
from kvherd.cli.bridge import frame_feeds
from kvherd.cli.engine_key import EngineKeyOption, engine_key
from kvherd.cli.engine_tls import EngineCaOption, EngineCertOption, EngineTlsKeyOption, EngineTlsNameOption, engine_tls
from kvherd.cli.gateway_parts import tokenizer_from
from kvherd.cli.tables import print_table
from kvherd.core.errors import OptionInvalid
from kvherd.core.fleet.spec import GRPC
from kvherd.core.ids import Rank, WorkerId
from kvherd.ports.kv_frames import FrameFeed
from kvherd.ports.worker import Worker
from kvherd.services.doctor.examination import examine
from kvherd.services.doctor.findings import Diagnosis, Finding, Verdict
from kvherd.services.doctor.instruments import Complaint, Instruments

HEADINGS = ("CHECK", "VERDICT", "SEEN", "WHAT TO DO")
EXIT_PROBLEM = 1
EXIT_UNREACHABLE = 3


def command(
    *,
    url: Annotated[str, typer.Argument(metavar="URL", help="http://HOST:PORT or grpc://HOST:PORT of one server.")],
    events: Annotated[
        str | None,
        typer.Option(help="Where its KV events are: tcp://HOST:PORT, ipc://PATH, or grpc://HOST:PORT of a bridge."),
    ] = None,
    replay: Annotated[str | None, typer.Option(help="Where it replays them: tcp://HOST:PORT or ipc://PATH.")] = None,
    bind_events: Annotated[
        bool, typer.Option("--bind-events", help="Listen for the events: the engine connects here.")
    ] = False,
    tokenizer: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="The model's directory, on this machine.")
    ] = None,
    requests: Annotated[
        bool,
        typer.Option(
            "--requests/--no-requests",
            help="Send three completions of one token (and one to each further rank), or none.",
        ),
    ] = True,
    engine_api_key: EngineKeyOption = None,
    engine_ca: EngineCaOption = None,
    engine_tls_name: EngineTlsNameOption = None,
    engine_tls_cert: EngineCertOption = None,
    engine_tls_key: EngineTlsKeyOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON, for programs.")] = False,
) -> None:
    """Look at one server, and say what stands in the way of right KV routing and how to mend it.

    Says of each check what was seen: ok, warning (works, and could do better), problem (stands in the way) or unknown
    (could not be seen). Nothing is flushed or changed. To see events come, it sends three completions of one token.

    Takes some seconds, two minutes at the most. Exit code 0 if no problem was found, 1 if one was, 2 for an
    option that is wrong, 3 if the server cannot be reached.
    """
    logging.getLogger("kvherd").setLevel(logging.ERROR)  # what is worth a warning is a finding here
    complaint = _complaint(url, events, replay, tokenizer, bind=bind_events, requests=requests)
    key, tls = (
        engine_key(engine_api_key),
        engine_tls(TlsFiles(engine_tls_cert, engine_tls_key, engine_ca, engine_tls_name), url, events),
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        diagnosis = runner.run(_examined(complaint, key, tls))
    if as_json:
        print(json.dumps(diagnosis.as_json(), indent=2))
    else:
        print_table(HEADINGS, map(_row, diagnosis.findings), numeric=frozenset())
        print(_summary(diagnosis))
    if not diagnosis.reachable:
        raise typer.Exit(EXIT_UNREACHABLE)
    if not diagnosis.fine:
        raise typer.Exit(EXIT_PROBLEM)


def _complaint(
    url: str, events: str | None, replay: str | None, tokenizer: Path | None, *, bind: bool, requests: bool
) -> Complaint:
    """Raises `OptionInvalid`."""
    if url.startswith(("grpc:", "grpcs:")):
        grpc_address(url, option="URL")
    else:
        try:
            http_address(url)
        except OptionInvalid as error:
            raise OptionInvalid("URL", error.problem) from None
    if events is None and (replay or bind):
        raise OptionInvalid("--replay" if replay else "--bind-events", "says nothing without --events")
    if events is not None and events.startswith(("grpc:", "grpcs:")):
        grpc_address(events, option="--events")
        if replay or bind:
            raise OptionInvalid("--replay" if replay else "--bind-events", "is for an engine's own sockets only")
    elif events is not None:
        frame_feeds(events, replay, ranks=1, bind_events=bind)
    host = urlsplit(url).hostname or "127.0.0.1"
    return Complaint(
        url=url,
        host=f"[{host}]" if ":" in host else host,
        events=events,
        replay=replay,
        bind=bind,
        tokenizer=str(tokenizer) if tokenizer else None,
        requests=requests,
    )


async def _examined(complaint: Complaint, key: str | None, tls: ClientTls | None) -> Diagnosis:
    async with AsyncExitStack() as stack:
        return await examine(complaint, _instruments(complaint.url, key, tls, stack), nonce=secrets.token_hex(8))


def _instruments(url: str, key: str | None, tls: ClientTls | None, stack: AsyncExitStack) -> Instruments:
    name, door, methods = WorkerId(url), None, None
    worker: Worker
    if url.startswith(GRPC):
        worker, methods = GrpcWorker(name, tls=tls), partial(engine_methods, url, tls)
    else:
        address = http_address(url)
        pool = pool_to(address, tls)
        worker, door = HttpWorker(name, url, api_key=key, pool=pool), HttpAsker(name, address, pool, api_key=key)
    stack.push_async_callback(worker.close)
    return Instruments(
        worker=worker,
        door=door,
        methods=methods,
        frames=_frames,
        feed=partial(_feed, tls=tls),
        tokenizer=partial(tokenizer_from, tls=tls),
        expires_at_s=lambda: tls.peer_expires_at_s(url) if tls is not None else None,
    )


def _feed(url: str, *, tls: ClientTls | None) -> GrpcKvFeed:
    address, secured = grpc_target(url)
    return GrpcKvFeed(address, tls=(tls or trusting_this_machine()) if secured else None)


def _frames(events: str, replay: str | None, ranks: int, bind: bool) -> Mapping[Rank, FrameFeed]:
    return frame_feeds(events, replay, ranks=ranks, bind_events=bind)


def _row(finding: Finding) -> list[object]:
    return [finding.check, finding.verdict.value, finding.seen, finding.advice]


def _summary(diagnosis: Diagnosis) -> str:
    if not diagnosis.reachable:
        return f"{diagnosis.url} cannot be reached"
    named = {verdict: [one.check for one in diagnosis.findings if one.verdict is verdict] for verdict in Verdict}
    if named[Verdict.PROBLEM]:
        said = f"{len(named[Verdict.PROBLEM])} of {len(diagnosis.findings)} checks found what stands in the way"
    elif named[Verdict.UNKNOWN]:
        said = "nothing that was seen stands in the way"
    else:
        said = "nothing stands in the way"
    notes = (("could be better", named[Verdict.WARNING]), ("could not be seen", named[Verdict.UNKNOWN]))
    return "; ".join([said, *(f"{what}: {', '.join(checks)}" for what, checks in notes if checks)])
