"""CPU that relaying one request costs: the relay alone and the whole gateway, against nginx and SMG in the same run.

    .venv/bin/python bench/relay.py [--requests 20000] [--rounds 5]

Two engines that answer at once, one load generator (64 kept connections, a chat body of 1 KB, closed loop) and the
proxy are separate processes; the proxy has a core of its own where there are two. All proxies go round robin. CPU is
what the kernel accounted to the proxy's processes between the first and the last request. Prints a table, writes
bench/out/relay.json. Without nginx it measures the relay alone and says so.
"""

import argparse
import asyncio
import itertools
import json
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import uvloop
from _proxies import SMG, gateway, nginx, pin, process, smg

PEERS = {"nginx", "SMG"}
CONNECTIONS = 64
EVENTS = 32
STEP_LIMIT_S = 120.0
HERE = Path(__file__)
JSON_BODY = json.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "Paris."}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 200, "completion_tokens": 3, "total_tokens": 203},
    }
).encode()
JSON_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
    len(JSON_BODY),
    JSON_BODY,
)
MODEL_LIST = b'{"object":"list","data":[{"id":"m","object":"model","owned_by":"bench"}]}'
MODELS = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
    len(MODEL_LIST),
    MODEL_LIST,
)
HEALTHY = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
EVENT = (
    b"data: " + json.dumps({"id": "chatcmpl-1", "choices": [{"delta": {"content": " word" * 25}}]}).encode() + b"\n\n"
)
EVENT_CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"


def request(*, stream: bool) -> bytes:
    message = {"role": "user", "content": "x" * 920}
    body = json.dumps({"model": "m", "messages": [message], "stream": stream}).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\nuser-agent: bench\r\naccept: application/json\r\n"
        f"content-type: application/json\r\nauthorization: Bearer none\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


# --- the engine: answers at once, or with an event a millisecond -------------------------------------------------


class Engine(asyncio.Protocol):
    def __init__(self) -> None:
        self._left = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if data.startswith(b"GET"):
            self._transport.write(MODELS if b" /v1/models" in data else HEALTHY)
            return
        if self._left == 0:
            head, _, body = data.partition(b"\r\n\r\n")
            length = head.lower().index(b"content-length:") + 15
            self._left = int(head[length:].split(b"\r\n", 1)[0]) - len(body)
            self._stream = b'"stream": true' in body or b'"stream":true' in body
        else:
            self._left -= len(data)
        if self._left > 0:
            return
        self._left = 0
        if self._stream:
            self._transport.write(SSE_HEAD)
            self._event(EVENTS)
        else:
            self._transport.write(JSON_ANSWER)

    def _event(self, left: int) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(EVENT_CHUNK if left else LAST_CHUNK)
        if left:
            asyncio.get_running_loop().call_later(0.001, self._event, left - 1)


async def run_engine() -> None:
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


# --- the relay, with a data handler that goes round robin --------------------------------------------------------


async def run_relay(urls: list[str]) -> None:
    from kvherd.adapters.http_worker import HttpWorker  # noqa: PLC0415 - only this role needs the package
    from kvherd.core.ids import WorkerId  # noqa: PLC0415
    from kvherd.ports.worker import Call, Flight, Landed, Responder  # noqa: PLC0415
    from kvherd.services.gateway.relay.edge import DataRequest  # noqa: PLC0415
    from kvherd.services.gateway.relay.server import RelayServer  # noqa: PLC0415

    workers = itertools.cycle([HttpWorker(WorkerId(url), url) for url in urls])

    def called(incoming: DataRequest) -> Call:
        return Call(incoming.method, incoming.target, incoming.headers, incoming.body, incoming.request)

    async def forward(incoming: DataRequest, responder: Responder) -> None:
        await next(workers).forward(called(incoming), responder)

    def launch(incoming: DataRequest, responder: Responder, landed: Landed) -> Flight | None:
        return next(workers).launch(called(incoming), responder, landed)

    async def no_app(*_: object) -> None:
        raise NotImplementedError

    async with RelayServer(forward, no_app, launch=launch) as relay:
        print(relay.port, flush=True)
        await asyncio.Event().wait()


# --- the load ----------------------------------------------------------------------------------------------------


@dataclass
class Load:
    """A closed loop over `CONNECTIONS` connections until `requests` were answered."""

    data: bytes
    stream: bool
    requests: int
    sent: int = 0
    answered: int = 0

    def __post_init__(self) -> None:
        self.latencies_s: list[float] = []
        self.done = asyncio.get_running_loop().create_future()


class Client(asyncio.Protocol):
    def __init__(self, load: Load) -> None:
        self._load = load

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._ask()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._load.done.done():
            self._load.done.set_exception(exc or ConnectionError("the proxy closed a connection"))

    def data_received(self, data: bytes) -> None:
        self._got += data
        if not self._got.endswith(LAST_CHUNK if self._load.stream else JSON_BODY):
            return
        load = self._load
        if not self._got.startswith(b"HTTP/1.1 200"):
            raise AssertionError(self._got[:200])
        load.latencies_s.append(time.perf_counter() - self._asked_s)
        load.answered += 1
        if load.sent < load.requests:
            self._ask()
        elif load.answered == load.requests and not load.done.done():
            load.done.set_result(None)

    def _ask(self) -> None:
        self._got = b""
        self._load.sent += 1
        self._asked_s = time.perf_counter()
        self._transport.write(self._load.data)


async def run_load(port: int, *, stream: bool, requests: int) -> None:
    load = Load(request(stream=stream), stream, requests)
    loop = asyncio.get_running_loop()
    begin_s = time.perf_counter()
    async with asyncio.timeout(STEP_LIMIT_S):
        for _ in range(min(CONNECTIONS, requests)):
            await loop.create_connection(lambda: Client(load), "127.0.0.1", port)
        await load.done
    took_s = time.perf_counter() - begin_s
    load.latencies_s.sort()
    print(
        json.dumps(
            {
                "per_s": requests / took_s,
                "p50_ms": load.latencies_s[requests // 2] * 1e3,
                "p99_ms": load.latencies_s[requests * 99 // 100] * 1e3,
            }
        )
    )


# --- the run -----------------------------------------------------------------------------------------------------


def role(*arguments: str) -> list[str]:
    return [sys.executable, str(HERE), *arguments]


def port_of(child: subprocess.Popen[str]) -> int:
    assert child.stdout is not None
    return int(child.stdout.readline())


def cpu_s(pid: int) -> float:
    """CPU time of a process, its threads and its children, to the nanosecond."""
    pids, total_ns = [pid], 0
    while pids:
        one = pids.pop()
        for task in Path(f"/proc/{one}/task").iterdir():
            total_ns += int((task / "schedstat").read_text().split()[0])
            pids += [int(child) for child in (task / "children").read_text().split()]
    return total_ns / 1e9


def drive(port: int, *, stream: bool, requests: int) -> dict[str, float]:
    arguments = role("--role", "load", "--port", str(port), "--requests", str(requests), *(["--stream"] * stream))
    done = subprocess.run(
        arguments, check=True, capture_output=True, text=True, timeout=STEP_LIMIT_S + 10, preexec_fn=lambda: pin(1)
    )
    answer: dict[str, float] = json.loads(done.stdout)
    return answer


@dataclass(frozen=True)
class Figure:
    proxy: str
    answer: str
    cpu_us_per_request: float
    cpu_us_per_event: float | None
    requests_per_s: float
    p50_ms: float
    p99_ms: float


def measure(proxy: str, pid: int, port: int, *, stream: bool, requests: int) -> Figure:
    drive(port, stream=stream, requests=CONNECTIONS * 4)
    before_s = cpu_s(pid)
    told = drive(port, stream=stream, requests=requests)
    each_us = (cpu_s(pid) - before_s) / requests * 1e6
    events_us = each_us / EVENTS if stream else None
    answer = "SSE, 32 events" if stream else "JSON"
    return Figure(proxy, answer, each_us, events_us, told["per_s"], told["p50_ms"], told["p99_ms"])


def least_disturbed(figures: list[Figure]) -> Figure:
    """Other work on the machine only ever adds to the CPU that a request costs (caches, interrupts)."""
    return min(figures, key=lambda figure: figure.cpu_us_per_request)


def run(requests: int, rounds: int) -> list[Figure]:
    with ExitStack() as stack:
        pipe = subprocess.PIPE
        engines = [stack.enter_context(process(role("--role", "engine"), core=1, stdout=pipe)) for _ in range(2)]
        ports = [port_of(engine) for engine in engines]
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        relay = stack.enter_context(process(role("--role", "relay", *urls), core=0, stdout=pipe))
        proxies = [("kvherd relay", relay.pid, port_of(relay))]
        for name, begin, there in (
            ("kvherd gateway", gateway, True),
            ("nginx", nginx, shutil.which("nginx")),
            ("SMG", smg, SMG),
        ):
            if there:
                proxies.append((name, *stack.enter_context(begin(ports))))
            else:
                print(f"{name} is not installed (Debian: apt-get install nginx-light; KVHERD_SMG names smg): left out")
        figures = []
        for stream in (False, True):
            count = requests // 10 if stream else requests
            seen: dict[str, list[Figure]] = {}
            for _ in range(rounds):
                for name, pid, port in proxies:
                    figure = measure(name, pid, port, stream=stream, requests=count)
                    seen.setdefault(name, []).append(figure)
            figures += [least_disturbed(each) for each in seen.values()]
        return figures


def report(figures: list[Figure]) -> None:
    print(f"{'proxy':16}{'answer':17}{'CPU µs/request':>15}{'/event':>9}{'requests/s':>12}{'p50 ms':>9}{'p99 ms':>9}")
    for figure in figures:
        event = f"{figure.cpu_us_per_event:.1f}" if figure.cpu_us_per_event is not None else ""
        print(
            f"{figure.proxy:16}{figure.answer:17}{figure.cpu_us_per_request:15.1f}{event:>9}"
            f"{figure.requests_per_s:12.0f}{figure.p50_ms:9.2f}{figure.p99_ms:9.2f}"
        )
    ratios: dict[str, dict[str, float]] = {}
    for answer in dict.fromkeys(figure.answer for figure in figures):
        cpu = {figure.proxy: figure.cpu_us_per_request for figure in figures if figure.answer == answer}
        for peer in PEERS & cpu.keys():
            for ours in [name for name in cpu if name not in PEERS]:
                ratio = cpu[ours] / cpu[peer]
                ratios.setdefault(answer, {})[f"{ours} / {peer}"] = ratio
                print(f"{answer}: {ours} has {ratio:.2f}x the CPU of {peer}")
    out = HERE.parent / "out"
    out.mkdir(exist_ok=True)
    (out / "relay.json").write_text(
        json.dumps({"figures": [asdict(figure) for figure in figures], "cpu_ratios": ratios}, indent=2)
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--requests", type=int, default=20_000)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--role", choices=["engine", "relay", "load"], help=argparse.SUPPRESS)
    options.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options.add_argument("--stream", action="store_true", help=argparse.SUPPRESS)
    options.add_argument("urls", nargs="*", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    try:
        match chosen.role:
            case "engine":
                uvloop.run(run_engine())
            case "relay":
                uvloop.run(run_relay(chosen.urls))
            case "load":
                uvloop.run(run_load(chosen.port, stream=chosen.stream, requests=chosen.requests))
            case _:
                report(run(chosen.requests, chosen.rounds))
    except KeyboardInterrupt:
        return


if __name__ == "__main__":
    main()
