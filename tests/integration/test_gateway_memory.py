"""What clients cannot make a gateway do: hold more of what they sent, or did not read, than its bounds say."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import pytest

from kvherd.testing.flatness import holding
from kvherd.testing.herds import GatewayProcess, Start, begin_gateway
from kvherd.testing.raw_http import RawClient, RawRequest, until
from kvherd.testing.soak_load import QUICK, QuickServer, get, post, quick_worker

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

SLOW_CLIENTS = 1000
AT_ONCE = 50
FLOODS = 6
FLOOD = 300
BODY_BYTES = 256 * 1024
PATIENCE_S = 60.0


@dataclass
class Stage:
    gateway: GatewayProcess
    port: int

    async def resident_mb(self) -> float:
        async with RawClient(self.port, read_limit_bytes=2**20) as client:
            answer = await client.answer_to(get("/metrics"), within_s=PATIENCE_S)
        return holding(self.gateway.process.pid, answer.body, at_s=0).resident_mb


class HeldServer(QuickServer):
    """Answers completions when it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.free = asyncio.Event()
        self.held = 0

        async def script(request: RawRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.requests.clear()
            if request.method == "POST":
                self.held += 1
                await self.free.wait()
            await quick_worker(request, reader, writer)

        self.script = script


@asynccontextmanager
async def before(start: Start, worker: QuickServer, *options: str) -> AsyncIterator[Stage]:
    async with worker:
        gateway = await asyncio.to_thread(begin_gateway, start, worker.url, up=1, options=options)
        yield Stage(gateway, gateway.port)


async def test_a_flood_past_the_bound_is_told_to_return_and_leaves_memory_flat(start: Start) -> None:
    """Six floods, each of 300 requests of 256 KB: 77 MB, of which four run and eight wait. Kept, they were 460; how
    much of one is there at once is the clients' and the kernel's affair.
    """
    worker = HeldServer()
    asked = post("/v1/completions", {"model": QUICK, "prompt": "x" * BODY_BYTES})
    bounds = ("--max-requests", "4", "--max-waiting", "8", "--max-wait-s", "300", "--policy", "round_robin")
    async with before(start, worker, *bounds) as stage:
        sizes_mb = [await stage.resident_mb()]
        for _ in range(FLOODS):
            statuses: Counter[int] = Counter()
            worker.free.clear()

            async def one(statuses: Counter[int] = statuses) -> None:
                async with RawClient(stage.port) as client:
                    answer = await client.answer_to(asked, within_s=PATIENCE_S)
                    statuses[answer.status] += 1
                    if answer.status == 429:
                        assert int(answer.headers["retry-after"]) > 0
                        assert json.loads(answer.body)["error"]["code"]

            async with asyncio.TaskGroup() as group:
                for _ in range(FLOOD):
                    group.create_task(one())
                await until(lambda: statuses[429] == FLOOD - 12, "all but those that run or wait are turned away", 60.0)  # noqa: B023
                sizes_mb.append(await stage.resident_mb())
                worker.free.set()
            assert statuses == {200: 12, 429: FLOOD - 12}
        assert max(sizes_mb) - sizes_mb[0] < 1.5 * FLOOD * BODY_BYTES / 1e6, f"it keeps some of every flood: {sizes_mb}"


async def test_a_thousand_clients_that_do_not_read_cost_a_bounded_buffer_each_and_keep_nobody_waiting(
    start: Start, descriptors: int
) -> None:
    """4 MB for each of them would be 4 GB. One may cost a mark of 64 KB, and what was read at once beyond it."""
    if descriptors < 3 * SLOW_CLIENTS:
        pytest.skip(f"{descriptors} file descriptors are too few for {SLOW_CLIENTS} clients")
    asked = post("/v1/completions", {"model": QUICK, "prompt": "large", "stream": True})
    worker = QuickServer()
    worker.kernel_bytes = 2**16
    async with before(start, worker, "--policy", "round_robin") as stage, AsyncExitStack() as stack:
        idle_mb = await stage.resident_mb()

        async def begin_slowly() -> None:
            client = RawClient(stage.port, read_limit_bytes=2**12, kernel_bytes=2**13, segment_bytes=1460)
            await stack.enter_async_context(client)
            client.send(asked)
            head = await client.answer(to_head=True, within_s=PATIENCE_S)
            assert head.status == 200

        for _ in range(SLOW_CLIENTS // AT_ONCE):
            async with asyncio.TaskGroup() as group:
                for _ in range(AT_ONCE):
                    group.create_task(begin_slowly())
        sizes_mb = [await stage.resident_mb() for _ in range(5)]
        assert max(sizes_mb) - idle_mb < 0.5 * SLOW_CLIENTS
        async with RawClient(stage.port) as quick:
            answer = await quick.answer_to(
                post("/v1/completions", {"model": QUICK, "prompt": "a"}), within_s=PATIENCE_S
            )
            assert answer.status == 200
