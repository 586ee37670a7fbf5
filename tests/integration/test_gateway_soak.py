"""A gateway at full load for ten minutes, with everything that goes wrong meanwhile, holds in the end what it held.

`KVHERD_SOAK_S=60` makes it a minute. The rule: after a warm-up the medians of a window early and of the last one are
compared (kvherd.testing.flatness), and at rest, before and after, descriptors and tasks are the same.
"""

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvherd.testing.flatness import Holding, Watch, holding, left_behind
from kvherd.testing.herds import EngineProcess, GatewayProcess, Start, begin_engine, begin_gateway
from kvherd.testing.processes import free_ports
from kvherd.testing.raw_http import RawClient
from kvherd.testing.soak_load import QUICK, TINY, Clients, QuickServer, Tally, get, post

SOAK_S = float(os.environ.get("KVHERD_SOAK_S", "600"))
WARM_UP_S = max(15.0, SOAK_S / 10)
REST_LIMIT_S = 120.0
IDLE_CONNECTIONS_S = 6.0
PATCHED = (200, 404)
FLUSHED = (200, 207, 502, 503)

pytestmark = [pytest.mark.engine, pytest.mark.soak, pytest.mark.timeout(SOAK_S + WARM_UP_S + 600)]


@dataclass
class Stage:
    start: Start
    config: Path
    quick: QuickServer
    engines: list[EngineProcess]
    gateway: GatewayProcess
    tally: Tally
    watch: Watch = field(default_factory=Watch)
    lives: int = 0
    writes: int = 0

    async def look(self, at_s: float = 0.0) -> Holding:
        async with RawClient(self.gateway.port, read_limit_bytes=2**20) as client:
            answer = await client.ask(get("/metrics"))
        return holding(self.gateway.process.pid, answer.body, at_s=at_s)

    async def load(self, seconds: float, *, watched: bool) -> None:
        clients = Clients(self.gateway.port, self.tally)
        ids = [str(worker["id"]) for worker in await asyncio.to_thread(self.gateway.workers)]
        dice, began_s = random.Random(1), time.monotonic()

        def weigh() -> bytes:
            body = json.dumps({"weight": dice.choice((1, 2, 3)), "labels": {"turn": str(dice.randrange(9))}}).encode()
            head = (
                f"PATCH /workers/{dice.choice(ids)} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            return head.encode() + body

        async def sample() -> None:
            if watched:
                self.watch.samples.append(await self.look(time.monotonic() - began_s))

        async with asyncio.TaskGroup() as group:
            for seed in range(20):
                group.create_task(clients.chats(TINY, seed))
                group.create_task(clients.chats(QUICK, 100 + seed))
            for seed in range(4):
                group.create_task(clients.leaves(TINY, 200 + seed))
                group.create_task(clients.leaves(QUICK, 300 + seed))
                group.create_task(clients.reads_slowly(400 + seed))
            group.create_task(clients.orders(lambda: post("/flush_cache?timeout=1", {}), FLUSHED, 4.0))
            group.create_task(clients.orders(weigh, PATCHED, 1.0))
            group.create_task(clients.every(self.rewrite, 3.0))
            group.create_task(clients.every(self.kill_and_revive, 10.0))
            group.create_task(clients.every(sample, 1.0))
            await asyncio.sleep(seconds)
            clients.over.set()

    async def rewrite(self) -> None:
        """The file in turns: other weights, a drain, an alias, a mistake."""
        self.writes += 1
        tiny = "".join(
            f'[[workers]]\nurl = "{engine.grpc_url if number else engine.url}"\n'
            + (f'events = "{engine.grpc_url}"\n' if not number else "")
            + (f"weight = {1 + self.writes % 3}\n" if number == 1 else "")
            + ("draining = true\n" if number == 2 and self.writes % 4 == 2 else "")
            for number, engine in enumerate(self.engines)
        )
        quick = f'[[workers]]\nurl = "{self.quick.url}"\n'
        aliases = f'[aliases]\ngpt-{self.writes % 5} = "{TINY}"\n'
        mistake = "[[workers\n" if self.writes % 4 == 3 else ""
        fresh = self.config.with_suffix(".new")
        fresh.write_text(tiny + quick + aliases + mistake)
        fresh.replace(self.config)

    async def kill_and_revive(self) -> None:
        mortal = self.engines[2]
        mortal.process.signal(signal.SIGKILL)
        await asyncio.to_thread(mortal.process.wait, within_s=20)
        await asyncio.sleep(1)
        self.engines[2] = await asyncio.to_thread(lambda: begin_engine(self.start, port=mortal.port))
        self.lives += 1

    async def rest(self) -> list[Holding]:
        """Wait until nothing is under way and kept connections to workers have gone; then look."""
        await self._until(lambda text: b"\nkvherd_gateway_running_requests 0.0\n" in text)
        await asyncio.sleep(IDLE_CONNECTIONS_S)
        seen = []
        for _ in range(7):
            seen.append(await self.look())
            await asyncio.sleep(0.5)
        return seen

    async def _until(self, holds: Callable[[bytes], bool]) -> None:
        async with asyncio.timeout(REST_LIMIT_S), RawClient(self.gateway.port, read_limit_bytes=2**20) as client:
            while not holds((await client.ask(get("/metrics"))).body):  # noqa: ASYNC110 - it is another process's
                await asyncio.sleep(0.2)


async def test_at_full_load_with_every_fault_nothing_grows_and_every_request_is_right_or_a_clean_error(
    start: Start, tmp_path: Path
) -> None:
    engines = [await asyncio.to_thread(begin_engine, start) for _ in range(3)]
    config = tmp_path / "herd.toml"
    async with QuickServer() as quick:
        config.write_text(f'[[workers]]\nurl = "{quick.url}"\n')
        port = free_ports((0, 1))
        begin = lambda: begin_gateway(start, port=port, up=1, options=("--config", str(config)))  # noqa: E731
        gateway = await asyncio.to_thread(begin)
        stage = Stage(start, config, quick, engines, gateway, Tally(mortal=engines[2].grpc_url))
        await stage.rewrite()
        await asyncio.to_thread(gateway.process.wait_for, lambda: gateway.has_up(4), what="four workers are up")
        await stage.load(WARM_UP_S, watched=False)
        before = await stage.rest()
        await stage.load(SOAK_S, watched=True)
        after = await stage.rest()
    report = [
        f"{stage.tally.requests} requests in {SOAK_S + WARM_UP_S:g} s: {dict(stage.tally.seen)}",
        f"engine killed {stage.lives} times, file written {stage.writes} times",
        f"at rest before: {before[3]}",
        f"at rest after: {after[3]}",
        *(str(one) for one in stage.watch.samples[:: max(1, len(stage.watch.samples) // 12)]),
    ]
    sys.stdout.write("\n".join(report) + "\n")  # a soak that passes is read, too: with pytest's -s or -rP
    assert stage.tally.wrong == [], "\n".join([*report, gateway.process.said[-20_000:]])
    assert stage.tally.seen["answered"] > 10 * SOAK_S
    assert [*stage.watch.growth(), *left_behind(before, after)] == [], "\n".join(report)
