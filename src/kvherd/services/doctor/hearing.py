"""KV events on an engine's own sockets: does anyone publish, do they come, how far back do they go?"""

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Final

from kvherd.core.errors import FrameInvalid, OptionInvalid, StartFailed
from kvherd.core.ids import Rank
from kvherd.core.kv.frames import Connected, Received
from kvherd.core.kv.stream import BatchUntranslatable
from kvherd.ports.kv_frames import FrameFeed
from kvherd.services.doctor.findings import Finding, ok, problem, unknown
from kvherd.services.doctor.heard import Heard, arrived, switch_on
from kvherd.services.doctor.instruments import Chart, Instruments
from kvherd.services.doctor.replay import replays
from kvherd.services.doctor.requests import Sender
from kvherd.wire.vllm_kv import decode_batch

CONNECT_S: Final = 4.0


async def sockets(chart: Chart, instruments: Instruments, sender: Sender | None) -> list[Finding]:
    """Listen at the endpoints that were named or told."""
    complaint, told = chart.complaint, chart.told
    events = complaint.events or told.endpoint
    replay = complaint.replay or (None if complaint.events else told.replay)
    if told.on is False:
        return [problem("KV events", "it says itself that they are off", switch_on(chart))]
    if events is None:
        return [
            unknown(
                "KV events",
                "it does not say where they are",
                f"if they are on, name them with --events; else {switch_on(chart)}",
            )
        ]
    if not told.listens and not complaint.bind:
        advice = f"try again with --events {events} --bind-events, and give the bridge that too (or the worker bind=1)"
        return [problem("KV events", f"it connects to {events}: nobody hears them unless they listen there", advice)]
    if told.endpoint and told.listens and complaint.bind:
        advice = "leave --bind-events out, here and of the bridge (and bind=1 of the worker)"
        return [problem("KV events", f"it listens at {told.endpoint} itself", advice)]
    try:
        feeds = instruments.frames(events, replay, max(1, chart.facts.ranks), complaint.bind)
        async with AsyncExitStack() as stack:
            for feed in feeds.values():
                await stack.enter_async_context(feed)
            return await _listen(chart, instruments, feeds, sender, events)
    except OptionInvalid as error:
        return [problem("KV events", str(error), "name the endpoint of rank 0 as it is seen from here")]
    except StartFailed as error:
        advice = "somebody listens there already, perhaps a bridge: ask that one (--events grpc://HOST:PORT)"
        return [problem("KV events", str(error), advice if complaint.bind else "name an endpoint that can be reached")]


async def _listen(
    chart: Chart, instruments: Instruments, feeds: Mapping[Rank, FrameFeed], sender: Sender | None, events: str
) -> list[Finding]:
    async with asyncio.TaskGroup() as group:
        waiting = {rank: group.create_task(_connected(feed)) for rank, feed in feeds.items()}
    absent = [rank for rank, task in waiting.items() if not task.result()]
    if absent:
        return [_nobody(chart, events, absent, len(feeds))]
    how = "it connects to us" if chart.complaint.bind else "it listens"
    findings = [
        ok("KV events", f"{how} at {events}" + (f" and the {len(feeds) - 1} after it" if len(feeds) > 1 else ""))
    ]
    heard = await _hear(instruments, feeds, sender)
    findings += arrived(chart, heard)
    findings.append(await replays(feeds, elsewhere=chart.told.replay))
    return findings


async def _connected(feed: FrameFeed) -> bool:
    loop = asyncio.get_running_loop()
    until_s = loop.time() + CONNECT_S
    while (left_s := until_s - loop.time()) > 0:
        if isinstance(await feed.next(within_s=left_s), Connected):
            return True
    return False


def _nobody(chart: Chart, events: str, absent: list[Rank], ranks: int) -> Finding:
    which = "" if ranks == 1 else f" (ranks {', '.join(map(str, absent))})"
    if chart.complaint.bind:
        seen = f"nobody connected to {events}{which} within {CONNECT_S:g} s"
        return problem("KV events", seen, f"leave --bind-events out if the engine listens; {switch_on(chart)}")
    told = chart.told.endpoint
    elsewhere = f"; it says that its events are at {told}" if told and told != events else ""
    seen = f"nobody listens at {events}{which}{elsewhere}"
    if events.startswith("tcp://"):
        advice = (
            "an endpoint without * or :: makes vLLM, and SGLang without bind, connect to it: try --bind-events; or "
        )
        return problem("KV events", seen, advice + switch_on(chart))
    return problem("KV events", seen, switch_on(chart))


async def _hear(instruments: Instruments, feeds: Mapping[Rank, FrameFeed], sender: Sender | None) -> Heard:
    """Until a stored block was heard of, or the time is over."""
    heard = Heard(sender)

    async def follow(rank: Rank, feed: FrameFeed) -> None:
        while not heard.enough:
            item = await feed.next(within_s=0.2)
            if isinstance(item, Received):
                try:
                    batch = decode_batch(item.frame.payload)
                except (FrameInvalid, BatchUntranslatable) as error:
                    heard.refused = str(error)
                else:
                    heard.take(batch.events, batch.timestamp_s, rank, instruments.wall())

    async def follow_all() -> None:
        async with asyncio.TaskGroup() as group:
            for rank, feed in feeds.items():
                group.create_task(follow(rank, feed))

    if sender is not None:
        await heard.during(follow_all())
    return heard
