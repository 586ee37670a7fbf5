"""CPU that relaying one request costs, against nginx as the same kind of proxy in the same run.

    .venv/bin/python bench/relay.py [--requests 20000] [--rounds 5]

Two engines that answer at once, one load generator (64 kept connections, a chat body of 1 KB, closed loop) and the
proxy are separate processes; the proxy has a core of its own where there are two. Both proxies go round robin. CPU is
what the kernel accounted to the proxy's processes between the first and the last request. Prints a table, writes
bench/out/relay.json. Without nginx it measures the relay alone and says so.
"""

import argparse
import asyncio
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import cast

import uvloop

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
        if self._left == 0:
            head, _, body = data.partition(b"\r\n\r\n")
            length = head.lower().index(b"content-length:") + 15
            self._left = int(head[length:].split(b"\r\n", 1)[0]) - len(body)
            self._stream = b'"stream": true' in body
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
    from kvherd.ports.worker import Call, Responder  # noqa: PLC0415
    from kvherd.services.gateway.relay.edge import DataRequest  # noqa: PLC0415
    from kvherd.services.gateway.relay.server import RelayServer  # noqa: PLC0415

    workers = itertools.cycle([HttpWorker(WorkerId(url), url) for url in urls])

    async def forward(incoming: DataRequest, responder: Responder) -> None:
        call = Call(incoming.method, incoming.target, incoming.headers, incoming.body, incoming.request)
        await next(workers).forward(call, responder)

    async def no_app(*_: object) -> None:
        raise NotImplementedError

    async with RelayServer(forward, no_app) as relay:
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


def pin(core: int) -> None:
    """The proxy has core 0, all else the others; no choice where there is one core."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(0, {cores[0]} if core == 0 else set(cores[1:]))


@contextmanager
def process(arguments: list[str], *, core: int, stdout: int = subprocess.DEVNULL) -> Iterator[subprocess.Popen[str]]:
    """Run it within the block; its errors go to this process's own unless its output is not wanted either."""
    errors = subprocess.DEVNULL if stdout == subprocess.DEVNULL else None
    # A preexec_fn is unsafe among threads only, and this program has one.
    place = partial(pin, core)
    child = subprocess.Popen(arguments, text=True, stdout=stdout, stderr=errors, preexec_fn=place)  # noqa: PLW1509
    try:
        yield child
    finally:
        child.send_signal(signal.SIGINT if "nginx" not in arguments[0] else signal.SIGTERM)
        try:
            child.wait(5)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        if child.stdout is not None:
            child.stdout.close()


def role(*arguments: str) -> list[str]:
    return [sys.executable, str(HERE), *arguments]


def port_of(child: subprocess.Popen[str]) -> int:
    assert child.stdout is not None
    return int(child.stdout.readline())


@contextmanager
def nginx(ports: list[int]) -> Iterator[tuple[int, int]]:
    """(pid, port) of an nginx with one worker process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    engines = " ".join(f"server 127.0.0.1:{engine};" for engine in ports)
    with tempfile.TemporaryDirectory() as folder:
        conf = Path(folder, "nginx.conf")
        conf.write_text(
            f"worker_processes 1; daemon off; pid {folder}/pid; error_log {folder}/error.log;\n"
            f"events {{ worker_connections 1024; }}\nhttp {{ access_log off; keepalive_requests 1000000000;\n"
            f"client_body_temp_path {folder}/b; proxy_temp_path {folder}/p; fastcgi_temp_path {folder}/f;\n"
            f"uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s; client_body_buffer_size 64k;\n"
            f"upstream engines {{ {engines} keepalive 128; keepalive_requests 1000000000; }}\n"
            f"server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://engines; proxy_http_version 1.1;\n"
            f'proxy_set_header Connection ""; proxy_buffering off; }} }} }}\n'
        )
        with process(["nginx", "-p", folder, "-c", str(conf)], core=0) as child:
            wait_for_port(port)
            yield child.pid, port


def wait_for_port(port: int) -> None:
    end_s = time.monotonic() + 10
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            if time.monotonic() > end_s:
                raise
            time.sleep(0.02)
        else:
            return


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
        if shutil.which("nginx"):
            pid, port = stack.enter_context(nginx(ports))
            proxies.append(("nginx", pid, port))
        else:
            print("nginx is not installed (Debian: apt-get install nginx-light): measuring the relay alone")
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
    print(f"{'proxy':14}{'answer':17}{'CPU µs/request':>15}{'/event':>9}{'requests/s':>12}{'p50 ms':>9}{'p99 ms':>9}")
    for figure in figures:
        event = f"{figure.cpu_us_per_event:.1f}" if figure.cpu_us_per_event is not None else ""
        print(
            f"{figure.proxy:14}{figure.answer:17}{figure.cpu_us_per_request:15.1f}{event:>9}"
            f"{figure.requests_per_s:12.0f}{figure.p50_ms:9.2f}{figure.p99_ms:9.2f}"
        )
    ratios = {}
    for answer in dict.fromkeys(figure.answer for figure in figures):
        cpu = {figure.proxy: figure.cpu_us_per_request for figure in figures if figure.answer == answer}
        if "nginx" in cpu:
            ratios[answer] = cpu["kvherd relay"] / cpu["nginx"]
            print(f"{answer}: {ratios[answer]:.2f}x the CPU of nginx")
    out = HERE.parent / "out"
    out.mkdir(exist_ok=True)
    (out / "relay.json").write_text(
        json.dumps({"figures": [asdict(figure) for figure in figures], "cpu_ratio_to_nginx": ratios}, indent=2)
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
