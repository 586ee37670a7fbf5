"""KV events over gRPC: from kvherd's engine or bridge, or from a stock servicer."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Final

from kvherd.core.kv.events import KvEventBatch
from kvherd.core.kv.stream import EventsUnsupported, KvStreamError
from kvherd.ports.kv_feed import FeedItem, Subscribed
from kvherd.services.doctor.findings import Finding, ok, problem, warning
from kvherd.services.doctor.heard import Heard, arrived, switch_on
from kvherd.services.doctor.instruments import Chart, Instruments
from kvherd.services.doctor.requests import Sender

ACCEPT_S: Final = 4.0


async def stream(chart: Chart, instruments: Instruments, target: str, sender: Sender | None) -> list[Finding]:
    """Subscribe from zero, and listen while a request is answered."""
    heard = Heard(sender)
    try:
        async with (
            instruments.feed(target) as feed,
            aclosing(feed.subscribe({}, None)) as items,
        ):
            async with asyncio.timeout(ACCEPT_S):
                first = await anext(items)
            if sender is not None:
                await heard.during(_follow(items, heard, instruments.wall))
    except TimeoutError:
        seen = f"{target} did not accept a subscription within {ACCEPT_S:g} s"
        return [problem("KV events", seen, "look at that server's own log")]
    except EventsUnsupported as error:
        return [problem("KV events", f"{target}: {error}", _elsewhere(chart))]
    except KvStreamError as error:
        return [problem("KV events", f"{target}: {error}", "docs/kv-events.md says what each refusal means")]
    return [_accepted(target, first), *arrived(chart, heard)]


async def _follow(items: AsyncGenerator[FeedItem, None], heard: Heard, wall: Callable[[], float]) -> None:
    """Until enough was heard. What was held before comes as a snapshot, and does not count."""
    try:
        async for item in items:
            if isinstance(item, KvEventBatch):
                heard.take(item.events, item.timestamp_s, item.rank, wall())
                if heard.enough:
                    return
    except KvStreamError as error:
        heard.refused = str(error)


def _accepted(target: str, first: FeedItem) -> Finding:
    if isinstance(first, Subscribed) and first.epoch is not None:
        return ok("KV events", f"{target} accepts a subscription, and names its epoch")
    advice = "put `kvherd bridge --engine` before it: a restart that catches up is not seen without an epoch"
    return warning("KV events", f"{target} accepts a subscription, and names no epoch", advice)


def _elsewhere(chart: Chart) -> str:
    if chart.over_http:
        return "name the bridge's own address, or the engine's sockets (tcp:// or ipc://)"
    return f"{switch_on(chart)}, and put `kvherd bridge --engine {chart.complaint.url} --events …` before it"
