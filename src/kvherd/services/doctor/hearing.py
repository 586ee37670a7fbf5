"""KV events on an engine's own sockets: does anyone publish, do they come, how far back do they go?"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Final

from kvherd.core.errors import FrameInvalid, OptionInvalid, StartFailed
from kvherd.core.ids import Rank
from kvherd.core.kv.events import BlocksStored, KvEvent
from kvherd.core.kv.feed import Connected, Received
from kvherd.core.kv.stream import BatchUntranslatable
from kvherd.ports.kv_frames import FrameFeed
from kvherd.ports.worker import WorkerKind
from kvherd.services.doctor.findings import Finding, ok, problem, unknown, warning
from kvherd.services.doctor.instruments import Chart, Instruments
from kvherd.services.doctor.replay import replays
from kvherd.wire.vllm_kv import decode_batch

CONNECT_S: Final = 2.5
EVENT_S: Final = 3.0
"""After the answer to the request that they are of."""
MOST_SKEW_S: Final = 1.0

Send = Callable[[], Awaitable[str]]
"""Sends a request whose prompt will be stored, and says what went wrong; empty if nothing did. Raises nothing."""


@dataclass(slots=True)
class Heard:
    """What came while a request was under way. `late_s`: from a batch's stamp to here, by both hosts' clocks."""

    ranks: set[Rank] = field(default_factory=set)
    batches: int = 0
    stored: int = 0
    block_size: int = 0
    late_s: float | None = None
    refused: str = ""
    failed: str = ""
    """The request itself."""

    def take(self, events: tuple[KvEvent, ...], stamp_s: float, rank: Rank, now_s: float) -> None:
        self.batches += 1
        self.ranks.add(rank)
        late_s = now_s - stamp_s
        self.late_s = late_s if self.late_s is None else min(self.late_s, late_s)
        for event in events:
            if isinstance(event, BlocksStored):
                self.stored += len(event.block_hashes)
                self.block_size = event.block_size


async def sockets(chart: Chart, instruments: Instruments, send: Send | None) -> list[Finding]:
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
            return await _listen(chart, instruments, feeds, send, events)
    except OptionInvalid as error:
        return [problem("KV events", str(error), "name the endpoint of rank 0 as it is seen from here")]
    except StartFailed as error:
        advice = "somebody listens there already, perhaps a bridge: ask that one (--events grpc://HOST:PORT)"
        return [problem("KV events", str(error), advice if complaint.bind else "name an endpoint that can be reached")]


async def _listen(
    chart: Chart, instruments: Instruments, feeds: Mapping[Rank, FrameFeed], send: Send | None, events: str
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
    heard = await _hear(instruments, feeds, send)
    findings += arrived(chart, heard, asked=send is not None)
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


async def _hear(instruments: Instruments, feeds: Mapping[Rank, FrameFeed], send: Send | None) -> Heard:
    """Until a stored block was heard of, or the time is over."""
    heard = Heard()

    async def follow(rank: Rank, feed: FrameFeed) -> None:
        while not (heard.stored or heard.refused):
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

    if send is not None:
        await while_sent(send, heard, follow_all())
    return heard


async def while_sent(send: Send, heard: Heard, listening: Coroutine[None, None, None]) -> None:
    """Listen until the request is answered and its events are here, at most `EVENT_S` after the answer."""
    async with asyncio.TaskGroup() as group:
        listener = group.create_task(listening)
        heard.failed = await send()
        await asyncio.wait((listener,), timeout=EVENT_S)
        listener.cancel()


def arrived(chart: Chart, heard: Heard, *, asked: bool) -> list[Finding]:
    """What is to be said of events that came, or did not."""
    if not asked:
        return [unknown("events arrive", "no request was sent, as --no-requests says")]
    if heard.refused:
        advice = "docs/kv-events.md lists what cannot be passed on, and what avoids it"
        return [problem("events arrive", heard.refused, advice)]
    if not heard.stored and heard.failed:
        return [unknown("events arrive", f"the request for it failed: {heard.failed}", "see why, then ask again")]
    if not heard.stored:
        seen = f"a request of a new prompt was answered, and no stored block was told of within {EVENT_S:g} s"
        return [
            problem(
                "events arrive",
                seen,
                f"is it this engine that publishes there, and is its prefix cache on? If not, {switch_on(chart)}",
            )
        ]
    findings = [ok("events arrive", f"a request was sent, and {heard.stored} stored blocks were told of")]
    told = chart.facts.block_size or chart.told.block_size
    if told and heard.block_size != told:
        seen = f"its events have blocks of {heard.block_size} tokens where it says {told}"
        findings.append(
            problem("block size of events", seen, "start it with one block size for all of its cache groups")
        )
    elif not told:
        findings.append(ok("block size of events", f"{heard.block_size} tokens"))
    return [*findings, _clock(heard)]


def _clock(heard: Heard) -> Finding:
    late_s = heard.late_s or 0.0
    if abs(late_s) <= MOST_SKEW_S:
        return ok("clock", f"a batch is here {late_s * 1000:.0f} ms after its stamp")
    which = "behind" if late_s > 0 else "ahead of"
    seen = f"its batches are stamped {abs(late_s):.1f} s {which} this clock"
    return warning("clock", seen, "keep both clocks by NTP: the lag that is shown is wrong by that, flushes are not")


def switch_on(chart: Chart) -> str:
    """The option that switches events on, for this kind of engine."""
    if chart.facts.kind in (WorkerKind.KVHERD_HTTP, WorkerKind.SGLANG_GRPC) and not chart.sglang:
        return "kvherd's own engine tells them at its gRPC port, always"
    where = '"endpoint": "tcp://127.0.0.1:5557", "bind": true, "replay_endpoint": "tcp://127.0.0.1:5657"'
    if chart.sglang:
        return f'switch them on with --kv-events-config \'{{"publisher": "zmq", {where}}}\''
    where = '"endpoint": "ipc:///run/vllm/events.sock", "replay_endpoint": "ipc:///run/vllm/replay.sock"'
    return f'switch them on with --kv-events-config \'{{"enable_kv_cache_events": true, "publisher": "zmq", {where}}}\''
