"""A flush of a whole fleet, one worker dead and one stalled, against the slowest worker's deadline.

    .venv/bin/python bench/fanout.py [--workers 200] [--timeout 1] [--rounds 3]

The workers are HTTP servers on real sockets in a process of their own; all but two answer at once. The dead one does
not listen, the stalled one takes the order and never answers. The goal is at most 1.05 times the deadline
(timeout + 5 s). A fleet without those two is flushed as well, to show what the fan-out itself costs, at once and with
every engine waiting the full timeout. Prints the ratios, writes bench/out/fanout.json.
"""

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from kvherd.adapters.http_worker import HttpWorker
from kvherd.core.fleet.fanout import FanoutReport, Outcome
from kvherd.core.ids import WorkerId
from kvherd.services.gateway.fleet.orders import GRACE_S, UNHEEDED, Addressee, flush_fleet

OUT = Path(__file__).parent / "out" / "fanout.json"
GOAL = 1.05
ANSWERS = {
    b"/server_info": {"kvherd": {"version": "0"}, "block_size": 16},
    b"/v1/models": {"object": "list", "data": [{"id": "m"}]},
    b"/flush_cache": {"success": True, "message": "cleared"},
}


@dataclass(frozen=True)
class Figures:
    workers: int
    deadline_s: float
    faulty_s: list[float]
    healthy_s: float
    waiting_s: float
    timeout_s: float
    outcomes: dict[str, int]

    @property
    def ratio(self) -> float:
        return max(self.faulty_s) / self.deadline_s


# --- the workers' process -----------------------------------------------------------------------------------


async def serve(count: int) -> None:
    """Serve `count` workers until standard input ends; prints their ports, the last being the one that stalls."""
    servers = []
    for number in range(count):
        stalls = number == count - 1
        server = await asyncio.start_server(partial(answer, stalls=stalls), "127.0.0.1", 0)
        servers.append(server)
    print(json.dumps([server.sockets[0].getsockname()[1] for server in servers]), flush=True)
    await asyncio.to_thread(sys.stdin.read)


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, stalls: bool) -> None:
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            path, _, query = head.split(b" ", 2)[1].partition(b"?")
            wait = float(query.partition(b"=")[2] or 0)
            if path == b"/flush_cache" and stalls:
                await reader.read()  # until the gateway gives up
            if path == b"/flush_cache" and wait:
                await asyncio.sleep(wait - 0.1)
            body = json.dumps(ANSWERS.get(path, {})).encode()
            status = b"200 OK" if path in ANSWERS else b"404 Not Found"
            writer.write(
                b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                % (status, len(body), body)
            )
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


# --- the fan-out --------------------------------------------------------------------------------------------


async def measure(ports: list[int], dead_port: int, args: argparse.Namespace) -> Figures:
    healthy = [await detected(port) for port in ports[:-1]]
    stalled, dead = await detected(ports[-1]), addressee(dead_port)
    fleet = [dead, stalled, *healthy[: args.workers - 2]]
    faulty_s = []
    try:
        for _ in range(args.rounds):
            took_s, report = await timed(fleet, args.timeout)
            faulty_s.append(took_s)
            check(report, len(fleet))
        healthy_s, _ = await timed(healthy, 0.0)
        waiting_s, _ = await timed(healthy, args.timeout)
    finally:
        for to in (dead, stalled, *healthy):
            await to.worker.close()
    outcomes = {outcome.value: sum(one.outcome is outcome for one in report.results) for outcome in Outcome}
    return Figures(len(fleet), args.timeout + GRACE_S, faulty_s, healthy_s, waiting_s, args.timeout, outcomes)


async def timed(fleet: list[Addressee], timeout_s: float) -> tuple[float, FanoutReport]:
    began = time.perf_counter()
    report = await flush_fleet(fleet, timeout_s=timeout_s, heed=UNHEEDED)
    return time.perf_counter() - began, report


def check(report: FanoutReport, workers: int) -> None:
    """A figure for a flush that went otherwise than described would be worth nothing."""
    got = [one.outcome for one in report.results]
    assert got == [Outcome.UNREACHABLE, Outcome.TIMED_OUT, *[Outcome.DONE] * (workers - 2)], report.message("flushed")


def addressee(port: int) -> Addressee:
    url = f"http://127.0.0.1:{port}"
    return Addressee(HttpWorker(WorkerId(url), url), "kvherd-http")


async def detected(port: int) -> Addressee:
    to = addressee(port)
    await to.worker.detect()
    return to


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=200)
    parser.add_argument("--timeout", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve(args.serve))
        return
    command = [sys.executable, __file__, "--serve", str(args.workers)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as servers:
        assert servers.stdout is not None
        ports = json.loads(servers.stdout.readline())
        figures = asyncio.run(measure(ports, dead_port(), args))
        assert servers.stdin is not None
        servers.stdin.close()
    show(figures)


def dead_port() -> int:
    """A port of this machine on which nobody listens."""

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def show(figures: Figures) -> None:
    print(f"fleet flush, {figures.workers} workers, one dead, one stalled, deadline {figures.deadline_s:g} s")
    print(f"  took             {', '.join(f'{one:.3f}' for one in figures.faulty_s)} s")
    print(f"  ratio (worst)    {figures.ratio:.3f}   goal <= {GOAL}")
    print(f"  all well, now    {figures.healthy_s * 1000:.0f} ms")
    print(f"  all well, each engine waiting {figures.timeout_s - 0.1:g} s: {figures.waiting_s:.3f} s")
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps({**asdict(figures), "ratio": figures.ratio, "goal": GOAL}, indent=2))


if __name__ == "__main__":
    main()
