"""What came of an engine's KV events while requests were sent for it, and what is to be said of that."""

import asyncio
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Final

from kvherd.core.ids import Rank
from kvherd.core.kv.events import BlocksStored, KvEvent
from kvherd.ports.worker import WorkerKind
from kvherd.services.doctor.findings import Finding, ok, problem, unknown, warning
from kvherd.services.doctor.instruments import Chart
from kvherd.services.doctor.requests import OVERLOADED, Sender

JOIN_S: Final = 0.2
"""A subscription reaches a publisher a moment after its connection does."""
TRIES: Final = 2
EVENT_S: Final = 3.0
"""After the answer to the request that they are of."""
MOST_SKEW_S: Final = 1.0
_VLLM: Final = '"enable_kv_cache_events": true, "publisher": "zmq"'


@dataclass(slots=True)
class Heard:
    """`stored` counts blocks by rank. `late_s`: from a batch's stamp to here, by both hosts' clocks."""

    sender: Sender | None
    stored: Counter[Rank] = field(default_factory=Counter)
    block_size: int = 0
    late_s: float | None = None
    refused: str = ""
    failed: str = ""
    """The request itself."""

    def take(self, events: tuple[KvEvent, ...], stamp_s: float, rank: Rank, now_s: float) -> None:
        late_s = now_s - stamp_s
        self.late_s = late_s if self.late_s is None else min(self.late_s, late_s)
        for event in events:
            if isinstance(event, BlocksStored):
                self.stored[rank] += len(event.block_hashes)
                self.block_size = event.block_size

    @property
    def silent(self) -> list[Rank]:
        """Ranks that a request was sent to, and nothing was told of."""
        return [rank for rank in self.sender.ranks if not self.stored[rank]] if self.sender else []

    @property
    def enough(self) -> bool:
        return bool(self.refused) or (self.stored.total() > 0 and not self.silent)

    async def during(self, listening: Coroutine[None, None, None]) -> None:
        """Send the requests and listen until they are answered and their events are here, at most `EVENT_S` after the
        last answer. Where nothing came, once more with another prompt: a publisher may have sent before it knew of us.
        """
        assert self.sender is not None
        async with asyncio.TaskGroup() as group:
            listener = group.create_task(listening)
            await asyncio.sleep(JOIN_S)
            for again in range(TRIES):
                if again:
                    self.sender.change_prompt()
                self.failed = await self.sender.send_to_all()
                await asyncio.wait((listener,), timeout=EVENT_S)
                if self.failed or listener.done():
                    break
            listener.cancel()


def arrived(chart: Chart, heard: Heard) -> list[Finding]:
    """What is to be said of events that came, or did not."""
    check, sender = "events arrive", heard.sender
    if sender is None:
        return [unknown(check, "no request was sent, as --no-requests says")]
    if heard.refused:
        advice = "docs/kv-events.md lists what cannot be passed on, and what avoids it"
        return [problem(check, heard.refused, advice)]
    if heard.failed and (heard.silent or not heard.stored):
        advice = OVERLOADED if sender.too_slow else "see why, then ask again"
        return [unknown(check, f"the request for it failed: {heard.failed}", advice)]
    if not heard.stored:
        seen = f"a request of a new prompt was answered, and no stored block was told of within {EVENT_S:g} s"
        advice = f"is it this engine that publishes there, and is its prefix cache on? If not, {switch_on(chart)}"
        return [problem(check, seen, advice)]
    return [_came(heard), *_block_size(chart, heard), _clock(heard)]


def _came(heard: Heard) -> Finding:
    check = "events arrive"
    if heard.silent:
        ranks = ", ".join(map(str, heard.silent))
        seen = f"requests were sent to every rank, and nothing was told of {ranks} within {EVENT_S:g} s"
        return problem(check, seen, "see that each rank publishes at a port of its own: rank r at PORT + r")
    if len(heard.stored) > 1:
        return ok(check, f"requests were sent to every rank, and all {len(heard.stored)} told of stored blocks")
    if heard.failed:
        return ok(
            check, f"{heard.stored.total()} stored blocks were told of, though our request failed: {heard.failed}"
        )
    return ok(check, f"a request was sent, and {heard.stored.total()} stored blocks were told of")


def _block_size(chart: Chart, heard: Heard) -> list[Finding]:
    told = chart.facts.block_size or chart.told.block_size
    if not told:
        return [ok("block size of events", f"{heard.block_size} tokens")]
    if heard.block_size == told:
        return []
    seen = f"its events have blocks of {heard.block_size} tokens where it says {told}"
    return [problem("block size of events", seen, "start it with one block size for all of its cache groups")]


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
    if chart.sglang:
        where = '"publisher": "zmq", "endpoint": "tcp://127.0.0.1:5557", "bind": true'
        replay = "tcp://127.0.0.1:5657"
    elif chart.facts.ranks > 1:  # ipc:// has room for one
        where, replay = f'{_VLLM}, "endpoint": "tcp://*:5557"', "tcp://*:5657"
    else:
        where, replay = f'{_VLLM}, "endpoint": "ipc:///run/vllm/events.sock"', "ipc:///run/vllm/replay.sock"
    return f'switch them on with --kv-events-config \'{{{where}, "replay_endpoint": "{replay}"}}\''
